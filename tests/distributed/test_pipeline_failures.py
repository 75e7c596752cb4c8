"""What goes wrong in a pipeline is told on every rank within seconds, with the rank, stage,
microbatch and action."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.build import build_schedule
from tests.distributed.test_pipeline import without_shared_memory

WIDTH = 4
MICROBATCHES = 6


class Fragile(nn.Module):
    """Fails in its forward or its backward of the third microbatch, or gives what it did not
    declare."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fault = fault
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if self.calls == 3:
            if self.fault == "forward":
                raise FloatingPointError("out of luck")
            if self.fault == "backward":
                y.register_hook(fail)
            if self.fault == "shape":
                return y[:, 1:]
            if self.fault == "dtype":
                return y.double()
        return y


def fail(grad: Tensor) -> None:
    raise FloatingPointError("out of luck")


def pipeline_mesh() -> Any:
    return init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("pp",))


def message_of_failure(
    fault: str,
    at_stage: int,
    through_backend: bool,
) -> tuple[str, float, str]:
    """Returns the error of this rank, how long it took to come, and the error of another run after
    it."""
    schedule = build_schedule("1f1b", pp=get_world_size(), microbatches=MICROBATCHES)
    rank = get_rank()
    stage = Fragile(fault if rank == at_stage else "none")
    width = ("batch", "width")
    with without_shared_memory(through_backend):
        runtime = PipelineRuntime(
            [stage],
            schedule,
            pipeline_mesh(),
            lambda y, label: y.sum(),
            boundaries=TensorSpec(width),
        )
        sizes = {"batch": 3 if fault == "sizes" and rank == at_stage else 2, "width": WIDTH}
        start = time.monotonic()
        errors = []
        for _ in range(2):
            try:
                runtime.run(torch.ones(MICROBATCHES, sizes["batch"], WIDTH), sizes=sizes)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    return errors[0], time.monotonic() - start, errors[1]


def refusal_of_different_schedules() -> str:
    name = "1f1b" if get_rank() == 0 else "gpipe"
    schedule = build_schedule(name, pp=2, microbatches=2)
    boundary = TensorSpec((2, WIDTH))
    with pytest.raises(ScheduleError) as error:
        PipelineRuntime([Fragile("none")], schedule, pipeline_mesh(), boundaries=boundary)
    return str(error.value)


FORWARD = r"rank 2 .*, stage 2, microbatch 2, forward \(2F2, action 4 of 12\): .*out of luck"
BACKWARD = r"rank 3 .*, stage 3, microbatch 2, backward \(3B2, action 6 of 12\): .*out of luck"


@pytest.mark.parametrize(
    "fault, at_stage, told, through_backend",
    [
        ("forward", 2, FORWARD, False),
        ("backward", 3, BACKWARD, True),
        ("shape", 1, r"1F2, .* returns float32 \[2, 3\].* declares float32 \[2, 4\]", True),
        ("dtype", 0, r"0F2, .* returns float64 \[2, 4\].* declares float32 \[2, 4\]", False),
    ],
)
def test_a_stage_that_fails_is_named_on_every_rank(
    world: Callable, fault: str, at_stage: int, told: str, through_backend: bool
) -> None:
    answers = world(4).run(message_of_failure, fault, at_stage, through_backend)
    for rank, (message, seconds, second) in enumerate(answers):
        assert re.search(told, message), (rank, message)
        assert message.startswith("StageError" if rank == at_stage else "RankError")
        assert seconds < 20
        assert second.startswith("RankError: this pipeline has failed: rank")


def test_sizes_that_differ_between_ranks_are_refused(world: Callable) -> None:
    for message, seconds, _ in world(2).run(message_of_failure, "sizes", 1, False):
        assert re.search(
            r"expects float32 \[., 4\] \(.. bytes\), but pipeline rank . sent another shape",
            message,
        )
        assert seconds < 20


def test_ranks_with_different_schedules_are_refused(world: Callable) -> None:
    for message in world(2).run(refusal_of_different_schedules):
        assert "must be the same on all ranks" in message
