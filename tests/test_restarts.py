"""Runs under torchrun whose workers, agents or nodes are killed: they go on from the last save by
themselves, with the losses of a run that was never interrupted. Real processes and signals; most of
it takes long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_launch import all_end

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import CheckpointConfig, ParallelConfig
from tests import live_run
from tests.live_run import MODEL, small_recipe

STEPS = 14
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# A run on workers that find the callbacks beside this file.
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}",
    "OMP_NUM_THREADS": "1",
}


def write_recipe(folder: Path, name: str, parallel: ParallelConfig, **checkpoint: Any) -> Path:
    """Writes the recipe of a small run, which rank 0 interrupts as the file `plan` says, and
    returns its path."""
    callbacks = ("restart_callbacks:Interrupts",)
    recipe = replace(
        small_recipe(folder, parallel, steps=STEPS, callbacks=callbacks),
        model=replace(MODEL, architecture="llama"),
        checkpoint=CheckpointConfig(every=3, **checkpoint),
        run_dir=str(folder / name),
    )
    path = folder / f"{name}.yaml"
    path.write_text(to_yaml(recipe))
    return path


def torchrun(recipe: Path, *options: str) -> subprocess.Popen[str]:
    """Starts torchrun, in a session of its own."""
    worker = ["-m", "parallel3d.recipes.pretrain", str(recipe)]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *worker],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def losses(run_dir: Path) -> list[float]:
    lines = live_run.losses(run_dir)
    assert [step for step, _ in lines] == list(range(1, len(lines) + 1))
    return [loss for _, loss in lines]


def steps_of(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        return len(metrics.read_text().splitlines())
    return 0


def plan(
    folder: Path,
    step: int,
    signum: int,
    *,
    rank: int | None = None,
    pid: int | None = None,
    ranks: int = 2,
) -> None:
    """Has rank 0 of a run on so many ranks signal a rank, or a process, after a step."""
    wanted = {
        "step": step,
        "ranks": ranks,
        "signal": signum,
        "rank": rank,
        "pid": pid,
    }
    partial = folder / "plan.partial"
    partial.write_text(json.dumps(wanted))
    partial.rename(folder / "plan")


STANDALONE = ("--standalone", "--nproc-per-node", "2")


@pytest.mark.long
def test_a_killed_worker_is_started_again_from_the_last_save_each_time(
    tmp_path: Path,
) -> None:
    """With the default `checkpoint.resume = none`, in a folder that holds an earlier run, which the
    first start alone sets aside."""
    straight = write_recipe(tmp_path, "straight", ParallelConfig(dp_shard=2))
    _, said = torchrun(straight, *STANDALONE).communicate(timeout=120)
    expected = losses(tmp_path / "straight")
    for trial in range(3):
        folder = tmp_path / f"trial{trial}"
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "metrics.jsonl").write_text(
            '{"step": 1, "tokens_per_s_per_device": 1.0}\n'
        )
        recipe = write_recipe(folder, "run", ParallelConfig(dp_shard=2))
        plan(folder, 4 + trial, signal.SIGKILL, rank=trial % 2)
        agent = torchrun(recipe, *STANDALONE, "--max-restarts", "1")
        _, said = agent.communicate(timeout=120)
        assert agent.returncode == 0, said
        assert (folder / "done").exists()
        assert losses(folder / "run") == expected
        assert said.count("moved an earlier run from") == 1
        assert (folder / "run.1").is_dir()
        assert not (folder / "run.2").exists()
        assert "as with checkpoint.resume=auto instead of none" in said
        assert f"resumed at step {(3 + trial) // 3 * 3} from " in said
        assert json.loads((folder / "run" / "outcome.json").read_text())["status"] == "done"


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_goes_on_with_two_ranks_of_four_when_a_node_is_lost(
    lost: int, tmp_path: Path
) -> None:
    """Two agents on this machine are two nodes, of which one, with rank 0 or without, is killed.
    Two ranks sum in another order than four, so the losses are those of one process to DESIGN's
    tolerance, not to the bit."""
    from torch.distributed import TCPStore

    alone = write_recipe(tmp_path, "alone", ParallelConfig())
    _, said = torchrun(alone, "--standalone", "--nproc-per-node", "1").communicate(timeout=120)
    recipe = write_recipe(tmp_path, "run", ParallelConfig(elastic=True))
    meeting_place = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
    )
    conf = "is_host=false,last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "--rdzv-backend",
        "c10d",
    ]
    options += f"--rdzv-endpoint 127.0.0.1:{meeting_place.port} --rdzv-id elastic".split()
    options += f"--local-addr 127.0.0.1 --rdzv-conf {conf}".split()
    agents = [torchrun(recipe, *options), torchrun(recipe, *options)]
    goes = agents[lost]
    stays = agents[1 - lost]
    plan(tmp_path, 7, signal.SIGKILL, pid=goes.pid, ranks=4)
    _, said = stays.communicate(timeout=240)
    goes.communicate(timeout=20)
    assert stays.returncode == 0, said
    assert (tmp_path / "done").exists(), said
    all_end(json.loads((tmp_path / "workers").read_text()))
    found = losses(tmp_path / "run")
    expected = losses(tmp_path / "alone")
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(found) == STEPS
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert "dp_shard: 2" in (tmp_path / "run" / "config.yaml").read_text()
    assert not (tmp_path / "run.1").exists()
