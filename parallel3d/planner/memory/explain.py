"""The memory of a pipeline rank line by line: each kind, and the product that it is."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.planner.memory.activations import block_bytes, whole_block_bytes
from parallel3d.planner.memory.rank_memory import RankMemory, live_on, rank_parameters
from parallel3d.planner.model.job import Job
from parallel3d.planner.own.memory import most_held

_GIB = 2**30
_MIB = 2**20


def explain(job: Job, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    """Kind, bytes, and where they come from."""
    yield from _own(job, memory) if job.is_own else _others(job, memory)
    engine = job.engine
    share = f"{engine.fragmentation:.0%} of what comes and goes + {engine.cache_bytes / 1e9:.1f} GB of freed blocks"
    yield "fragmentation", memory.fragmentation, "none on a CPU" if job.on_cpu and job.is_own else share
    outside = "none on a CPU" if job.on_cpu and job.is_own else "CUDA, cuBLAS and NCCL, outside the allocator"
    yield "context", memory.context, outside


def _own(job: Job, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    """What comes and goes is no product of a few numbers: said is the moment in which it is counted."""
    moment = most_held(job, memory.rank).moment
    yield from _at_rest(job, memory)
    yield "gradients", memory.gradients, f"those there are in the fullest moment of a step, the {moment}"
    yield "activations", memory.activations, _activations(job, memory.rank)
    yield "logits", memory.logits, "and what the loss keeps of them" if memory.logits else "none in that moment"
    yield "buffers", memory.buffers, "parameters gathered, gradients on their way, activations sent and received"
    yield "temporary", memory.temporary, f"what the {moment} works with"


def _others(job: Job, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    engine, part = job.engine, job.ranks[memory.rank]
    yield from _at_rest(job, memory)
    yield "gradients", memory.gradients, f"x {engine.gradient_bytes:g} bytes{_over(job.layout.gradient_shards)}"
    yield "activations", memory.activations, _activations(job, memory.rank)
    yield "logits", memory.logits, _logits(job) if part.head else "none: the head is on the last rank"
    yield "buffers", memory.buffers, _buffers(job, rank_parameters(job, part))
    yield "temporary", memory.temporary, _temporary(job)


def _at_rest(job: Job, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    layout, engine, part = job.layout, job.engine, job.ranks[memory.rank]
    ends = "".join([" + embedding" * part.embedding, " + head" * part.head])
    held = f"{rank_parameters(job, part):,} parameters ({part.layers} layers{ends}, over tp {layout.tp})"
    yield "parameters", memory.parameters, f"{held} x {engine.weight_bytes:g} bytes{_over(layout.parameter_shards)}"
    yield "optimizer", memory.optimizer, f"x {engine.optimizer_bytes:g} bytes{_over(layout.optimizer_shards)}"


def _over(shards: int) -> str:
    return f" / {shards} shards" if shards > 1 else ""


def _activations(job: Job, rank: int) -> str:
    layout, part = job.layout, job.ranks[rank]
    live = live_on(job, rank)
    chunk = "" if layout.virtual_stages == 1 else f" / {layout.virtual_stages} chunks"
    text = f"{live} live x {part.layers} layers{chunk} x {block_bytes(job) / _MIB:,.0f} MiB"
    kept = {"none": "", "selective": ", attention recomputed", "full": ", inputs of the blocks alone"}
    return f"{text} ({layout.microbatch_size} x {job.seq_len} tokens{kept.get(layout.recompute, '')})"


def _logits(job: Job) -> str:
    return f"{job.tokens:,} tokens x {job.loss_vocab:,} of the vocabulary x {job.engine.logit_bytes:g} bytes"


def _buffers(job: Job, parameters: int) -> str:
    layout, engine = job.layout, job.engine
    said = []
    if layout.parameter_shards > 1 or engine.always_sharded:
        if job.gathers_each_microbatch:
            said.append("two gathered blocks and their gradients, embedding and head")
        else:
            each = engine.gather_bytes + engine.reduce_bytes
            said.append(f"{parameters:,} gathered parameters and their gradients x {each:g} bytes")
    if layout.pp > 1:
        said.append("activations being received")
    return ", ".join(said) or "none"


def _temporary(job: Job) -> str:
    if job.layout.recompute != "full":
        return "the optimizer's step, beyond what the loss has freed"
    return f"a block of {whole_block_bytes(job) / _MIB:,.0f} MiB under recompute, beyond what the loss has freed"
