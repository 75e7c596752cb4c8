"""A long run that is hit by fault after fault, each of a kind and at a step drawn by chance: started again by the same
command each time, it has the losses of a run that nothing happened to, to the bit, and has lost no more than the steps
since its last checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("seed", "layout"), [*enumerate(3 * ["1 2 1", "2 1 1"], 16)])  # pp, tp and dp
def test_faults_of_all_kinds_cost_the_steps_since_the_last_save(tmp_path: Path, seed: int, layout: str) -> None:
    faults = 17
    program = [sys.executable, "-m", "tests.random_faults", str(tmp_path), str(faults), str(seed), *layout.split()]
    done = subprocess.run(program, capture_output=True, text=True, timeout=530)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert sum(found["faults"].values()) == faults and len(found["faults"]) > faults // 3
