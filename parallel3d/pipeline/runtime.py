"""Executes any schedule: a batch takes this one path with one pipeline rank as with many.

    specs = TensorSpec(("batch", "seq", 512))
    runtime = PipelineRuntime([stage], schedule, mesh["pp"], loss_fn, boundaries=specs)
    loss = runtime.run(inputs, labels, sizes={"batch": 2, "seq": 1024})

Any `nn.Module` can be a stage. It takes the tensors that the stage before gives, one or a tuple, and the last stage's
output goes to the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.layers.gradients import delay_weight_gradients
from parallel3d.pipeline.boundary import Boundary, Crossing, Sizes, TensorSpec, normalized
from parallel3d.pipeline.execution import Execution, LossFunction, Microbatches, Stage
from parallel3d.pipeline.links import Connect, Links
from parallel3d.pipeline.transport import Buffers, Rehearsal, Transport
from parallel3d.schedules.build import forward_only
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder


class PipelineRuntime:
    """Runs microbatches through the stages of this rank and its neighbours.

    `stages` are this rank's, in the order of the model. `loss_fn(output, labels)` returns the scalar that is
    differentiated, already divided so that microbatches and data ranks can be summed. `boundaries` says what crosses
    between stages, once for all gaps or as a list. `connect` makes the links between the ranks. All ranks of `pp` build
    their runtime at once. Raises ScheduleError where the schedule cannot be carried out or the ranks have different
    ones, ValueError where the stages do not suit it.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Stage],
        schedule: Schedule,
        pp: DeviceMesh,
        loss_fn: LossFunction | None = None,
        *,
        boundaries: TensorSpec | Boundary | Sequence[Boundary] = (),
        device: torch.device | str | None = None,
        connect: Connect = Links,
    ) -> None:
        check_schedule(schedule)
        if len(schedule.ranks) != pp.size():
            raise ValueError(f"schedule {schedule.name} is for {len(schedule.ranks)} ranks, the mesh has {pp.size()}")
        indices = schedule.stages_of(pp.get_local_rank() if pp.size() > 1 else 0)
        if len(stages) != len(indices):
            raise ValueError(
                f"schedule {schedule.name}: this rank holds stages {indices}, and {len(stages)} modules were given"
            )
        self.schedule, self.loss_fn = schedule, loss_fn
        own = [stage if isinstance(stage, Stage) else Stage(stage) for stage in stages]
        if schedule.splits:
            own = [replace(stage, delayed=delay_weight_gradients(stage.module)) for stage in own]
        self.stages = dict(zip(indices, own, strict=True))
        if device is None:
            tensors = (x for stage in own for x in (*stage.module.parameters(), *stage.module.buffers()))
            device = next((tensor.device for tensor in tensors), "cpu")
        self.device = torch.device(device)
        self.links = connect(pp, schedule, self.device)
        self._boundaries = normalized(boundaries, schedule.stages)
        # What crosses between stages, and the memory that receives it, for one set of sizes, so that memory is bounded.
        self._sizes: Sizes | None = None
        self._crossings: tuple[Crossing, ...] = ()
        self._buffers = Buffers(self.device)
        self._forward_schedules: dict[int, Schedule] = {}
        # Whether stages run alone before the first step of each set of sizes and number of microbatches: on a GPU, a
        # kernel that is loaded at its first use may wait for all that was posted, a receive among it.
        self.warms_up = self.device.type == "cuda" and len(schedule.ranks) > 1
        self._warm: set[tuple[Any, ...]] = set()
        self.is_warming_up = False

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
        """Runs forward and backward of a batch. `inputs[m]` goes to the first stage, a tensor or a tuple of them;
        `labels[m]` is what the loss compares the last stage's output with; `keywords[m]`, the same on every rank, goes
        to every stage's forward. A rank without the first or the last stage may have None for inputs or labels. `sizes`
        gives the sizes that `boundaries` name. `schedule` may be another one than the runtime's, already checked, with
        the same stages on the same ranks, for another number of microbatches.
        Returns the sum of the microbatches' losses on the rank of the last stage and 0 on other ranks, in float64;
        gradients are left in `.grad`. Raises StageError where this rank's part failed and RankError where another
        rank's did; the pipeline cannot be used again after either."""
        schedule = schedule or self.schedule
        if schedule.placement != self.schedule.placement or (schedule.splits and not self.schedule.splits):
            raise ValueError(f"schedule {schedule.name}: places or splits stages in another way than the runtime's own")
        if schedule.trains and self.is_last and self.loss_fn is None:
            raise ValueError("nothing to differentiate: the pipeline has no loss_fn")
        execution = self._prepare(schedule, inputs, labels, sizes, self.loss_fn, keywords, recorder)
        execution.run()
        return self._loss(execution)

    def warm_up(
        self,
        inputs: Microbatches | None,
        labels: Microbatches | None = None,
        *,
        sizes: Sizes | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        """Does each kind of action of each stage of this rank once, alone: the other pipeline ranks would send zeros.
        So kernels are loaded, compiled and tuned, and the groups of tensor and data parallelism connected, while no
        receive is outstanding (`warms_up` says whether `run` calls it first). Parameters, their gradients, buffers and
        torch's generators are left as they were; only where a stage has `drop_gradients` its gradients must be clear
        before. The arguments are those of `run`. The ranks that share these stages call it at once."""
        schedule = schedule or self.schedule
        self._set_batch(schedule, inputs, labels, sizes, keywords)
        schedule = schedule.first_of_each_kind(self.links.rank)
        rehearsal = Rehearsal(self.links, schedule, self._crossings, self._buffers)
        loss_fn = self.loss_fn if schedule.trains or labels is not None else None
        execution = Execution(schedule, self.stages, rehearsal, inputs, labels, keywords, loss_fn, None)
        modules = [stage.module for stage in self.stages.values()]
        kept = [{name: x.clone() for name, x in module.named_buffers()} for module in modules]
        plain = [stage.module for stage in self.stages.values() if stage.drop_gradients is None]
        gradients = [(p, p.grad) for module in plain for p in module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        self.is_warming_up = True
        try:
            with torch.random.fork_rng(devices=[self.device] if torch.cuda.is_initialized() else []):
                execution.run()
            for stage in self.stages.values():
                if stage.drop_gradients is not None:
                    stage.drop_gradients()
        finally:
            self.is_warming_up = False
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, buffers in zip(modules, kept, strict=True):
                for name, buffer in module.named_buffers():
                    buffer.copy_(buffers[name])

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
        """Returns the sum of losses as `run` does, without training. `microbatches` is needed where `inputs` is None
        and their number is not that of training."""
        schedule = self._forwards(inputs, microbatches)
        execution = self._prepare(schedule, inputs, labels, sizes, self.loss_fn, keywords)
        execution.run()
        return self._loss(execution)

    @torch.no_grad()
    def forward(
        self,
        inputs: Microbatches | None,
        *,
        microbatches: int | None = None,
        sizes: Sizes | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Returns the last stage's output for each microbatch on its rank, and an empty list elsewhere."""
        schedule = self._forwards(inputs, microbatches)
        execution = self._prepare(schedule, inputs, None, sizes, loss_fn=None, keywords=keywords)
        execution.run()
        return execution.outputs

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return self.schedule.placement[-1]

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so has the loss and the outputs."""
        return self.schedule.stages - 1 in self.stages

    def _prepare(
        self,
        schedule: Schedule,
        inputs: Microbatches | None,
        labels: Microbatches | None,
        sizes: Sizes | None,
        loss_fn: LossFunction | None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
        recorder: Recorder | None = None,
    ) -> Execution:
        """An execution with its receives posted. Raises ValueError where the batch does not suit the schedule."""
        self._set_batch(schedule, inputs, labels, sizes, keywords)
        kind_of_step = schedule.trains, schedule.microbatches, *sorted((sizes or {}).items())
        is_cold = schedule.trains or not self._warm  # what training has loaded serves evaluations, too
        if self.warms_up and is_cold and kind_of_step not in self._warm:
            self._warm.add(kind_of_step)
            self.warm_up(inputs, labels, sizes=sizes, keywords=keywords, schedule=schedule)
        transport = Transport(self.links, schedule, self._crossings, self._buffers)
        return Execution(schedule, self.stages, transport, inputs, labels, keywords, loss_fn, recorder)

    def _set_batch(
        self,
        schedule: Schedule,
        inputs: Microbatches | None,
        labels: Microbatches | None,
        sizes: Sizes | None,
        keywords: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Makes what depends on the sizes of what crosses between stages, where they are others than before. Raises
        ValueError where the batch does not suit the schedule."""
        self.links.check_open()
        wanted = schedule.microbatches
        for what, given, is_needed in (
            ("inputs", inputs, 0 in self.stages),
            ("labels", labels, self.is_last and labels is not None),
            ("keywords", keywords, keywords is not None),
        ):
            count = 0 if given is None else len(given)
            if is_needed and count != wanted:
                raise ValueError(f"{what} of {count} microbatches, and {wanted} are to run")
        sizes = dict(sizes or {})
        if self._sizes != sizes:
            self._crossings = tuple(Crossing.of(boundary, sizes) for boundary in self._boundaries)
            self._sizes, self._buffers = sizes, Buffers(self.device)

    def _loss(self, execution: Execution) -> Tensor:
        if execution.loss is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return execution.loss

    def _forwards(self, inputs: Microbatches | None, microbatches: int | None) -> Schedule:
        if microbatches is None:
            microbatches = self.schedule.microbatches if inputs is None else len(inputs)
        if microbatches not in self._forward_schedules:
            self._forward_schedules[microbatches] = forward_only(
                pp=len(self.schedule.ranks), microbatches=microbatches, placement=self.schedule.placement
            )
        return self._forward_schedules[microbatches]
