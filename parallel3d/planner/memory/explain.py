"""The memory of a pipeline rank line by line: each kind, and the product that it is."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.planner.hardware.units import MIB
from parallel3d.planner.memory.published import BlockBytes, live_on, rank_parameters
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.planned_run import PlannedRun


def explain(run: PlannedRun, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    """Yields each kind, its bytes, and where they come from."""
    layout, program, part = run.layout, run.program, run.ranks[memory.rank]
    parameters = rank_parameters(run, part)
    ends = "".join([" + embedding" * part.embedding, " + head" * part.head])
    held = f"{parameters:,} parameters ({part.layers} layers{ends}, over tp {layout.tp})"
    if experts := run.stage_experts(part):
        held += f" and {experts:,} of experts (over ep {layout.ep})"
    yield "parameters", memory.parameters, f"{held} x {program.weight_bytes:g} bytes{_over(layout.parameter_shards)}"
    yield "optimizer", memory.optimizer, f"x {program.optimizer_bytes:g} bytes{_over(layout.optimizer_shards)}"
    if run.runs_parallel3d:  # what comes and goes is no product of a few numbers: said is the moment
        gradients = f"those there are in the fullest moment of a step, the {memory.moment}"
        logits = "and what the loss keeps of them" if memory.logits else "none in that moment"
        buffers = "parameters gathered, gradients on their way, activations sent and received"
        temporary = f"what the {memory.moment} works with"
    else:
        gradients = f"x {program.gradient_bytes:g} bytes{_over(layout.gradient_shards)}"
        each = f"{run.tokens:,} tokens x {run.loss_vocab:,} of the vocabulary x {program.logit_bytes:g} bytes"
        logits = each if part.head else "none: the head is on the last rank"
        buffers = _buffers(run, parameters)
        temporary = "the optimizer's step, beyond what the loss has freed"
        if layout.recompute == "full":
            block = f"a block of {BlockBytes(run).whole(layout.recompute) / MIB:,.0f} MiB under recompute"
            temporary = f"{block}, beyond what the loss has freed"
    yield "gradients", memory.gradients, gradients
    yield "activations", memory.activations, _activations(run, memory.rank)
    yield "logits", memory.logits, logits
    yield "buffers", memory.buffers, buffers
    yield "temporary", memory.temporary, temporary
    is_cpu = run.on_cpu and run.runs_parallel3d
    share = f"{program.fragmentation:.0%} of what comes and goes + {program.cache_bytes / 1e9:.1f} GB of freed blocks"
    yield "fragmentation", memory.fragmentation, "none on a CPU" if is_cpu else share
    yield "context", memory.context, "none on a CPU" if is_cpu else "CUDA, cuBLAS and NCCL, outside the allocator"


def _over(shards: int) -> str:
    return f" / {shards} shards" if shards > 1 else ""


def _activations(run: PlannedRun, rank: int) -> str:
    layout = run.layout
    chunk = "" if layout.virtual_stages == 1 else f" / {layout.virtual_stages} chunks"
    block = BlockBytes(run).kept(layout.recompute, layout.recompute_every)
    live = f"{live_on(run, rank)} live x {run.ranks[rank].layers} layers{chunk} x {block / MIB:,.0f} MiB"
    kept = {"none": "", "selective": ", attention recomputed", "full": ", inputs of the blocks alone"}
    return f"{live} ({layout.microbatch_size} x {run.seq_len} tokens{kept.get(layout.recompute, '')})"


def _buffers(run: PlannedRun, parameters: int) -> str:
    layout, program = run.layout, run.program
    said = []
    if layout.parameter_shards > 1 or program.always_sharded:
        each = program.gather_bytes + program.reduce_bytes
        whole = f"{parameters:,} gathered parameters and their gradients x {each:g} bytes"
        blocks = "two gathered blocks and their gradients, embedding and head"
        said.append(blocks if run.gathers_each_microbatch else whole)
    if layout.pp > 1:
        said.append("activations being received")
    return ", ".join(said) or "none"
