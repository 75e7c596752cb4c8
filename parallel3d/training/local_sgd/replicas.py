"""Local SGD over dp_replicate: replicas train apart for `sync_every` steps, then take an outer step
together.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): the outer gradient is the mean over
the replicas of (outer parameters - the replica's own), the outer optimizer is SGD with Nesterov
momentum, and its result is where all replicas go on. With outer rate 1 and no momentum it is plain
averaging (local SGD; Stich 2018, arXiv 1805.09767). With `fragments` and `overlap_steps` it is
Streaming DiLoCo (arXiv 2501.18512, algorithm 2).

A checkpoint holds, and a synchronous run reads:

    model.<name>                 outer parameters, which export and other runs take for the model
    outer.momentum.<name>        momentum of the outer optimizer
    outer.mean.<name>            mean pseudo-gradient of a fragment that no outer step has used yet
    replica.<r>.<other names>    the tensors of a synchronous run, for each replica

Everything here works on this rank's part of each parameter (`LocalParameter.local`), whatever tp,
pp and dp_shard are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.checkpoint.files import MODEL
from parallel3d.checkpoint.manifest import SavedReplicas
from parallel3d.config.recipe import LocalSgdConfig
from parallel3d.diagnosis.replicas import Copies
from parallel3d.errors import NonFiniteError
from parallel3d.layers.collectives import all_reduce, all_reduce_over
from parallel3d.mesh import Axis
from parallel3d.optimizers.step_bytes import runs
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.torch_private import group_of
from parallel3d.training.local_sgd.transport import CODECS, MeanOverReplicas
from parallel3d.training.outer_loop import Tensors
from parallel3d.training.step_result import StepTotals

BUCKET_ELEMENTS = 2**24  # the most elements that are sent in one go: 64 MiB of float32


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """Each of `fragments` parts of the model is synchronised every `sync_every` steps, at even
    distances from each other, and what it sends is used `overlap_steps` later (Streaming DiLoCo,
    arXiv 2501.18512, section 2)."""

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    def fragment_of(self, name: str) -> int:
        """Returns the fragment of a parameter by its global name. Blocks take turns (the paper's
        strided pattern), so that every pipeline stage has some of each fragment. The embedding is
        in the first fragment, the last norm and the head are in the last."""
        block = re.match(r"layers\.(\d+)\.", name)
        if block is not None:
            return int(block[1]) % self.fragments
        return 0 if name.startswith("embed.") else self.fragments - 1

    def sent(self, step: int) -> list[int]:
        """Returns the fragments whose pseudo-gradients are sent after `step` (the first is 1)."""
        # The first step after which a fragment is synchronised; for the last fragment it is
        # `sync_every`.
        first = [
            (fragment + 1) * self.sync_every // self.fragments for fragment in range(self.fragments)
        ]
        return [
            f
            for f in range(self.fragments)
            if step > 0 and (step - first[f]) % self.sync_every == 0
        ]

    def halfway(self, step: int) -> list[int]:
        """Returns the fragments whose parts each replica has received after `step`, and whose mean
        it then sends."""
        return self.sent(step - -(-self.overlap_steps // 2))

    def due(self, step: int) -> list[int]:
        """Returns the fragments that take their outer step after `step`."""
        return self.sent(step - self.overlap_steps)


@dataclass(eq=False)
class OuterParameter:
    """The outer value of one parameter and its momentum, equal on all replicas: float32, of the
    shape of this rank's part."""

    inner: LocalParameter
    value: Tensor
    momentum: Tensor | None
    mean: Tensor | None = None  # the mean pseudo-gradient, from its arrival until it is due

    @torch.no_grad()
    def take_step(self, config: LocalSgdConfig) -> None:
        """Steps the outer value by the mean pseudo-gradient, as `torch.optim.SGD` does."""
        assert self.mean is not None
        step, self.mean = self.mean, None
        if self.momentum is not None:
            self.momentum.mul_(config.outer_momentum).add_(step)
            if config.nesterov:
                step = step.add(self.momentum, alpha=config.outer_momentum)
            else:
                step = self.momentum
        self.value.add_(step, alpha=-config.outer_lr)

    @torch.no_grad()
    def give(self, kept: float) -> None:
        """Sets this replica's parameter to the outer value, mixed with the share `kept` of its
        own."""
        if kept == 0.0:
            self.inner.local.copy_(self.value)
        else:
            self.inner.local.lerp_(self.value.to(self.inner.local.dtype), 1.0 - kept)


