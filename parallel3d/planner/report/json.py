"""A plan as a JSON object. docs/reference/cli.md lists its keys. Floats have five significant
digits."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.cluster import Cluster, Scales
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.report.page import MEMORY_KINDS, TIME_KINDS, Plan, layout_text, reasons
from parallel3d.planner.report.priced import priced_tree
from parallel3d.planner.search.request import PlanRequest, Rejected, Strategy

_ASKED = (
    "gpus",
    "seq_len",
    "global_batch_size",
    "precision",
    "memory_fraction",
    "risk",
    "schedules",
)  # Keys that have the same name in a request and in its JSON.
_SPEEDS = (
    "step_time_s",
    "tokens_per_s_per_gpu",
    "mfu",
)


def to_json(plan: Plan) -> dict[str, Any]:
    result = plan.result
    tree = {
        "schema": "parallel3d.plan/1",
        "input": {
            **request_tree(plan.request),
            "objective": plan.objective,
            "tokens": plan.tokens,
        },
        "strategies": [strategy_tree(each, plan.tokens) for each in result.strategies],
        "rejected": [rejected_tree(each, plan.request) for each in result.rejected],
        "search": {
            "checked": result.checked,
            "seconds": plan.seconds,
        },
        "advice": {
            "reasons": list(reasons(plan.best)) if plan.best else [],
            "remedies": plan.remedies,
            "least_days": plan.least_days,
        },
        "priced": priced_tree(plan),
        "neighbours": {key: _neighbour(plan, key) for key in plan.neighbours},
        "notes": plan.notes,
        "why": _why(plan),
        "accuracy": plan.accuracy,
        "verified": [
            {
                "parallel": parallel_tree(each.parallel),
                "pipeline_rank": each.memory.rank,
                "estimated_gib": each.memory.total / GIB,
                "dry_run_gib": bytes_ / GIB,
                "fits": bytes_ <= plan.request.usable_bytes,
            }
            for each, bytes_ in plan.verified
        ],
    }
    return rounded(tree)


def _neighbour(plan: Plan, key: str) -> dict[str, Any] | None:
    found = plan.neighbours[key]
    if found is None:
        return None
    request = found.strategy.request
    return {
        "gpus": request.gpus,
        "global_batch_size": request.global_batch_size,
        "gain_pct": 100 * found.gain,
        "strategy": strategy_tree(found.strategy, plan.tokens),
    }


def _why(plan: Plan) -> dict[str, Any] | None:
    """Returns the layout given by --why. With it comes its strategy, or why it does not fit, or the
    rule that it breaks."""
    if plan.why is None:
        return None
    asked, other = plan.why
    tree = dict.fromkeys(("strategy", "layout", "rejected", "refused"))
    tree["asked"] = asked
    if isinstance(other, str):
        tree["refused"] = other
    elif other.strategies:
        found = other.strategies[0]
        tree["strategy"] = strategy_tree(found, plan.tokens)
        tree["layout"] = layout_text(found.parallel)
    else:
        tree["rejected"] = rejected_tree(other.rejected[0], plan.request)
    return tree


def parallel_tree(parallel: ParallelConfig) -> dict[str, Any]:
    """Returns the recipe's `parallel` section for a layout, with an explicit sharding strategy."""
    return asdict(replace(parallel, sharding=parallel.strategy))


def memory_tree(memory: RankMemory) -> dict[str, float]:
    """Returns the memory in GiB, in total and by kind."""
    return {kind: getattr(memory, kind) / GIB for kind in ("total", *MEMORY_KINDS)}


def model_tree(shape: ModelShape) -> dict[str, Any]:
    return {**asdict(shape), "parameters": total_parameters(shape)}


def hardware_tree(cluster: Cluster) -> dict[str, Any]:
    device = cluster.device
    return {
        "name": cluster.name,
        "device_file": cluster.device_file,
        "device": device.name,
        "peak_tflops": {precision: flops / 1e12 for precision, flops in device.peak_flops.items()},
        "memory_gib": device.memory_gib,
        "memory_gb_per_s": device.memory_gb_per_s,
        "gpus_per_node": cluster.gpus_per_node,
        "node_gb_per_s": cluster.node.gb_per_s,
        "network_gb_per_s": cluster.network.gb_per_s,
        "oversubscription": cluster.network.oversubscription,
        "whole_nodes": cluster.network.whole_nodes,
        "price_per_hour": device.price_per_hour,
    }


def scales_tree(scales: Scales) -> dict[str, Any] | None:
    """Returns the corrections from measured runs, or None. `timed` and `weighed` list the runs'
    frameworks."""
    return asdict(scales) if scales.timed or scales.weighed else None


def rejected_tree(rejected: Rejected, request: PlanRequest) -> dict[str, Any]:
    return {
        "parallel": parallel_tree(rejected.parallel),
        "reason": rejected.reason,
        "short_gib": rejected.short_bytes / GIB,
        "short_pct": 100 * rejected.short_bytes / request.usable_bytes,
    }


def request_tree(request: PlanRequest) -> dict[str, Any]:
    """Returns a request as a JSON tree, including defaults."""
    return {
        **{key: getattr(request, key) for key in _ASKED},
        "model": model_tree(request.shape),
        "hardware": hardware_tree(request.cluster),
        "anchored": scales_tree(request.cluster.scales),
        "usable_gib": request.usable_bytes / GIB,
        "fixed": {key: value for key, value in vars(request.fixed).items() if value is not None},
    }


def strategy_tree(found: Strategy, tokens: float | None = None) -> dict[str, Any]:
    """Returns a strategy as a JSON tree. `ranges` has error ranges of memory, speed and, if
    `tokens` is given, run length."""
    request = found.request
    memory = found.memory
    cost = found.cost
    spread = found.errors
    length = asdict(found.length(tokens)) if tokens else {}
    speeds = {name: getattr(cost, name) for name in _SPEEDS}
    ranges = {"memory_gib": asdict(spread.around("memory", memory.total / GIB))}
    for name, value in (speeds | length).items():
        if value:
            ranges[name] = asdict(spread.around("throughput", value))
    vocab = found.run.shape.vocab
    return {
        **speeds,
        "parallel": parallel_tree(found.parallel),
        "gpus": found.parallel.world_size,
        "microbatches": found.run.layout.microbatches,
        "padded_vocab": vocab if vocab != request.shape.vocab else None,
        "fits": memory.total <= request.usable_bytes,
        "memory_gib": memory_tree(memory),
        "worst_rank": memory.rank,
        "time_s": {kind: getattr(cost.parts, kind) for kind in TIME_KINDS},
        "tflops_per_gpu": cost.model_flops_per_gpu / 1e12,
        "run": length or None,
        "goodput": found.goodput and found.goodput._asdict(),
        "ranges": ranges,
        "chance_to_fit": spread.chance_to_fit(memory.total, request.cluster.device.memory_bytes),
    }
