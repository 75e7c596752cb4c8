"""Runtime that executes any schedule, on one pipeline rank or many.

    specs = TensorSpec(("batch", "seq", 512))
    runtime = PipelineRuntime([stage], schedule, mesh["pp"], loss_fn, boundaries=specs)
    loss = runtime.run(inputs, labels, sizes={"batch": 2, "seq": 1024})

Any `nn.Module` can be a stage. It takes the tensors that the previous stage returns (one or a
tuple). The output of the last stage goes to the loss.
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
    """Runs microbatches through the stages of a pipeline. Every rank of `pp` must construct one.

    Args:
        stages: This rank's stages in model order, as modules or `Stage` objects.
        schedule: Schedule from `build_schedule`, `load_schedule` or your own code.
        pp: One-dimensional mesh of the pipeline. None: a single rank.
        loss_fn: `loss_fn(output, labels)` returns a scalar. Scale it so that the gradients can be
            summed over microbatches and data-parallel ranks. Used only on the rank of the last
            stage. None there: only `forward` works.
        boundaries: Tensors sent between consecutive stages: one `TensorSpec` or a tuple of them if
            all boundaries are equal, else a list with one tuple per boundary.
        device: Device of the transfers. Default: that of the first parameter or buffer, else
            the CPU.

    Raises:
        ScheduleError: The schedule cannot be executed, or the ranks have different schedules.
        ValueError: The number of stages or boundaries does not match the schedule or the mesh.

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
                f"schedule {schedule.name}: has {ranks} ranks and stages {indices} on this one; "
                f"the mesh has {size} ranks and {len(stages)} stages were given; both must match"
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
        # Loading a CUDA kernel can wait for all queued work, including a receive whose sender in
        # turn waits for this rank: a deadlock. So the stages first run without transfers: in
        # training once per set of sizes and number of microbatches, in evaluation only if nothing
        # has run yet.
        self.warms_up = self.links.device.type == "cuda" and ranks > 1
        self._warm: set[tuple[Any, ...]] = set()

    def set_boundaries(self, boundaries: Sequence[Boundary]) -> None:
        """Replaces the boundaries. `boundaries` has one per pair of consecutive stages."""
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
        """Runs the forward and backward passes of a batch. Gradients accumulate in `.grad`.

        Args:
            inputs: `inputs[m]` is microbatch m, the input of the first stage: a tensor or a tuple
                of tensors. None on ranks without the first stage.
            labels: `labels[m]` goes to the loss. None on ranks without the last stage.
            sizes: Values of the names in the shapes of `boundaries`.
            recorder: Records the start and end of each action.
            keywords: `keywords[m]` goes to every stage as keyword arguments. Must be equal on all
                ranks.
            schedule: Schedule with a different number of microbatches and the same placement of
                stages. `run` does not call `check_schedule`. Default: the runtime's own.

        Returns:
            Sum of the losses of all microbatches, float64, on the rank of the last stage. 0
            elsewhere.

        Raises:
            StageError: A stage failed on this rank. The runtime cannot be used again.
            RankError: Another rank failed or timed out. The runtime cannot be used again.
            ValueError: The batch or the schedule does not match the runtime.
        """
        schedule = schedule or self.schedule
        own = self.schedule
        is_split_otherwise = schedule.splits and not own.splits
        if schedule.placement != own.placement or is_split_otherwise:
            raise ValueError(
                f"schedule {schedule.name}: must place stages and split backward passes as the "
                "runtime's own schedule does"
            )
        if schedule.trains and self.is_last and self.loss_fn is None:
            raise ValueError("loss_fn = None: training needs a loss; pass one to PipelineRuntime")
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
        """Returns the sum of the losses as `run` does, without gradients.

        Args:
            microbatches: Number of microbatches. Required on ranks where `inputs` is None, if the
                number differs from that of the runtime's schedule.
            inputs, labels, sizes, keywords: As in `run`.
        """
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
        """Returns the outputs of the last stage, one per microbatch.

        The list is empty on ranks without the last stage. The arguments are as in `evaluate`,
        without labels.
        """
        schedule = self._forward_only(inputs, microbatches)
        return self._execute(schedule, Batch(inputs, None, keywords, sizes), None).outputs

    @property
    def is_last(self) -> bool:
        """True if this rank holds the last stage and so computes the loss."""
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
        """Executes a schedule on a batch, after a warm-up if one is due.

        Raises:
            ValueError: The number of microbatches in `batch` differs from that of the schedule.
        """
        # The first stage needs inputs, so None counts as 0 microbatches there.
        inputs = () if batch.inputs is None and 0 in self.stages else batch.inputs
        given = {"inputs": inputs, "labels": batch.labels, "keywords": batch.keywords}
        for what, each in given.items():
            if each is not None and len(each) != schedule.microbatches:
                raise ValueError(
                    f"{what}: has {len(each)} microbatches, must have {schedule.microbatches}"
                )
        sizes = tuple(sorted((batch.sizes or {}).items()))
        crossings = [Crossing.of(boundary, sizes) for boundary in self._boundaries]
        self.links.begin_run(crossings)
        kind_of_step = schedule.trains, schedule.microbatches, sizes
        # A training step has already warmed up the forward pass of an evaluation.
        is_cold = schedule.trains or not self._warm
        if self.warms_up and is_cold and kind_of_step not in self._warm:
            self._warm.add(kind_of_step)
            self._warm_up(schedule, batch, crossings)
        transport = Transport(self.links, schedule, crossings)
        executor = ScheduleExecutor(schedule, self.stages, transport, batch, loss_fn, recorder)
        executor.run()
        return executor

    def _warm_up(self, schedule: Schedule, batch: Batch, crossings: Sequence[Crossing]) -> None:
        """Executes each kind of action of this rank's stages once, without other pipeline ranks.

        This loads, compiles and tunes kernels and connects the groups of tensor and data
        parallelism before any receive is outstanding. It does not change parameters, and it
        restores gradients, buffers and the RNG state. Gradients of a stage with
        `drop_gradients` are discarded, so such a stage must not hold gradients yet.
        """
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
