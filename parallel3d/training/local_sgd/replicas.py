"""Local SGD over dp_replicate: replicas train apart for `sync_every` steps, then take an outer step
together.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): the outer gradient is the mean over
the replicas of (outer parameters - the replica's own), the outer optimizer is SGD with Nesterov
momentum, and its result is where all replicas go on. With outer rate 1 and no momentum it is plain
averaging (local SGD; Stich 2018, arXiv 1805.09767). With `fragments` and `overlap_steps` it is
Streaming DiLoCo (arXiv 2501.18512, algorithm 2).

Everything here works on this rank's part of each parameter (`LocalParameter.local`), whatever tp,
pp and dp_shard are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from parallel3d.training.local_sgd.state import SavedReplicas
from parallel3d.training.local_sgd.transport import CODECS, MeanOverReplicas
from parallel3d.training.outer_loop import Saved, Tensors
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


class OuterParameter:
    """The outer value of one parameter, equal on all replicas: float32, of the shape of this rank's
    part."""

    def __init__(self, inner: LocalParameter) -> None:
        self.inner = inner
        self.value = inner.local.detach().float().clone()
        # the mean pseudo-gradient, from its arrival until it is due
        self.mean: Tensor | None = None

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
        self._axes, self._codec = axes, CODECS[config.transport]
        # Fragments have a group of their own, because what is sent in every step must not queue
        # behind a fragment.
        ranks = dist.get_process_group_ranks(replicas.group)
        self._wire = replace(replicas, group=group_of(ranks, "local_sgd"))
        self.parameters = [OuterParameter(parameter) for parameter in parameters]
        self.fragments: list[list[OuterParameter]] = [[] for _ in range(config.fragments)]
        for outer in self.parameters:
            self.fragments[self.schedule.fragment_of(outer.inner.name)].append(outer)
        values = [outer.value for outer in self.parameters]
        self.optimizer = torch.optim.SGD(
            values, config.outer_lr, config.outer_momentum, nesterov=config.nesterov
        )
        if config.outer_momentum > 0:  # the buffers are made now, so that every checkpoint has them
            for value in values:
                self.optimizer.state[value]["momentum_buffer"] = torch.zeros_like(value)
        # What is on its way, by fragment: an empty list once all of its buckets have arrived.
        self._on_their_way: dict[int, list[tuple[list[OuterParameter], MeanOverReplicas]]] = {}
        # fragments whose outer parameters the replicas now have
        self._same = set(range(config.fragments))
        self._is_evaluating = False

    def copies(self) -> Copies:
        """Returns the outer parameters and their momentum, which all replicas hold alike."""
        tensors = {f"outer {outer.inner.name}": outer.value for outer in self.parameters}
        for outer in self.parameters:
            momentum = self._momentum(outer)
            if momentum is not None:
                tensors[f"optimizer.outer.momentum_buffer.{outer.inner.name}"] = momentum
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
        self._is_evaluating = True
        is_apart = len(self._same) < self.config.fragments
        own = [outer.inner.local.detach().clone() for outer in self.parameters if is_apart]
        if is_apart:
            for outer in self.parameters:
                outer.give(0.0)
            publish()
        try:
            yield
        finally:
            self._is_evaluating = False
            if is_apart:
                for outer, value in zip(self.parameters, own, strict=True):
                    outer.inner.local.detach().copy_(value)
                publish()

    def begin(self) -> None:
        for outer in self.parameters:
            outer.value.copy_(outer.inner.local.detach())

    def save(self, state: Tensors) -> tuple[Tensors, dict[str, Any]]:
        saved = SavedReplicas(
            replicas=self.replicas.size,
            **asdict(self.schedule),
            has_momentum=self.config.outer_momentum > 0,
            on_their_way=self._settle(),
        )
        own = {f"replica.{self.replicas.rank}.{name}": tensor for name, tensor in state.items()}
        return own | self._outer_tensors(with_momentum=saved.has_momentum), asdict(saved)

    def tensors_to_load(self, state: Tensors, saved: Saved, path: Path) -> Tensors:
        found = SavedReplicas.read(saved, path)
        self._settle()  # or it would arrive in the parameters that are loaded
        for outer in self.parameters:
            outer.mean = None
        for fragment in self._continued(found):
            for outer in self.fragments[fragment]:
                outer.mean = torch.zeros_like(outer.value)
        own, has_momentum = "", False
        if found is not None:
            own = f"replica.{self.replicas.rank % found.replicas}."
            has_momentum = found.has_momentum and self.config.outer_momentum > 0
        keeps_replicas = found is not None and found.replicas == self.replicas.size
        return self._outer_tensors(with_momentum=has_momentum) | {
            f"{own}{name}": tensor
            for name, tensor in state.items()
            if keeps_replicas or not name.startswith("model.")
        }

    @torch.no_grad()
    def after_loading(self, saved: Saved, path: Path) -> None:
        """Continues from the tensors that were loaded. Each replica starts from the outer
        parameters, unless the checkpoint holds equally many replicas."""
        found = SavedReplicas.read(saved, path)
        first: dict[str, OuterParameter] = {}
        for outer in self.parameters:
            momentum = self._momentum(outer)
            if momentum is not None and (found is None or not found.has_momentum):
                momentum.zero_()
            twin = first.setdefault(outer.inner.name, outer)
            if twin is outer:
                continue
            # a tied weight that this rank has twice is in the checkpoint once
            outer.value.copy_(twin.value)
            if momentum is not None:
                momentum.copy_(self.optimizer.state[twin.value]["momentum_buffer"])
            if outer.mean is not None and twin.mean is not None:
                outer.mean.copy_(twin.mean)
        self._on_their_way = {fragment: [] for fragment in self._continued(found)}
        self._same = set()
        if found is None or found.replicas != self.replicas.size:
            for outer in self.parameters:
                outer.give(0.0)

    def _continued(self, saved: SavedReplicas | None) -> list[int]:
        """Returns the checkpoint's fragments on their way, if this run has the same schedule."""
        if saved is None or not asdict(self.schedule).items() <= asdict(saved).items():
            return []
        return saved.on_their_way

    def _outer_tensors(self, *, with_momentum: bool) -> Tensors:
        """Maps names to the tensors that all ranks of a replica hold together."""
        tensors: Tensors = {}
        for outer in self.parameters:
            kinds = {"model": outer.value, "outer.mean": outer.mean}
            if with_momentum:
                kinds["outer.momentum"] = self._momentum(outer)
            for kind, tensor in kinds.items():
                if tensor is not None:
                    tensors.setdefault(
                        f"{kind}.{outer.inner.name}", outer.inner.distributed(tensor)
                    )
        return tensors

    def _momentum(self, outer: OuterParameter) -> Tensor | None:
        return self.optimizer.state[outer.value].get("momentum_buffer")

    def _settle(self) -> list[int]:
        """Waits for all fragments on their way, leaves them in `OuterParameter.mean`, and returns
        their numbers."""
        for fragment in sorted(self._on_their_way):
            self._arrive(fragment)
        return sorted(self._on_their_way)

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        self._on_their_way[fragment] = []
        for bucket in runs(
            self.fragments[fragment], lambda outer: outer.value.numel(), most=BUCKET_ELEMENTS
        ):
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
        """Takes the outer step of a fragment. Raises NonFiniteError on all ranks if a mean is not
        finite on any: replicas have the same means, but ranks of one replica do not."""
        self._arrive(fragment)
        parameters = self.fragments[fragment]
        bad = torch.zeros((), dtype=torch.float64, device=self.parameters[0].value.device)
        for outer in parameters:
            if outer.mean is not None:
                bad += ~torch.isfinite(outer.mean).all()
        if all_reduce_over(self._axes, bad).item():
            limit = (
                " or is beyond 65504, float16's largest number"
                if self.config.transport == "fp16"
                else ""
            )
            raise NonFiniteError(
                f"step {step}: the mean difference of the replicas' parameters is not "
                f"finite{limit}. A lower optimizer.lr, or local_sgd.transport=fp32, may do"
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
