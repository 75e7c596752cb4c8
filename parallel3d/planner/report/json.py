"""A plan as one JSON object; docs/plan.md lists its keys. Floats are rounded to five digits, memory
is in GiB."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.cluster import Cluster, Scales
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.model.uncertainty import ErrorModel
from parallel3d.planner.report.page import Plan, reasons
from parallel3d.planner.report.text import MEMORY_KINDS, TIME_KINDS, layout_text
from parallel3d.planner.search.neighbours import Neighbour
from parallel3d.planner.search.request import PlanRequest, Rejected, RunLength, Strategy


def to_json(plan: Plan) -> dict[str, Any]:
    best = plan.best
    tree = {
        "schema": "parallel3d.plan/1",
        "input": {
            **request_tree(plan.request),
            "objective": plan.objective,
            "tokens": plan.tokens,
        },
        "strategies": [_strategy(plan, each) for each in plan.result.strategies],
        "rejected": [rejected_tree(each, plan.request) for each in plan.result.rejected],
        "search": {
            "checked": plan.result.checked,
            "seconds": plan.seconds,
        },
        "advice": {
            "reasons": list(reasons(best)) if best else [],
            "remedies": plan.remedies,
            "least_days": plan.least_days,
        },
        "neighbours": {
            key: found and _neighbour(plan, found) for key, found in plan.neighbours.items()
        },
        "notes": plan.notes,
        "why": None,
        "accuracy": plan.accuracy,
    }
    if plan.why is not None:
        asked, other = plan.why
        found = None
        nearest = None
        refused = None
        if isinstance(other, str):
            refused = other
        elif other.strategies:
            found = other.strategies[0]
        else:
            nearest = other.rejected[0]
        tree["why"] = {
            "asked": asked,
            "strategy": found and _strategy(plan, found),
            "rejected": nearest and rejected_tree(nearest, plan.request),
            "refused": refused,
            "layout": found and layout_text(found.parallel),
        }
    if plan.verified:
        tree["verified"] = [
            {
                "parallel": parallel_tree(each.parallel),
                "pipeline_rank": each.memory.rank,
                "estimated_gib": each.memory.total / GIB,
                "dry_run_gib": bytes_ / GIB,
                "fits": bytes_ <= plan.request.usable_bytes,
            }
            for each, bytes_ in plan.verified
        ]
    return rounded(tree)


def _strategy(plan: Plan, found: Strategy) -> dict[str, Any]:
    return strategy_tree(found, plan.length(found), found.errors)


def _neighbour(plan: Plan, found: Neighbour) -> dict[str, Any]:
    request = found.strategy.request
    return {
        "gpus": request.gpus,
        "global_batch_size": request.global_batch_size,
        "gain_pct": 100 * found.gain,
        "strategy": _strategy(plan, found.strategy),
    }


def parallel_tree(parallel: ParallelConfig) -> dict[str, Any]:
    """Returns a recipe's `parallel` section, with the strategy of sharding spelt out."""
    tree = asdict(replace(parallel, sharding=parallel.strategy))
    if parallel.stage_boundaries is None:
        del tree["stage_boundaries"]
    return tree


def memory_tree(memory: RankMemory) -> dict[str, float]:
    """By kind in GiB; the kinds add up to the total."""
    return {
        "total": memory.total / GIB,
        **{kind: getattr(memory, kind) / GIB for kind in MEMORY_KINDS},
    }


def model_tree(shape: ModelShape) -> dict[str, Any]:
    return {**asdict(shape), "parameters": total_parameters(shape)}


def hardware_tree(cluster: Cluster) -> dict[str, Any]:
    device = cluster.device
    return {
        "name": cluster.name,
        "device_file": cluster.device_file,
        "device": device.name,
        "peak_tflops": {precision: flops / 1e12 for precision, flops in device.peak_flops.items()},
        "memory_gib": device.memory_bytes / GIB,
        "memory_gb_per_s": device.memory_bandwidth / 1e9,
        "gpus_per_node": cluster.gpus_per_node,
        "node_gb_per_s": cluster.node.bandwidth / 1e9,
        "network_gb_per_s": cluster.network.bandwidth / 1e9,
        "oversubscription": cluster.network.oversubscription,
        "whole_nodes": cluster.network.whole_nodes,
        "price_per_hour": device.price_per_hour,
    }


def scales_tree(scales: Scales) -> dict[str, Any] | None:
    """Returns what measured runs correct, None without any; `timed` and `weighed` name the
    framework of each run."""
    if scales.timed or scales.weighed:
        return asdict(scales)
    return None


def rejected_tree(rejected: Rejected, request: PlanRequest) -> dict[str, Any]:
    return {
        "parallel": parallel_tree(rejected.parallel),
        "reason": rejected.reason,
        "short_gib": rejected.short_bytes / GIB,
        "short_pct": 100 * rejected.short_bytes / request.usable_bytes,
    }


def request_tree(request: PlanRequest) -> dict[str, Any]:
    """What was asked, with defaults filled in."""
    return {
        "model": model_tree(request.shape),
        "hardware": hardware_tree(request.cluster),
        "gpus": request.gpus,
        "seq_len": request.seq_len,
        "global_batch_size": request.global_batch_size,
        "precision": request.precision,
        "memory_fraction": request.memory_fraction,
        "risk": request.risk,
        "anchored": scales_tree(request.cluster.scales),
        "usable_gib": request.usable_bytes / GIB,
        "fixed": {key: value for key, value in asdict(request.fixed).items() if value is not None},
        "schedules": request.schedules,
    }


def strategy_tree(found: Strategy, length: RunLength | None, spread: ErrorModel) -> dict[str, Any]:
    """A strategy, with how long the run takes if its tokens are known, and the range of each
    figure."""
    request = found.request
    parallel = found.parallel
    cost = found.cost
    run_length = length and asdict(length)
    speeds = {name: getattr(cost, name) for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu")}
    ranges = {}
    for name, value in {**speeds, **(run_length or {})}.items():
        if value is not None:
            ranges[name] = asdict(spread.around("throughput", value))
    ranges["memory_gib"] = asdict(spread.around("memory", found.memory.total / GIB))
    vocab = found.run.shape.vocab
    return {
        "parallel": parallel_tree(parallel),
        "gpus": parallel.world_size,
        "microbatches": found.run.layout.microbatches,
        "padded_vocab": vocab if vocab != request.shape.vocab else None,
        "fits": found.memory.total <= request.usable_bytes,
        "memory_gib": memory_tree(found.memory),
        "worst_rank": found.memory.rank,
        "step_time_s": cost.step_time_s,
        "time_s": {kind: getattr(cost.parts, kind) for kind in TIME_KINDS},
        "tokens_per_s_per_gpu": cost.tokens_per_s_per_gpu,
        "tflops_per_gpu": cost.model_flops_per_gpu / 1e12,
        "mfu": cost.mfu,
        "run": run_length,
        "goodput": found.goodput and found.goodput._asdict(),
        "ranges": ranges,
        "chance_to_fit": spread.chance_to_fit(
            found.memory.total, request.cluster.device.memory_bytes
        ),
    }
