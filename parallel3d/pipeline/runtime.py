"""Executes any schedule: a batch takes this one path with one pipeline rank as with many.

    specs = TensorSpec(("batch", "seq", 512))
    runtime = PipelineRuntime([stage], schedule, mesh["pp"], loss_fn, boundaries=specs)
    loss = runtime.run(inputs, labels, sizes={"batch": 2, "seq": 1024})

Any `nn.Module` can be a stage. It takes the tensors that the stage before gives, one or a tuple,
and the last stage's output goes to the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.layers.linear import delay_weight_gradients
from parallel3d.pipeline.boundary import Boundary, Crossing, Sizes, TensorSpec, normalized
from parallel3d.pipeline.execution import (
    Batch,
    LossFunction,
    Microbatches,
    ScheduleExecutor,
    Stage,
)
from parallel3d.pipeline.links import Links
from parallel3d.pipeline.transport import Transport, WarmupTransport
from parallel3d.schedules.build import forward_only
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder


class PipelineRuntime:
    """Runs microbatches through the stages of this rank and its neighbours.

    `stages` are this rank's, in the order of the model. `loss_fn(output, labels)` returns the
    scalar that is differentiated, already divided so that microbatches and data ranks can be
    summed. `boundaries` says what crosses between stages, once for all gaps or as a list. All ranks
    of `pp` build their runtime at once. Raises ScheduleError if the schedule cannot be carried out
    or the ranks have different ones, ValueError if the stages do not suit it.

    Example:
        >>> schedule = parallel3d.build_schedule("1f1b", pp=pp.size(), microbatches=8)
        >>> spec = parallel3d.TensorSpec((4, 32))  # [batch, hidden]
        >>> runtime = parallel3d.PipelineRuntime([stage], schedule, pp, loss_fn, boundaries=spec)
        >>> loss = runtime.run(inputs, labels)  # [microbatches, batch, ...] each
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Stage],
        schedule: Schedule,
        pp: DeviceMesh | None,
        loss_fn: LossFunction | None = None,
        *,
        boundaries: TensorSpec | Boundary | Sequence[Boundary] = (),
        device: torch.device | str | None = None,
    ) -> None:
        check_schedule(schedule)
        ranks = len(schedule.ranks)
        rank, size = (0, 1) if pp is None else (pp.get_local_rank(), pp.size())
        indices = schedule.stages_of(rank)
        if ranks != size or len(stages) != len(indices):
            raise ValueError(
                f"schedule {schedule.name}: has {ranks} ranks, and stages {indices} on this one; "
                f"the mesh has {size} ranks, and {len(stages)} modules were given"
            )
        self.schedule = schedule
        self.loss_fn = loss_fn
        own = [stage if isinstance(stage, Stage) else Stage(stage) for stage in stages]
        if schedule.splits:
            own = [replace(stage, delayed=delay_weight_gradients(stage.module)) for stage in own]
        self.stages = dict(zip(indices, own, strict=True))
        if device is None:
            held = nn.ModuleList(stage.module for stage in own)
            device = next((x.device for x in chain(held.parameters(), held.buffers())), "cpu")
        self.links = Links(pp, schedule, torch.device(device))
        self._boundaries = normalized(boundaries, schedule.stages)
        # Stages run alone before the first step of each set of sizes and number of microbatches: on
        # a GPU, loading a kernel may wait for all that was posted, such as a receive.
        self.warms_up = self.links.device.type == "cuda" and ranks > 1
        self._warm: set[tuple[Any, ...]] = set()

    def set_boundaries(self, boundaries: Sequence[Boundary]) -> None:
        """Declares what crosses between stages from now on, one boundary for each gap."""
        self._boundaries = tuple(boundaries)

    def run(
        self,
        inputs: Microbatches | None,
        labels: Microbatches | None = None,
        *,
        sizes: Sizes | None = None,
        recorder: Recorder | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
        schedule: Schedule | None = None,
    ) -> Tensor:
        """Runs forward and backward of a batch; gradients are left in `.grad`.

        Args:
            inputs: `inputs[m]` goes to the first stage, a tensor or a tuple of them. None on a rank
                without the first stage.
            labels: `labels[m]` goes to the loss. None on a rank without the last stage.
            sizes: Numbers for the names of sizes in `boundaries`.
            keywords: `keywords[m]`, the same on every rank, goes to every stage's forward.
            schedule: For another number of microbatches, already checked, with the same stages on
                the same ranks as the runtime's own.

        Returns:
            Sum of the microbatches' losses, float64, on the rank of the last stage; 0 elsewhere.

        Raises:
            StageError: This rank's part failed. The pipeline cannot be used again.
            RankError: Another rank's part failed. The pipeline cannot be used again.
        """
        schedule = schedule or self.schedule
        own = self.schedule
        is_split_otherwise = schedule.splits and not own.splits
        if schedule.placement != own.placement or is_split_otherwise:
            raise ValueError(
                f"schedule {schedule.name}: places or splits stages in another way than the "
                "runtime's own"
            )
        if schedule.trains and self.is_last and self.loss_fn is None:
            raise ValueError("nothing to differentiate: the pipeline has no loss_fn")
        batch = Batch(inputs, labels, keywords, sizes)
        return self._execute(schedule, batch, self.loss_fn, recorder).total_loss

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Microbatches | None,
        labels: Microbatches | None = None,
        *,
        microbatches: int | None = None,
        sizes: Sizes | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tensor:
        """Returns the sum of losses as `run` does, without training. `microbatches` is needed if
        `inputs` is None and their number is not that of training."""
        schedule = self._forward_only(inputs, microbatches)
        batch = Batch(inputs, labels, keywords, sizes)
        return self._execute(schedule, batch, self.loss_fn).total_loss

    @torch.no_grad()
    def forward(
        self,
        inputs: Microbatches | None,
        *,
        microbatches: int | None = None,
        sizes: Sizes | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Returns the last stage's output for each microbatch on its rank, and an empty list
        elsewhere."""
        schedule = self._forward_only(inputs, microbatches)
        return self._execute(schedule, Batch(inputs, None, keywords, sizes), None).outputs

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return self.schedule.placement[-1]

    @property
    def is_last(self) -> bool:
        """True if this rank holds the last stage, and so has the loss and the outputs."""
        return self.schedule.stages - 1 in self.stages

    def _forward_only(self, inputs: Microbatches | None, microbatches: int | None) -> Schedule:
        own = self.schedule
        if microbatches is None:
            microbatches = own.microbatches if inputs is None else len(inputs)
        return forward_only(own.placement, microbatches)

    def _execute(
        self,
        schedule: Schedule,
        batch: Batch,
        loss_fn: LossFunction | None,
        recorder: Recorder | None = None,
    ) -> ScheduleExecutor:
        """Executes a schedule on a batch, after the warm-up. Raises ValueError if the batch does
        not suit the schedule."""
        inputs = () if batch.inputs is None and 0 in self.stages else batch.inputs
        given = {"inputs": inputs, "labels": batch.labels, "keywords": batch.keywords}
        for what, each in given.items():
            if each is not None and len(each) != schedule.microbatches:
                raise ValueError(
                    f"{what} of {len(each)} microbatches, and {schedule.microbatches} are to run"
                )
        sizes = tuple(sorted((batch.sizes or {}).items()))
        crossings = [Crossing.of(boundary, sizes) for boundary in self._boundaries]
        self.links.begin_run(crossings)
        kind_of_step = schedule.trains, schedule.microbatches, sizes
        # Evaluations need no warm-up after training.
        is_cold = schedule.trains or not self._warm
        if self.warms_up and is_cold and kind_of_step not in self._warm:
            self._warm.add(kind_of_step)
            self._warm_up(schedule, batch, crossings)
        transport = Transport(self.links, schedule, crossings)
        executor = ScheduleExecutor(schedule, self.stages, transport, batch, loss_fn, recorder)
        executor.run()
        return executor

    def _warm_up(self, schedule: Schedule, batch: Batch, crossings: Sequence[Crossing]) -> None:
        """Does each kind of action of each stage of this rank once, without other pipeline ranks.

        Kernels are loaded, compiled and tuned, and the groups of tensor and data parallelism
        connected, while no receive is outstanding. Parameters, gradients, buffers and torch's
        generators are left as they were; gradients of a stage with `drop_gradients` are clear
        before."""
        schedule = schedule.first_of_each_kind(self.links.rank)
        transport = WarmupTransport(self.links, schedule, crossings)
        loss_fn = self.loss_fn if schedule.trains or batch.labels is not None else None
        executor = ScheduleExecutor(schedule, self.stages, transport, batch, loss_fn, None)
        stages = self.stages.values()
        buffers = {x: x.clone() for stage in stages for x in stage.module.buffers()}
        kept = [stage.module.parameters() for stage in stages if stage.drop_gradients is None]
        gradients = {parameter: parameter.grad for parameter in chain.from_iterable(kept)}
        for parameter in gradients:
            parameter.grad = None
        devices = [self.links.device] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            executor.run()
        for stage in stages:
            if stage.drop_gradients is not None:
                stage.drop_gradients()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for buffer, before in buffers.items():
            buffer.detach().copy_(before)
