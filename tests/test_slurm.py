"""The launcher of `parallel3d-launch slurm` on a SLURM cluster of two nodes: jobs that are
pre-empted, or near their time limit, save, are requeued and go on, with the losses of a job that
was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster
from test_restarts import ENVIRONMENT, STEPS, losses, steps_of, write_recipe

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.launch.command import main

NODES = 2


def write_job(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """Writes the launcher of a run of tp within each node and pp across them, whose steps are slow
    on demand."""
    folder = folder / name
    folder.mkdir()
    recipe = write_recipe(folder, "run", ParallelConfig(tp=2, pp=NODES))
    slow = ("train.callbacks=[restart_callbacks:Slow]", "--gpus-per-node", "2", "--time", "1:00:00")
    assert main(["slurm", str(recipe), *slow]) == 0
    script = folder / "job.sbatch"
    script.write_text(capsys.readouterr().out)
    return script


def submit(cluster: SlurmCluster, script: Path) -> str:
    return cluster.submit(f"--output={script.parent}/log", str(script))


def wait_for_the_end_of(cluster: SlurmCluster, job: str, script: Path) -> dict[str, str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    cluster.wait_for(lambda: cluster.job(job)["JobState"] in ended, 240, script.parent / "log")
    return cluster.job(job)


@pytest.mark.long
def test_preempted_and_timed_out_jobs_of_two_nodes_are_requeued_and_go_on_to_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    straight, preempted, limited = (
        write_job(tmp_path, name, capsys) for name in ("straight", "preempted", "limited")
    )
    with slurm_cluster(tmp_path / "slurm") as cluster:
        assert "using 4 processors on nodes host[0-1]" in cluster.run(
            "sbatch", "--test-only", str(straight)
        )
        ended = wait_for_the_end_of(cluster, submit(cluster, straight), straight)
        said = (straight.parent / "log").read_text()
        assert (ended["JobState"], ended["Restarts"], ended["NumNodes"]) == (
            "COMPLETED",
            "0",
            "2",
        ), said
        expected = losses(straight.parent / "run")
        assert len(expected) == STEPS

        (preempted.parent / "slow").write_text("1")
        job = submit(cluster, preempted)
        cluster.wait_for(
            lambda: steps_of(preempted.parent / "run") >= 4, 120, preempted.parent / "log"
        )
        urgent = cluster.submit(
            "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
        )
        cluster.wait_for(
            lambda: cluster.job(urgent)["JobState"] == "COMPLETED", 60, preempted.parent / "log"
        )
        assert (
            4 <= steps_of(preempted.parent / "run") < STEPS
        )  # it was stopped, and did not simply end
        (preempted.parent / "slow").unlink()
        ended = wait_for_the_end_of(cluster, job, preempted)
        said = (preempted.parent / "log").read_text()
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
        assert "goes on from step" in said or "go on from step" in said, said
        assert losses(preempted.parent / "run") == expected

        (limited.parent / "slow").write_text("4")
        job = submit(cluster, limited)
        cluster.wait_for(lambda: steps_of(limited.parent / "run") >= 2, 120, limited.parent / "log")
        # the signal comes 120 s before: now
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")
        cluster.wait_for(lambda: cluster.job(job)["Restarts"] == "1", 120, limited.parent / "log")
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        assert 2 <= steps_of(limited.parent / "run") < STEPS
        (limited.parent / "slow").unlink()
        ended = wait_for_the_end_of(cluster, job, limited)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), (
            limited.parent / "log"
        ).read_text()
        assert losses(limited.parent / "run") == expected
