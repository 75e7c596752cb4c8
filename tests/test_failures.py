"""A rank fails in real training: every rank ends soon, and the cause is told once, under each
launcher.

The runs of one launcher share a process that imports torch, because that takes longer than all of
them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launch_targets
import pytest
from test_launch import is_alive

PROGRAM = launch_targets.__file__
ENDS_WITHIN_S = 20
# What rank 1 is told to have done, by the launcher that sees it end, and by a peer that does not.
RAISED = "ValueError: a fault"
CAUSES = {
    "forward": (RAISED, RAISED),
    "backward": (RAISED, RAISED),
    "collective": ("RuntimeError: ", "RuntimeError: "),
    "killed": ("was killed by SIGKILL", "ended without a word"),
    "exits": ("ended with status 3", "ended without a word"),
    "forward_while_the_other_hangs": (RAISED, RAISED),
    "killed_while_the_other_hangs": ("was killed by SIGKILL", "ended without a word"),
}


@dataclass
class Runs:
    """The runs of one launcher, by their faults."""

    folder: Path
    said: dict[str, str]  # what all processes of a run have written on stderr

    def errors(self, fault: str) -> list[str]:
        """Returns the lines that report an error of ours."""
        return [line for line in self.said[fault].splitlines() if line.startswith("error: ")]

    def read(self, fault: str, file: str) -> dict[str, Any]:
        found = json.loads((self.folder / fault / file).read_text())
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    done: dict[str, Runs] = {}

    def run(launcher: str) -> Runs:
        if launcher not in done:
            folder = tmp_path_factory.mktemp(launcher)
            command = [sys.executable, PROGRAM, "faults", launcher, str(folder), *CAUSES]
            if launcher == "torchrun":
                command.append("asked_to_stop")
            stderr = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=240).stderr
            parts = [part.partition("\n") for part in stderr.split("=== ")[1:]]
            done[launcher] = Runs(folder, {fault: said for fault, _, said in parts})
        return done[launcher]

    return run


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
@pytest.mark.parametrize("fault", CAUSES)
def test_a_failing_rank_is_told_once_and_ends_all(
    fault: str, launcher: str, runs: Callable[[str], Runs]
) -> None:
    found = runs(launcher)
    (line,) = found.errors(fault)
    assert line.startswith("error: rank 1 (")
    assert ", pp 0, dp_replicate 0, dp_shard 1, tp 0)" in line
    assert CAUSES[fault][launcher == "torchrun"] in line
    outcome, ended = found.read(fault, "outcome.json"), found.read(fault, "ended.json")
    assert (outcome["rank"], outcome["exit_status"]) == (1, 70)
    assert ended["status"] == (70 if launcher == "local" else 1)  # torchrun makes 1 of every status
    assert ended["took_s"] < ENDS_WITHIN_S
    pids = [int(file.read_text()) for file in (found.folder / fault).glob("*.pid")]
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    assert not (found.folder / fault / "slept").exists()


@pytest.mark.parametrize("fault", ["forward", "forward_while_the_other_hangs"])
def test_torchrun_is_told_the_cause(fault: str, runs: Callable[[str], Runs]) -> None:
    torchrun = runs("torchrun").read(fault, "torchrun.json")
    assert torchrun["rank"] == 1
    assert "ValueError: a fault" in str(torchrun["message"])


def test_sigterm_to_a_worker_of_torchrun_still_saves_and_ends_with_75(
    runs: Callable[[str], Runs],
) -> None:
    found = runs("torchrun")
    assert found.read("asked_to_stop", "outcome.json")["exit_status"] == 75
    assert (found.folder / "asked_to_stop" / "checkpoints" / "step_00000003").is_dir()
    assert found.errors("asked_to_stop")[0].startswith(
        "error: stopped by SIGTERM after step 3, saved: "
    )
