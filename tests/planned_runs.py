"""Runs for the planner's cost and memory."""

from __future__ import annotations

from typing import Any

from parallel3d.models import shape_cards
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.framework import PARALLEL3D, FrameworkProfile
from parallel3d.planner.model.named import named_shape
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.tools.arguments import HARDWARE


def planned_run(
    framework: FrameworkProfile = PARALLEL3D, hardware: str = "a100-80gb", **layout: Any
) -> PlannedRun:
    """Returns a run of Llama 2 7B."""
    return PlannedRun(
        shape=named_shape("llama2-7b", shape_cards()),
        cluster=load_cluster(hardware, [HARDWARE]),
        layout=RunLayout(**layout),
        framework=framework,
        seq_len=2048,
    )
