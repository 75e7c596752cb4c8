"""A worker's process group: who is missing, and what is closed at its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch_targets import recipe_in

from parallel3d.config.recipe import Recipe
from parallel3d.errors import PreemptedError, RendezvousError
from parallel3d.launch.rendezvous import Rendezvous, process_group
from tests.live_run import ROOT, torchrun


def rendezvous(store: Path, world_size: int = 1) -> Rendezvous:
    return Rendezvous(
        rank=0,
        local_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        init_method=f"file://{store}",
    )


def recipe(folder: Path, start_timeout_s: float = 10.0) -> Recipe:
    made = recipe_in(folder, 1)
    return replace(made, train=replace(made.train, start_timeout_s=start_timeout_s))


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_group_is_closed_at_a_good_end_and_where_all_ranks_stop(tmp_path: Path) -> None:
    with process_group(recipe(tmp_path), rendezvous(tmp_path / "a")) as device:
        assert device == torch.device("cpu")
        assert dist.is_initialized()
    assert not dist.is_initialized()
    with pytest.raises(PreemptedError), process_group(recipe(tmp_path), rendezvous(tmp_path / "b")):
        raise PreemptedError("saved")
    assert not dist.is_initialized()


def test_an_error_leaves_the_group_as_it_is_because_nccl_would_wait_for_peers(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        process_group(recipe(tmp_path), rendezvous(tmp_path / "a")),
    ):
        raise ZeroDivisionError
    assert dist.is_initialized()


def test_workers_that_do_not_come_are_named_in_time(tmp_path: Path) -> None:
    with (
        pytest.raises(
            RendezvousError,
            match="rank 0 of 3: rendezvous at .* within 1 s: ranks 1 and 2 of 3 did not connect",
        ),
        process_group(recipe(tmp_path, 1.0), rendezvous(tmp_path / "a", 3)),
    ):
        pass
    assert not dist.is_initialized()


PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from parallel3d import RowParallelLinear

dist.init_process_group("gloo")
tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
layer = RowParallelLinear(64, 64, tp=tp)
dist.all_reduce(torch.zeros(4096), group=tp.get_group())
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_program_ends_well_although_its_mesh_outlives_the_process_group(tmp_path: Path) -> None:
    """Without the wait, more than half of such programs abort."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [*torchrun(2)[:-2], str(script)]
    for _ in range(5):
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
