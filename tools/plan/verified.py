"""`recommend --verify`: trains the fullest rank of a plan dry; where it does not fit, the next layout is taken."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.config.rules import validate
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.report.page import Plan, VerifiedLayout
from parallel3d.planner.search.question import Rejected, Strategy
from parallel3d.tools.plan.emit_recipe import recipe_of_plan
from parallel3d.tools.plan.inputs import ParsedQuestion


def verified(asked: ParsedQuestion, plan: Plan) -> Plan:
    """Returns the plan with the first of its layouts that fits by a dry run as its best; those before it are rejected.
    Raises ConfigError for a model that the trainer does not have."""
    tried: list[VerifiedLayout] = []
    refused: list[Rejected] = []
    usable = plan.question.usable_bytes
    left = list(plan.answer.strategies)
    while left:
        tried.append(_run_dry(asked, plan, left[0]))
        last = tried[-1]
        if last.fits:
            break
        short = last.bytes - usable
        reason = f"needs {short / GIB:.1f} GiB more on pipeline rank {last.rank} by a dry run"
        refused.append(Rejected(parallel=left.pop(0).parallel, reason=reason, short_bytes=short))
    nearest = sorted((*refused, *plan.answer.rejected), key=lambda rejected: rejected.short_bytes)
    answer = replace(plan.answer, strategies=tuple(left), rejected=tuple(nearest))
    return replace(plan, answer=answer, verified=tuple(tried))


def _run_dry(asked: ParsedQuestion, plan: Plan, strategy: Strategy) -> VerifiedLayout:
    """Runs the strategy's fullest rank. Fragmentation and CUDA's own memory are those of the estimate."""
    from parallel3d.tools.verify.dry_run import dry_run  # torch, which only --verify needs

    recipe, memory = recipe_of_plan(asked, plan, strategy, run="plan"), strategy.memory
    validate(recipe)
    rank = memory.rank * (strategy.parallel.world_size // strategy.parallel.pp)
    exact = dry_run(recipe, rank, fused_norm=not plan.question.cluster.device.is_cpu).peak.total
    bytes_ = memory.total - memory.allocated + exact
    fits = bytes_ <= plan.question.usable_bytes
    return VerifiedLayout(strategy.parallel, memory.rank, memory.total, bytes_, fits)
