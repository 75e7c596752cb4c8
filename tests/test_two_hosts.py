"""Runs on two hosts: network namespaces of this machine, with addresses and names of their own."""

from __future__ import annotations

import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from restart_callbacks import environment
from test_launch import all_end, is_alive, wait_until
from test_restarts import ENVIRONMENT, STEPS, losses, steps_of, write_recipe
from two_hosts import Host, TwoHosts, two_hosts

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.launch.command import main


def launch(
    pair: TwoHosts, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> list[subprocess.Popen[str]]:
    """Starts a recipe, whose steps are slow on demand, on both hosts by the script of
    `parallel3d-launch torchrun`: two workers on each."""
    settings = ("train.callbacks=[restart_callbacks:Slow]", "train.timeout_s=10")
    assert (
        main(["torchrun", str(recipe), *settings, "--gpus-per-node", "2", "--restarts", "1"]) == 0
    )
    script = recipe.with_name("launch.sh")
    script.write_text(capsys.readouterr().out)
    started = []
    for host in pair.hosts:
        with recipe.with_name(f"{host.name}.log").open("a") as log:
            started.append(
                host.start(
                    "bash",
                    str(script),
                    stdout=log,
                    stderr=log,
                    env=ENVIRONMENT | {"HEAD": "host0"},
                )
            )
    return started


def said(recipe: Path) -> str:
    return "".join(recipe.with_name(f"host{n}.log").read_text() for n in (0, 1))


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_without_power_ends_the_other_and_the_run_goes_on_when_it_is_back(
    lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether or not the lost host had rank 0 and the launcher's store. tp is within each host, dp
    across them."""
    layout = ParallelConfig(tp=2, dp_shard=2)
    straight, recipe = (write_recipe(tmp_path, name, layout) for name in ("straight", "run"))
    with two_hosts() as pair:
        assert [agent.wait(timeout=240) for agent in launch(pair, straight, capsys)] == [0, 0]
        (tmp_path / "slow").write_text("1")
        agents = launch(pair, recipe, capsys)
        wait_until(lambda: steps_of(tmp_path / "run") >= 7, 120, partial(said, recipe))
        survivors = workers_of(pair.hosts[1 - lost])
        assert len(survivors) == 2
        pair.power_off(lost)
        all_end(survivors, 30)
        # A save is not judged: there a rank that times out finds its peers silent.
        assert re.search("host is (lost or )?cut off", said(recipe)), said(recipe)
        assert len(losses(tmp_path / "run")) < STEPS
        for host in pair.hosts:  # what a scheduler does before it starts the job anew
            host.kill_all()
        for agent in agents:
            agent.wait(timeout=10)
        pair.join()
        (tmp_path / "slow").unlink()
        assert [agent.wait(timeout=240) for agent in launch(pair, recipe, capsys)] == [0, 0], said(
            recipe
        )
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert "resumed at step 6 from " in said(recipe)


def workers_of(host: Host) -> list[int]:
    """The processes of the workers on a host, which alone have a rank."""
    return [pid for pid in host.pids() if "RANK" in environment(pid)]


@pytest.mark.long
def test_two_seconds_without_a_link_are_no_fault_and_a_longer_cut_ends_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, "run", ParallelConfig(tp=2, dp_shard=2))
    (tmp_path / "slow").write_text("1")
    with two_hosts() as pair:
        agents = launch(pair, recipe, capsys)
        wait_until(lambda: steps_of(tmp_path / "run") >= 5, 120, partial(said, recipe))
        workers = [workers_of(host) for host in pair.hosts]
        assert [len(each) for each in workers] == [2, 2]
        pair.cut()
        time.sleep(2)
        pair.join()
        before = steps_of(tmp_path / "run")
        wait_until(lambda: steps_of(tmp_path / "run") >= before + 3, 60, partial(said, recipe))
        assert all(is_alive(pid) for each in workers for pid in each), said(recipe)
        pair.cut()
        all_end([pid for each in workers for pid in each], 30)
        for host in pair.hosts:
            host.kill_all()
        for agent in agents:
            agent.wait(timeout=10)
    told = [recipe.with_name(f"host{n}.log").read_text() for n in (0, 1)]
    assert "host is lost or cut off" in told[0]
    assert "its host is cut off, so its ranks end" in told[1]
