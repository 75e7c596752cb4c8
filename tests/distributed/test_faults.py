"""The faults of `bench faults`, each done to a real run: what it says, how it ends, what it leaves, and that the same
command goes on with the losses of a run without a fault, to the bit. The bench measures the seconds; here no clock
counts. All take long; tests/test_run.py has a few of them in every run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.tools.bench.faults.fault import Fault, Trial
from parallel3d.tools.bench.faults.rows import FAULTS
from parallel3d.tools.bench.faults.slow_rows import SLOW_NODES

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs without a fault."""
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_and_the_run_goes_on_from_its_last_save(fault: Fault, tmp_path: Path, shared: Path) -> None:
    trial = Trial(fault, tmp_path / "trial", shared)
    trial.found_after_s()
    assert [*trial.wrong(), *trial.wrong_again()] == []


@pytest.mark.parametrize("fault", SLOW_NODES, ids=lambda fault: fault.name)
def test_nobody_is_called_slow_where_no_other_program_runs(fault: Fault, tmp_path: Path) -> None:
    """The same runs as those of the rows of a slow node, on a machine that has nothing else to do."""
    trial = Trial(replace(fault, act=lambda run: None, words=(), within_steps=None), tmp_path / "trial", tmp_path)
    trial.found_after_s()
    assert [*trial.wrong()] == []
    assert "is slow" not in trial.run.said()