class LocalSgd:
    """The outer loop. All ranks build it at once, when the parameters have their initial
    weights."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        config: LocalSgdConfig,
        *,
        replicas: Axis,
        axes: Mapping[str, Axis],
        steps: int,
    ) -> None:
        """`replicas` is the axis dp_replicate, `axes` are the axes of the replica's own mesh, and
        `steps` counts the steps of the whole run."""
        assert config.sync_every is not None
        self.config, self.steps, self.replicas = config, steps, replicas
        self.schedule = SyncSchedule(
            sync_every=config.sync_every,
            fragments=config.fragments,
            overlap_steps=config.overlap_steps,
        )
        self._axes = axes
        # Fragments have a group of their own, because what is sent in every step must not queue
        # behind a fragment.
        ranks = dist.get_process_group_ranks(replicas.group)
        self._wire = replace(replicas, group=group_of(ranks, "local_sgd"))
        self.parameters: list[OuterParameter] = []
        self.fragments: list[list[OuterParameter]] = [[] for _ in range(config.fragments)]
        for inner in parameters:
            value = inner.local.detach().float().clone()
            # Momentum begins now, so that every checkpoint has it.
            momentum = torch.zeros_like(value) if config.outer_momentum > 0 else None
            outer = OuterParameter(inner, value, momentum)
            self.parameters.append(outer)
            self.fragments[self.schedule.fragment_of(inner.name)].append(outer)
        # What is on its way, by fragment: an empty list once all of its buckets have arrived.
        self._on_their_way: dict[int, list[tuple[list[OuterParameter], MeanOverReplicas]]] = {}
        # fragments whose outer parameters the replicas now have
        self._same = set(range(config.fragments))
        self._is_evaluating = False

    def copies(self) -> Copies:
        """Returns the outer parameters and their momentum, which all replicas hold alike."""
        tensors = {f"outer {outer.inner.name}": outer.value for outer in self.parameters}
        for outer in self.parameters:
            if outer.momentum is not None:
                tensors[f"optimizer.outer.momentum_buffer.{outer.inner.name}"] = outer.momentum
        return Copies(self.replicas, tensors)

    def combine(self, totals: StepTotals) -> StepTotals:
        """Returns the mean loss over the labels of all replicas, and the root of the mean square of
        their gradient norms. `tokens` is 0 if any replica has nothing to train on."""
        loss, norm, tokens, votes, refusals = totals
        is_empty = (tokens == 0).double()
        known = torch.stack((loss * tokens, norm.square(), tokens, votes, refusals, is_empty))
        mean = all_reduce(known, self.replicas) / self.replicas.size
        loss, square, tokens, votes, refusals, empty = mean.unbind()
        all_tokens = tokens * self.replicas.size
        if not self._is_evaluating:
            all_tokens = all_tokens * (empty == 0)
        return StepTotals(loss / tokens.clamp(min=1.0), square.sqrt(), all_tokens, votes, refusals)

    def after_step(self, step: int) -> None:
        """Sends and receives the fragments that are due after `step`. Raises NonFiniteError, with
        the outer parameters unchanged, if a pseudo-gradient is not finite."""
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
            self.finish(step)

    def finish(self, step: int) -> None:
        for fragment in self._settle():
            self._receive(fragment, step, self.config.kept)
        for fragment in sorted(set(range(self.config.fragments)) - self._same):
            self._send(fragment)
            self._receive(fragment, step, 0.0)

    @contextmanager
    def evaluating(self, publish: Callable[[], None]) -> Iterator[None]:
        """Puts the outer parameters, which are the result of the run, in place of this replica's
        own for a block."""
        own = [outer.inner.local.detach().clone() for outer in self.parameters]
        for outer in self.parameters:
            outer.give(0.0)
        publish()
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False
            for outer, value in zip(self.parameters, own, strict=True):
                outer.inner.local.detach().copy_(value)
            publish()

    def begin(self) -> None:
        for outer in self.parameters:
            outer.value.copy_(outer.inner.local.detach())

    def save(self, state: Tensors) -> tuple[Tensors, SavedReplicas]:
        has_momentum = self.config.outer_momentum > 0
        saved = SavedReplicas(
            replicas=self.replicas.size,
            **asdict(self.schedule),
            has_momentum=has_momentum,
            on_their_way=self._settle(),
        )
        own = {f"replica.{self.replicas.rank}.{name}": tensor for name, tensor in state.items()}
        return own | self._outer_tensors(with_momentum=has_momentum), saved

    def tensors_to_load(self, state: Tensors, saved: SavedReplicas | None) -> Tensors:
        self._settle()  # or it would arrive in the parameters that are loaded
        for outer in self.parameters:
            outer.mean = None
        for fragment in self._continued(saved):
            for outer in self.fragments[fragment]:
                outer.mean = torch.zeros_like(outer.value)
        if saved is None:
            own = {name: tensor for name, tensor in state.items() if not name.startswith(MODEL)}
            return self._outer_tensors(with_momentum=False) | own
        keeps_replicas = saved.replicas == self.replicas.size
        replica = self.replicas.rank % saved.replicas
        own = {
            f"replica.{replica}.{name}": tensor
            for name, tensor in state.items()
            if keeps_replicas or not name.startswith(MODEL)
        }
        return self._outer_tensors(with_momentum=saved.has_momentum) | own

    @torch.no_grad()
    def after_loading(self, saved: SavedReplicas | None) -> None:
        """Continues from the tensors that were loaded. Each replica starts from the outer
        parameters, unless the checkpoint holds equally many replicas."""
        first: dict[str, OuterParameter] = {}
        for outer in self.parameters:
            if outer.momentum is not None and (saved is None or not saved.has_momentum):
                outer.momentum.zero_()
            # a tied weight that this rank has twice is in the checkpoint once
            twin = first.setdefault(outer.inner.name, outer)
            outer.value.copy_(twin.value)
            if outer.momentum is not None and twin.momentum is not None:
                outer.momentum.copy_(twin.momentum)
            if outer.mean is not None and twin.mean is not None:
                outer.mean.copy_(twin.mean)
        self._on_their_way = {fragment: [] for fragment in self._continued(saved)}
        self._same = set()
        if saved is None or saved.replicas != self.replicas.size:
            for outer in self.parameters:
                outer.give(0.0)

    def _continued(self, saved: SavedReplicas | None) -> Sequence[int]:
        """Returns the checkpoint's fragments on their way, if this run has the same schedule."""
        if saved is None or not asdict(self.schedule).items() <= vars(saved).items():
            return ()
        return saved.on_their_way

    def _outer_tensors(self, *, with_momentum: bool) -> Tensors:
        """Maps names to the tensors that all ranks of a replica hold together."""
        tensors: Tensors = {}
        for outer in self.parameters:
            kinds = {"model": outer.value, "outer.mean": outer.mean}
            if with_momentum:
                kinds["outer.momentum"] = outer.momentum
            for kind, tensor in kinds.items():
                name = f"{kind}.{outer.inner.name}"
                if tensor is not None and name not in tensors:
                    tensors[name] = outer.inner.distributed(tensor)
        return tensors

    def _settle(self) -> tuple[int, ...]:
        """Waits for all fragments on their way, leaves them in `OuterParameter.mean`, and returns
        their numbers."""
        for fragment in sorted(self._on_their_way):
            self._arrive(fragment)
        return tuple(sorted(self._on_their_way))

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        self._on_their_way[fragment] = []
        for bucket in runs(
            self.fragments[fragment], lambda outer: outer.value.numel(), most=BUCKET_ELEMENTS
        ):
            differences = [outer.value - outer.inner.local.detach() for outer in bucket]
            mean = MeanOverReplicas(differences, self._wire, CODECS[self.config.transport])
            self._on_their_way[fragment].append((bucket, mean))
            if self.config.overlap_steps == 0:
                self._arrive(fragment)  # one bucket at a time takes less memory

    def _arrive(self, fragment: int) -> None:
        for bucket, means in self._on_their_way[fragment]:
            for outer, mean in zip(bucket, means.wait(), strict=True):
                outer.mean = mean
        self._on_their_way[fragment] = []

    def _receive(self, fragment: int, step: int, kept: float) -> None:
        """Takes the outer step of a fragment. Raises NonFiniteError on all ranks if a mean is not
        finite on any: replicas have the same means, but ranks of one replica do not."""
        self._arrive(fragment)
        arrived = [outer for outer in self.fragments[fragment] if outer.mean is not None]
        bad = torch.zeros((), dtype=torch.float64, device=self.parameters[0].value.device)
        for outer in arrived:
            assert outer.mean is not None
            bad += ~torch.isfinite(outer.mean).all()
        if all_reduce_over(self._axes, bad).item():
            is_fp16 = self.config.transport == "fp16"
            limit = " or is beyond 65504, float16's largest number" if is_fp16 else ""
            raise NonFiniteError(
                f"step {step}: the mean difference of the replicas' parameters is not "
                f"finite{limit}. A lower optimizer.lr, or local_sgd.transport=fp32, may do"
            )
        for outer in arrived:
            outer.take_step(self.config)
        for outer in self.fragments[fragment]:
            outer.give(kept)
        del self._on_their_way[fragment]
        if kept == 0.0:
            self._same.add(fragment)


def tensors_of_one_replica(state: Tensors, saved: SavedReplicas | None) -> Tensors:
    """Maps names in a checkpoint to the tensors of a synchronous run: the outer parameters, and all
    else of the first replica."""
    if saved is None:
        return state
    return {
        name if name.startswith(MODEL) else f"replica.0.{name}": tensor
        for name, tensor in state.items()
    }
