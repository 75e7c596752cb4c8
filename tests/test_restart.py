"""Starting again: ranks of one attempt meet at a store that holds an earlier one's keys, and what
they do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel3d.checkpoint.manifest import MANIFEST_FILE
from parallel3d.config.recipe import CheckpointConfig, ModelConfig, Recipe, TrainConfig
from parallel3d.errors import RendezvousError
from parallel3d.launch import rendezvous as meeting
from parallel3d.launch.rendezvous import Rendezvous, join_attempt, was_requeued
from parallel3d.recipes import Job
from parallel3d.recipes.pretrain import _restarted

TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run7"}
RECIPE = Recipe(
    model=ModelConfig(
        layers=2,
        hidden=8,
        heads=2,
        ffn_hidden=8,
        vocab=264,
    ),
    train=TrainConfig(steps=1, global_batch_size=4, seq_len=8),
)


def rendezvous(rank: int, world_size: int) -> Rendezvous:
    return Rendezvous(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        init_method="env://",
    )


def attempt(world_size: int) -> list[Rendezvous]:
    """Has all ranks join."""

    def join(rank: int) -> Rendezvous:
        return join_attempt(rendezvous(rank, world_size), 20.0)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(join, range(world_size)))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
    )
    monkeypatch.setattr(meeting, "die_with_the_parent", lambda: None)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_a_new_store_was_lost_with_its_node_if_an_agent_counts_a_restart(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for each in attempt(3):
        assert each.is_restart


def test_a_rank_that_does_not_come_is_named(store: dist.TCPStore) -> None:
    with pytest.raises(
        RendezvousError,
        match="rank 0 of 3: rendezvous failed within 1 s: ranks 1 and 2 did not come",
    ):
        join_attempt(rendezvous(0, 3), 1.0)


def test_without_torchrun_slurm_says_whether_it_is_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count, is_restart in (("", False), ("0", False), ("2", True)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert was_requeued() is is_restart
        assert join_attempt(rendezvous(0, 1), 1.0).is_restart is is_restart


@pytest.mark.parametrize("resume, at_first", [("none", "auto"), ("path", "path")])
@pytest.mark.parametrize("saved", [False, True])
def test_a_restart_goes_on_from_the_runs_own_checkpoints(
    resume: str, at_first: str, saved: bool, tmp_path: Path
) -> None:
    if saved:
        (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step_00000003" / MANIFEST_FILE).touch()
    job = Job(replace(RECIPE, run_dir=str(tmp_path), checkpoint=CheckpointConfig(resume=resume)))
    restarted = _restarted(job)
    assert restarted.recipe.checkpoint.resume == ("auto" if saved else at_first)
    assert len(restarted.notes) == (restarted.recipe != job.recipe)
    assert _restarted(restarted) == restarted
    reading = replace(job, function="read_saved")
    assert _restarted(reading).recipe is reading.recipe
