"""Saving and loading of a few tensors by two ranks: what fails on one of them fails on both, and
changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed import get_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d.checkpoint.files import load_tensors, save_tensors
from parallel3d.checkpoint.manifest import find_damage, read_manifest
from parallel3d.checkpoint.pieces import read_own_part
from parallel3d.errors import DamagedCheckpointError, SaveError
from tests.report_runs import PROGRESS


def make_state(first: float) -> dict[str, torch.Tensor]:
    """Eight rows of which each rank has four, and a row that both have."""
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(24.0).view(8, 3) + first
    return {
        "model.rows": DTensor.from_local(rows.chunk(2)[get_rank()].clone(), mesh, [Shard(0)]),
        "model.row": DTensor.from_local(rows[0].clone(), mesh, [Replicate()]),
    }


def save(path: Path, first: float) -> None:
    save_tensors(make_state(first), PROGRESS, path, "model: {}\n")


def first_element(path: Path) -> float:
    assert list(find_damage(path)) == []
    rows = torch.empty(8, 3)
    read_own_part(path, read_manifest(path).tensors["model.rows"], rows)
    return rows[0, 0].item()


def save_and_be_refused(path: Path, spoil: Callable) -> str:
    with spoil(), pytest.raises(SaveError) as refusal:
        save(path, 200.0)
    return str(refusal.value)


no_room = partial(patch, "shutil.disk_usage", return_value=SimpleNamespace(free=10_000))


@contextmanager
def full_disk_of_rank_1():
    error = OSError(28, "No space left on device")
    with patch("parallel3d.checkpoint.pieces.os.fsync", side_effect=error if get_rank() else None):
        yield


@pytest.mark.parametrize(
    "spoil, words",
    [
        (no_room, "a checkpoint needs 0."),
        (
            full_disk_of_rank_1,
            "__1_0.distcp: cannot be written: No space left on device",
        ),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_both_and_leaves_the_older_one(
    world: Callable, tmp_path: Path, spoil: Callable, words: str
) -> None:
    path = tmp_path / "step_00000001"
    world(2).run(save, path, 100.0)
    refusals = world(2).run(save_and_be_refused, path, spoil)
    assert refusals[0] == refusals[1]
    assert words in refusals[0]
    assert list(tmp_path.iterdir()) == [path]
    assert first_element(path) == 100.0


def load_and_be_refused(path: Path) -> str:
    state = make_state(7.0)
    before = {name: tensor.to_local().clone() for name, tensor in state.items()}
    with pytest.raises(DamagedCheckpointError) as refusal:
        load_tensors(lambda saved: state, path)
    for name, tensor in state.items():
        assert torch.equal(tensor.to_local(), before[name])
    return str(refusal.value)


def test_damage_that_one_rank_finds_changes_no_tensor_of_any(
    world: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "step_00000001"
    world(2).run(save, path, 1.0)
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (damage,) = find_damage(path)
    refusals = world(2).run(load_and_be_refused, path)
    assert refusals == [str(damage.error(path))] * 2
    assert damage.tensors
    assert damage.tensors[0] in refusals[0]


def lose_a_peer_while_loading(path: Path) -> str:
    state = make_state(7.0)
    lost = RuntimeError("Connection closed by peer")
    with (
        patch("torch.distributed.gather_object", side_effect=lost),
        pytest.raises(RuntimeError) as failure,
    ):
        load_tensors(lambda saved: state, path)
    return str(failure.value)


def test_a_peer_that_is_lost_while_loading_is_no_damage(world: Callable, tmp_path: Path) -> None:
    path = tmp_path / "step_00000001"
    world(2).run(save, path, 1.0)
    failures = world(2).run(lose_a_peer_while_loading, path)
    assert failures == ["Connection closed by peer"] * 2
