"""The runtime with stages of plain torch: every schedule computes the loss and the gradients of the
unsplit model."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.pipeline import links
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from tests.distributed.pipeline_cases import Pipeline


def virtual_stages_of(name: ScheduleName) -> list[int]:
    traits = SCHEDULES[name]
    return [v for v in (1, 2, 3) if traits.stages.allow(v) and (v > 1 or traits.stages.usual == 1)]


def draw_cases(size: int) -> list[tuple[ScheduleName, int, int]]:
    """Returns tuples of schedule, virtual stages and microbatches. Two numbers of microbatches are
    drawn for each schedule: one of at most `size`, and a larger one."""
    drawn = random.Random(size)
    return [
        (name, v, microbatches)
        for name in SCHEDULES
        for v in virtual_stages_of(name)
        for microbatches in (
            drawn.randint(1, size),
            size + drawn.choice((1, 3)),
        )
    ]


@contextmanager
def without_shared_memory(off: bool) -> Iterator[None]:
    """Sends every message by the backend, as between hosts, if `off`."""
    largest = links.LARGEST_BYTES
    links.LARGEST_BYTES = -1 if off else largest
    try:
        yield
    finally:
        links.LARGEST_BYTES = largest


def check_cases(
    cases: list[tuple[ScheduleName, int, int]],
    through_backend: bool,
) -> None:
    with without_shared_memory(through_backend):
        for name, virtual_stages, microbatches in cases:
            schedule = build_schedule(
                name,
                pp=dist.get_world_size(),
                microbatches=microbatches,
                virtual_stages=virtual_stages,
            )
            pipeline = Pipeline.of(schedule)
            try:
                pipeline.check_step(seq=4)
                pipeline.check_step(seq=3)  # another length, and gradients that add up
                pipeline.check_evaluation(microbatches=drawn_count(microbatches), seq=2)
            except Exception as error:
                raise AssertionError(
                    f"{name}, v {virtual_stages}, {microbatches} microbatches: {error}"
                ) from error


def drawn_count(microbatches: int) -> int:
    return microbatches % 3 + 1


def memory_of_many_steps(steps: int) -> tuple[int, int]:
    """Tensors alive after a few steps, and after many more."""
    pipeline = Pipeline.of(build_schedule("zb_h1", pp=dist.get_world_size(), microbatches=5))
    counts = []
    for _ in range(2):
        for _ in range(steps):
            pipeline.check_step(seq=3)
        gc.collect()
        counts.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    return counts[0], counts[1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_schedule_trains_as_the_unsplit_model(world: Callable, size: int) -> None:
    cases = [case for case in draw_cases(size) if size > 1 or case[1] == 1 or case[0] == "zb_v"]
    world(size).run(check_cases, cases, False)


def test_schedules_by_the_backend_alone(world: Callable) -> None:
    cases = [
        ("1f1b", 1, 5),
        ("interleaved_1f1b", 2, 4),
        ("zb_h1", 1, 3),
        ("zb_v", 2, 5),
    ]
    world(2).run(check_cases, cases, True)


def test_nothing_piles_up_over_steps(world: Callable) -> None:
    for early, late in world(2).run(memory_of_many_steps, 5):
        assert late <= early + 2


def summed_losses(dtype: torch.dtype) -> list[float]:
    """Returns the losses of a training and an evaluation, summed over the ranks."""
    pp = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    torch.default_generator.manual_seed(0)
    stages = [nn.Linear(4, 4, dtype=dtype) for _ in range(pp.size())]
    schedule = build_schedule("1f1b", pp=pp.size(), microbatches=4)
    spec = TensorSpec((2, 4), dtype)
    runtime = PipelineRuntime(
        [stages[pp.get_local_rank()]],
        schedule,
        pp,
        lambda y, label: (y - label).square().mean(),
        boundaries=spec,
    )
    inputs, labels = torch.randn(2, 4, 2, 4, dtype=dtype)
    expected = sum(
        (nn.Sequential(*stages)(x) - y).square().mean().double()
        for x, y in zip(inputs, labels, strict=True)
    )
    found = []
    for loss in (runtime.run(inputs, labels), runtime.evaluate(inputs, labels)):
        dist.all_reduce(loss, group=pp.get_group())
        torch.testing.assert_close(loss.item(), float(expected), rtol=1e-12, atol=0.0)
        found.append(loss.item())
    return found


def test_loss_of_ranks_without_the_last_stage_can_be_summed_with_the_real_one(
    world: Callable,
) -> None:
    first, second = world(2).run(summed_losses, torch.bfloat16)
    assert first == second
