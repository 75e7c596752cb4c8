"""Requests to the planner, and runs for its cost and memory."""

from __future__ import annotations

from typing import Any

from parallel3d.config.recipe import ModelConfig
from parallel3d.models import shape_cards
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.framework import PARALLEL3D, FrameworkProfile
from parallel3d.planner.model.named import named_shape
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.search.request import PlanRequest
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


def plan_request(
    model: str | ModelConfig = "llama3-8b", hardware: str = "h100-80gb", **settings: Any
) -> PlanRequest:
    shape = named_shape(model, shape_cards()) if isinstance(model, str) else from_config(model)
    return PlanRequest(
        shape=shape,
        cluster=load_cluster(hardware, [HARDWARE]),
        **settings,
    )
