"""What failures cost a run: Daly's formulas against a simulation, and the days of a plan."""

from __future__ import annotations

from random import Random

import pytest

from parallel3d.planner.search.goodput import Failures
from tests.plan_json import Said, plan_json


def simulated_s(job: Failures, work_s: float, draw: Random) -> float:
    """Returns the seconds until so much work is done and saved."""
    passed_s = 0.0
    left_s = needed_s = work_s + job.checkpoint_s
    while (fails_s := draw.expovariate(1 / (job.mtbf_hours * 3600))) < left_s:
        passed_s += fails_s
        left_s = job.restart_s + needed_s
    return passed_s + left_s


def test_goodput_is_that_of_simulated_failures() -> None:
    job = Failures(mtbf_hours=1.0, checkpoint_s=120.0, restart_s=600.0, interval_s=1200.0)
    draw = Random(0)
    mean_s = sum(simulated_s(job, 1200.0, draw) for _ in range(20_000)) / 20_000
    assert job.goodput(1).share == pytest.approx(1200.0 / mean_s, rel=0.01)


@pytest.mark.parametrize(("checkpoint_s", "best_s"), [(60, 1109), (600, 3244)])
def test_the_best_interval_is_dalys(checkpoint_s: float, best_s: float) -> None:
    job = Failures(mtbf_hours=11_000 / 3600, checkpoint_s=checkpoint_s)
    best = job.goodput(1)
    assert best.interval_s == pytest.approx(best_s, rel=1e-3)
    for factor in (0.9, 1.1):
        assert job._replace(interval_s=factor * best_s).goodput(1).share < best.share


def test_the_defaults_give_the_90_per_cent_of_llama_3_on_16384_gpus() -> None:
    assert Failures().goodput(16384).share == pytest.approx(0.90, abs=0.01)
    assert Failures(mtbf_hours=1e-6).goodput(16384).share == 1e-9


def test_failures_lengthen_the_days_of_a_plan(capsys: Said) -> None:
    asked = "sweep --model llama3-8b --gpu h100 --gpus 1024 --seq-len 8192 --global-batch 1024"
    days = []
    for more in ("", "--mtbf 10000"):
        (size,) = plan_json(f"{asked} --tokens 1T {more}", capsys)["sizes"]
        days.append(size["strategy"]["run"]["days"])
    # M = 10,000 h / 1,024 = 35,156 s: sqrt(2 * 30 / M) for checkpoints, and 300 / M
    assert days[0] / days[1] == pytest.approx(1 - 0.0413 - 0.0085, abs=0.002)
    assert size["strategy"]["goodput"]["share"] == pytest.approx(days[0] / days[1], rel=1e-3)
