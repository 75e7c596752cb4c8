"""SIGKILL while a run saves, replaces and drops checkpoints: nothing that was acknowledged is lost,
nothing torn has the name of a checkpoint, and the same command goes on to the losses of a run that
nobody killed, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize("kind", ["runs", "background"])
def test_no_kill_costs_a_checkpoint_that_was_acknowledged(tmp_path: Path, kind: str) -> None:
    kills = 150
    program = [sys.executable, "-m", "tests.kill_targets", kind, str(tmp_path), str(kills)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["kills"] >= kills
    assert found["in a save"] > kills / 10, "the kills came at other moments than they should"
