"""Local SGD over dp_replicate: replicas train apart for `sync_every` steps, then take an outer step together.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): the outer gradient is the mean over the replicas of
(outer parameters - the replica's own), the outer optimizer is SGD with Nesterov momentum, and its result is where all
replicas go on. With outer rate 1 and no momentum it is plain averaging (local SGD; Stich 2018, arXiv 1805.09767).
With `fragments` and `overlap_steps` it is Streaming DiLoCo (arXiv 2501.18512, algorithm 2).

Everything here works on this rank's part of each parameter (`LocalParameter.local`), whatever tp, pp and dp_shard are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import LocalSgdConfig
from parallel3d.diagnosis.replicas import Copies
from parallel3d.errors import NonFiniteError
from parallel3d.layers.collectives import all_reduce, all_reduce_over
from parallel3d.mesh import Axis
from parallel3d.optimizers.step_bytes import runs
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.torch_private import group_of
from parallel3d.training.local_sgd.transport import CODECS, MeanOverReplicas

BUCKET_ELEMENTS = 2**24  # the most elements that are sent in one go: 64 MiB of float32


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """Each of `fragments` parts of the model is synchronised every `sync_every` steps, at even distances from each
    other, and what it sends is used `overlap_steps` later (Streaming DiLoCo, arXiv 2501.18512, section 2)."""

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    def fragment_of(self, name: str) -> int:
        """Returns the fragment of a parameter by its global name. Blocks take turns (the paper's strided pattern), so
        that every pipeline stage has some of each fragment. The embedding is in the first fragment, the last norm and
        the head are in the last."""
        block = re.match(r"layers\.(\d+)\.", name)
        if block is not None:
            return int(block[1]) % self.fragments
        return 0 if name.startswith("embed.") else self.fragments - 1

    def sent(self, step: int) -> list[int]:
        """Returns the fragments whose pseudo-gradients are sent after `step` (the first is 1)."""
        # The first step after which a fragment is synchronised; for the last fragment it is `sync_every`.
        first = [(fragment + 1) * self.sync_every // self.fragments for fragment in range(self.fragments)]
        return [f for f in range(self.fragments) if step > 0 and (step - first[f]) % self.sync_every == 0]

    def halfway(self, step: int) -> list[int]:
        """Returns the fragments whose parts each replica has received after `step`, and whose mean it then sends."""
        return self.sent(step - -(-self.overlap_steps // 2))

    def due(self, step: int) -> list[int]:
        """Returns the fragments that take their outer step after `step`."""
        return self.sent(step - self.overlap_steps)


class OuterParameter:
    """The outer value of one parameter, equal on all replicas: float32, of the shape of this rank's part."""

    def __init__(self, inner: LocalParameter) -> None:
        self.inner = inner
        self.value = inner.local.detach().float().clone()
        self.mean: Tensor | None = None  # the mean pseudo-gradient, from its arrival until it is due

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
        ranks = dist.get_process_group_ranks(replicas.group)
        self._wire = replace(replicas, group=group_of(ranks, "local_sgd"))
        self.parameters = [OuterParameter(parameter) for parameter in parameters]
        self.fragments: list[list[OuterParameter]] = [[] for _ in range(config.fragments)]
        for outer in self.parameters:
            self.fragments[self.schedule.fragment_of(outer.inner.name)].append(outer)
        values = [outer.value for outer in self.parameters]
        self.optimizer = torch.optim.SGD(values, config.outer_lr, config.outer_momentum, nesterov=config.nesterov)
        if config.outer_momentum > 0:  # the buffers are made now, so that every checkpoint has them
            for value in values:
                self.optimizer.state[value]["momentum_buffer"] = torch.zeros_like(value)
        # What is on its way, by fragment: an empty list once all of its buckets have arrived.
        self._on_their_way: dict[int, list[tuple[list[OuterParameter], MeanOverReplicas]]] = {}
        self._same = set(range(config.fragments))  # fragments whose outer parameters the replicas now have

    @property
    def copies(self) -> Copies:
        """What all replicas hold alike while they train apart: the outer parameters and their momentum."""
        tensors = {f"outer {outer.inner.name}": outer.value for outer in self.parameters}
        for outer in self.parameters:
            states = self.optimizer.state[outer.value]
            tensors |= {f"optimizer.outer.{kind}.{outer.inner.name}": state for kind, state in states.items()}
        return Copies(self.replicas, {name: tensor for name, tensor in tensors.items() if tensor is not None})

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
            for _, mean in self._on_their_way.get(fragment, []):
                mean.gather()
        for fragment in self.schedule.due(step):
            if fragment in self._on_their_way:  # not so after a resume from another schedule
                self._receive(fragment, step, self.config.kept)
        if step == self.steps:
            self.merge(step)

    def merge(self, step: int) -> None:
        """Brings all replicas together after `step`, the run's last, so that its result is the same on all of them.
        Raises NonFiniteError as `after_step` does."""
        for fragment in self.settle():
            self._receive(fragment, step, self.config.kept)
        for fragment in sorted(set(range(self.config.fragments)) - self._same):
            self._send(fragment)
            self._receive(fragment, step, 0.0)

    @contextmanager
    def outer_parameters(self, publish: Callable[[], None]) -> Iterator[None]:
        """Puts the outer parameters in the place of this replica's own, from here to the end of the block. `publish` is
        called after each change."""
        if len(self._same) == self.config.fragments:
            yield
            return
        own = [outer.inner.local.detach().clone() for outer in self.parameters]
        for outer in self.parameters:
            outer.give(0.0)
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
            for outer in self.parameters:
                outer.give(0.0)

    def begin(self) -> None:
        """Begins with the values that were loaded into the parameters, equal on all replicas."""
        for outer in self.parameters:
            outer.value.copy_(outer.inner.local.detach())

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        self._on_their_way[fragment] = []
        for bucket in runs(self.fragments[fragment], lambda outer: outer.value.numel(), most=BUCKET_ELEMENTS):
            differences = [outer.value - outer.inner.local.detach() for outer in bucket]
            mean = MeanOverReplicas(differences, self._wire, self._codec)
            self._on_their_way[fragment].append((bucket, mean))
            if self.config.overlap_steps == 0:
                self._arrive(fragment)  # one bucket at a time takes less memory

    def _arrive(self, fragment: int) -> None:
        for bucket, means in self._on_their_way[fragment]:
            for outer, mean in zip(bucket, means.wait(), strict=True):
                outer.mean = mean
        self._on_their_way[fragment] = []

    def _receive(self, fragment: int, step: int, kept: float) -> None:
        """Takes the outer step of a fragment. Raises NonFiniteError on all ranks if a mean is not finite on any:
        replicas have the same means, but ranks of one replica do not."""
        self._arrive(fragment)
        parameters = self.fragments[fragment]
        bad = torch.zeros((), dtype=torch.float64, device=self.parameters[0].value.device)
        for outer in parameters:
            if outer.mean is not None:
                bad += ~torch.isfinite(outer.mean).all()
        if all_reduce_over(self._axes, bad).item():
            limit = " or is beyond 65504, float16's largest number" if self.config.transport == "fp16" else ""
            raise NonFiniteError(
                f"step {step}: the mean difference of the replicas' parameters is not finite{limit}. "
                "A lower optimizer.lr, or local_sgd.transport=fp32, may do"
            )
        for outer in parameters:
            outer.value.grad, outer.mean = outer.mean, None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for outer in parameters:
            outer.give(kept)
        del self._on_their_way[fragment]
        if kept == 0.0:
            self._same.add(fragment)
