"""The memory of a pipeline rank line by line: each kind, and the product that it is."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.planner.hardware.units import MIB
from parallel3d.planner.memory.published import block_bytes, live_on, rank_parameters, whole_block_bytes
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.planned_run import PlannedRun


def explain(run: PlannedRun, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    """Yields each kind, its bytes, and where they come from."""
    yield from _parallel3d(run, memory) if run.runs_parallel3d else _published(run, memory)
    program = run.program
    share = f"{program.fragmentation:.0%} of what comes and goes + {program.cache_bytes / 1e9:.1f} GB of freed blocks"
    yield "fragmentation", memory.fragmentation, "none on a CPU" if run.on_cpu and run.runs_parallel3d else share
    outside = "none on a CPU" if run.on_cpu and run.runs_parallel3d else "CUDA, cuBLAS and NCCL, outside the allocator"
    yield "context", memory.context, outside


def _parallel3d(run: PlannedRun, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    """What comes and goes is no product of a few numbers: said is the moment in which it is counted."""
    moment = memory.moment
    yield from _at_rest(run, memory)
    yield "gradients", memory.gradients, f"those there are in the fullest moment of a step, the {moment}"
    yield "activations", memory.activations, _activations(run, memory.rank)
    yield "logits", memory.logits, "and what the loss keeps of them" if memory.logits else "none in that moment"
    yield "buffers", memory.buffers, "parameters gathered, gradients on their way, activations sent and received"
    yield "temporary", memory.temporary, f"what the {moment} works with"


def _published(run: PlannedRun, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    program, part = run.program, run.ranks[memory.rank]
    yield from _at_rest(run, memory)
    yield "gradients", memory.gradients, f"x {program.gradient_bytes:g} bytes{_over(run.layout.gradient_shards)}"
    yield "activations", memory.activations, _activations(run, memory.rank)
    yield "logits", memory.logits, _logits(run) if part.head else "none: the head is on the last rank"
    yield "buffers", memory.buffers, _buffers(run, rank_parameters(run, part))
    yield "temporary", memory.temporary, _temporary(run)


def _at_rest(run: PlannedRun, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    layout, program, part = run.layout, run.program, run.ranks[memory.rank]
    ends = "".join([" + embedding" * part.embedding, " + head" * part.head])
    held = f"{rank_parameters(run, part):,} parameters ({part.layers} layers{ends}, over tp {layout.tp})"
    yield "parameters", memory.parameters, f"{held} x {program.weight_bytes:g} bytes{_over(layout.parameter_shards)}"
    yield "optimizer", memory.optimizer, f"x {program.optimizer_bytes:g} bytes{_over(layout.optimizer_shards)}"


def _over(shards: int) -> str:
    return f" / {shards} shards" if shards > 1 else ""


def _activations(run: PlannedRun, rank: int) -> str:
    layout, part = run.layout, run.ranks[rank]
    live = live_on(run, rank)
    chunk = "" if layout.virtual_stages == 1 else f" / {layout.virtual_stages} chunks"
    text = f"{live} live x {part.layers} layers{chunk} x {block_bytes(run) / MIB:,.0f} MiB"
    kept = {"none": "", "selective": ", attention recomputed", "full": ", inputs of the blocks alone"}
    return f"{text} ({layout.microbatch_size} x {run.seq_len} tokens{kept.get(layout.recompute, '')})"


def _logits(run: PlannedRun) -> str:
    return f"{run.tokens:,} tokens x {run.loss_vocab:,} of the vocabulary x {run.program.logit_bytes:g} bytes"


def _buffers(run: PlannedRun, parameters: int) -> str:
    layout, program = run.layout, run.program
    said = []
    if layout.parameter_shards > 1 or program.always_sharded:
        if run.gathers_each_microbatch:
            said.append("two gathered blocks and their gradients, embedding and head")
        else:
            each = program.gather_bytes + program.reduce_bytes
            said.append(f"{parameters:,} gathered parameters and their gradients x {each:g} bytes")
    if layout.pp > 1:
        said.append("activations being received")
    return ", ".join(said) or "none"


def _temporary(run: PlannedRun) -> str:
    if run.layout.recompute != "full":
        return "the optimizer's step, beyond what the loss has freed"
    return f"a block of {whole_block_bytes(run) / MIB:,.0f} MiB under recompute, beyond what the loss has freed"
