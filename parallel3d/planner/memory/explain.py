"""The memory of a pipeline rank line by line: each kind, and the product that it is."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.planner.hardware.units import MIB
from parallel3d.planner.memory.published import BlockBytes, live_on, rank_parameters
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.planned_run import PlannedRun


def explain(run: PlannedRun, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    """Yields each kind, its bytes, and where they come from."""
    layout = run.layout
    program = run.program
    part = run.ranks[memory.rank]
    held = f"{rank_parameters(run, part):,} parameters"
    if experts := run.stage_experts(part):
        held += f" and {experts:,} of experts (over ep {layout.ep})"
    block = BlockBytes(run).kept(layout.recompute, layout.recompute_every)
    live = f"{live_on(run, memory.rank)} live x {part.layers} layers"
    if layout.virtual_stages > 1:
        live += f" / {layout.virtual_stages} chunks"
    # What comes and goes is not a product of a few numbers in parallel3d.
    moment = f"at the fullest moment, the {memory.moment}" if memory.moment else ""
    cache = f"{program.cache_bytes / 1e9:.1f} GB of freed blocks"
    logits = f"{run.tokens:,} tokens x {run.loss_vocab:,} x {program.logit_bytes:g} bytes"
    weights = f"{held} x {program.weight_bytes:g} bytes{_over(layout.parameter_shards)}"
    gradients = f"x {program.gradient_bytes:g} bytes{_over(layout.gradient_shards)}"
    texts = {
        "parameters": weights,
        "optimizer": f"x {program.optimizer_bytes:g} bytes{_over(layout.optimizer_shards)}",
        "gradients": moment or gradients,
        "activations": f"{live} x {block / MIB:,.0f} MiB, recompute {layout.recompute}",
        "logits": moment or logits,
        "buffers": "parameters gathered, gradients on their way, activations received",
        "temporary": moment or "a block under recompute, or the optimizer's step",
        "fragmentation": f"{program.fragmentation:.0%} of what comes and goes + {cache}",
        "context": "CUDA, cuBLAS and NCCL, outside the allocator",
    }
    for kind, text in texts.items():
        bytes_ = getattr(memory, kind)
        yield kind, bytes_, text if bytes_ else "none"


def _over(shards: int) -> str:
    return f" / {shards} shards" if shards > 1 else ""
