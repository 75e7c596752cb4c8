"""The recorded errors of predictions, which plans quote. `parallel3d-plan score` records them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.search.request import PlanRequest

RECORDED = Path(__file__).with_name("accuracy.json")


def recorded_accuracy() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def how_sure(about: PlanRequest | PlannedRun) -> str:
    """Describes the recorded errors for published runs whose source was held out of the fit."""
    own = ""
    if about.shape.experts is not None:
        own = "not fitted to mixtures of experts (25 known runs: 8% error; 39 unseen: 23%); "
    elif about.framework.is_parallel3d:
        own = "parallel3d has not been measured on GPUs; "
    known = recorded_accuracy()
    errors = known["blind"]
    return (
        f"{own}on published runs with the source held out the median error is "
        f"{errors['throughput_median']:.1f}% for speed "
        f"(90% within {errors['throughput_p90']:.0f}%) and {errors['memory_median']:.1f}% for "
        f"memory (90% within {errors['memory_p90']:.0f}%); scored {known['date']}"
    )
