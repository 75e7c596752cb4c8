"""Local SGD over dp_replicate: replicas train apart for `sync_every` steps, then take an outer step together.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): the outer gradient is the mean over the replicas of
(outer parameters - the replica's own), the outer optimizer is SGD with Nesterov momentum, and its result is where all
replicas go on. With outer rate 1 and no momentum it is plain averaging (local SGD; Stich 2018, arXiv 1805.09767).
With `fragments` and `overlap_steps` it is Streaming DiLoCo (arXiv 2501.18512, algorithm 2).

Everything here works on this rank's plain parts of the parameters, whatever tp, pp and dp_shard are inside a replica:
the outer parameters and their momentum are cut as `LocalParameter.local` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import LocalSgdConfig
from parallel3d.errors import NonFiniteError
from parallel3d.layers.collectives import all_reduce, all_reduce_over
from parallel3d.mesh import Axis
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.training.local_sgd.schedule import SyncSchedule
from parallel3d.training.local_sgd.transport import CODECS, MeanOverReplicas

BUCKET_ELEMENTS = 2**24  # the most elements that are sent in one go: 64 MiB of float32


class OuterParameter:
    """The outer value of one parameter, equal on all replicas: float32, of the shape of this rank's part."""

    def __init__(self, inner: LocalParameter) -> None:
        self.inner = inner
        self.value = inner.local.detach().float().clone()
        self.mean: Tensor | None = None  # the mean pseudo-gradient, from its arrival until it is due

    def pseudo_gradient(self) -> Tensor:
        return self.value - self.inner.local.detach()

    @torch.no_grad()
    def give(self, kept: float) -> None:
        """Sets this replica's parameter to the outer value, mixed with the share `kept` of its own."""
        if kept == 0.0:
            self.inner.local.copy_(self.value)
        else:
            self.inner.local.lerp_(self.value.to(self.inner.local.dtype), 1.0 - kept)


class LocalSgd:
    """The outer loop. All ranks build it at once, when the parameters have their initial weights."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        config: LocalSgdConfig,
        *,
        replicas: Axis,
        axes: Mapping[str, Axis],
        steps: int,
    ) -> None:
        """`replicas` is the axis dp_replicate, `axes` are the axes of the replica's own mesh, and `steps` counts the
        steps of the whole run."""
        assert config.sync_every is not None
        self.config, self.steps, self.replicas = config, steps, replicas
        self.schedule = SyncSchedule(
            sync_every=config.sync_every, fragments=config.fragments, overlap_steps=config.overlap_steps
        )
        self._axes, self._codec = axes, CODECS[config.transport]
        # Fragments have a group of their own, because what is sent in every step must not queue behind a fragment.
        self._wire = replace(replicas, group=_group_like(replicas))
        self.parameters = [OuterParameter(parameter) for parameter in parameters]
        self._fragments: list[list[OuterParameter]] = [[] for _ in range(config.fragments)]
        for outer in self.parameters:
            self._fragments[self.schedule.fragment_of(outer.inner.name)].append(outer)
        self.optimizer = _outer_optimizer([outer.value for outer in self.parameters], config)
        self._on_their_way: dict[int, list[_BucketOnItsWay]] = {}  # by fragment; an empty list once all has arrived
        self._same = set(range(config.fragments))  # fragments whose outer parameters the replicas now have

    def mean(self, x: Tensor) -> Tensor:
        """Returns the mean of `x` over the replicas. It is sent in every step, so keep it small."""
        return all_reduce(x, self.replicas) / self.replicas.size

    def after_step(self, step: int) -> None:
        """Sends and receives what is due after the replicas' own optimizers have made `step`. Raises NonFiniteError,
        with the outer parameters unchanged, where a pseudo-gradient is not finite."""
        self._same.clear()
        for fragment in self.schedule.sent(step):
            self._send(fragment)
        for fragment in self.schedule.halfway(step):
            for sent in self._on_their_way.get(fragment, []):
                sent.mean.gather()
        for fragment in self.schedule.due(step):
            if fragment in self._on_their_way:  # not so after a resume from another schedule
                self._receive(fragment, step, self.config.kept)
        if step == self.steps:
            self._finish(step)

    @contextmanager
    def outer_parameters(self, publish: Callable[[], None]) -> Iterator[None]:
        """Puts the outer parameters in the place of this replica's own, from here to the end of the block. `publish` is
        called after each change."""
        if len(self._same) == self.config.fragments:
            yield
            return
        own = [outer.inner.local.detach().clone() for outer in self.parameters]
        self._give_all()
        publish()
        try:
            yield
        finally:
            with torch.no_grad():
                for outer, value in zip(self.parameters, own, strict=True):
                    outer.inner.local.copy_(value)
            publish()

    def settle(self) -> list[int]:
        """Waits for all fragments on their way, leaves them in `OuterParameter.mean`, and returns their numbers."""
        for fragment in sorted(self._on_their_way):
            self._arrive(fragment)
        return sorted(self._on_their_way)

    def resume(self, on_their_way: Sequence[int], *, from_outer: bool) -> None:
        """Goes on with values that were loaded into the parameters, the outer parameters, and the `mean` of the
        fragments on their way. With `from_outer` this replica starts from the outer parameters."""
        self._on_their_way = {fragment: [] for fragment in on_their_way}
        self._same = set()
        if from_outer:
            self._give_all()

    def parameters_of(self, fragment: int) -> list[OuterParameter]:
        return self._fragments[fragment]

    def _give_all(self) -> None:
        for outer in self.parameters:
            outer.give(0.0)

    def _finish(self, step: int) -> None:
        """Brings all replicas together at the end of a run, so that its result is the same on all of them."""
        for fragment in sorted(self._on_their_way):
            self._receive(fragment, step, self.config.kept)
        for fragment in range(self.config.fragments):
            if fragment not in self._same:
                self._send(fragment)
                self._receive(fragment, step, 0.0)

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        self._on_their_way[fragment] = []
        for bucket in _buckets(self._fragments[fragment]):
            mean = MeanOverReplicas([outer.pseudo_gradient() for outer in bucket], self._wire, self._codec)
            self._on_their_way[fragment].append(_BucketOnItsWay(bucket, mean))
            if self.config.overlap_steps == 0:
                self._arrive(fragment)  # one bucket at a time takes less memory

    def _arrive(self, fragment: int) -> None:
        for sent in self._on_their_way[fragment]:
            for outer, mean in zip(sent.bucket, sent.mean.wait(), strict=True):
                outer.mean = mean
        self._on_their_way[fragment] = []

    def _receive(self, fragment: int, step: int, kept: float) -> None:
        self._arrive(fragment)
        parameters = self._fragments[fragment]
        self._check_finite([outer.mean for outer in parameters if outer.mean is not None], step)
        for outer in parameters:
            outer.value.grad, outer.mean = outer.mean, None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for outer in parameters:
            outer.give(kept)
        del self._on_their_way[fragment]
        if kept == 0.0:
            self._same.add(fragment)

    def _check_finite(self, means: Sequence[Tensor], step: int) -> None:
        """Raises NonFiniteError on all ranks if a mean is not finite on any. Replicas have the same means, but ranks of
        one replica do not."""
        bad = sum(int(not torch.isfinite(mean).all()) for mean in means)
        device = self.parameters[0].value.device
        if all_reduce_over(self._axes, torch.tensor(float(bad), dtype=torch.float64, device=device)).item():
            limit = " or is beyond 65504, float16's largest number" if self.config.transport == "fp16" else ""
            raise NonFiniteError(
                f"step {step}: the mean difference of the replicas' parameters is not finite{limit}. "
                "A lower optimizer.lr, or local_sgd.transport=fp32, may do"
            )


@dataclass(frozen=True)
class _BucketOnItsWay:
    bucket: list[OuterParameter]
    mean: MeanOverReplicas


def _buckets(parameters: Sequence[OuterParameter]) -> Iterator[list[OuterParameter]]:
    """Yields runs of parameters of at most BUCKET_ELEMENTS, or a single larger parameter."""
    bucket: list[OuterParameter] = []
    for outer in parameters:
        if bucket and sum(other.value.numel() for other in (*bucket, outer)) > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(outer)
    if bucket:
        yield bucket


def _outer_optimizer(values: list[Tensor], config: LocalSgdConfig) -> torch.optim.SGD:
    optimizer = torch.optim.SGD(values, config.outer_lr, config.outer_momentum, nesterov=config.nesterov)
    if config.outer_momentum > 0:  # the buffers are made now, so that every checkpoint has them
        for value in values:
            optimizer.state[value]["momentum_buffer"] = torch.zeros_like(value)
    return optimizer


def _group_like(axis: Axis) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(axis.group)
    group = dist.new_group(ranks, use_local_synchronization=True, group_desc="local_sgd")
    assert isinstance(group, dist.ProcessGroup)
    return group
