"""The memory of a pipeline rank line by line: each kind, and the product that it is."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.planner.activations import block_bytes, live_microbatches, whole_block_bytes
from parallel3d.planner.job import Job
from parallel3d.planner.memory import RankMemory, rank_parameters

_GIB = 2**30
_MIB = 2**20


def explain(job: Job, memory: RankMemory) -> Iterator[tuple[str, float, str]]:
    """Kind, bytes, and where they come from."""
    layout, engine, part = job.layout, job.engine, job.ranks[memory.rank]
    parameters = rank_parameters(job, part)
    ends = "".join([" + embedding" * part.embedding, " + head" * part.head])
    held = f"{parameters:,} parameters ({part.layers} layers{ends}, over tp {layout.tp})"
    yield "parameters", memory.parameters, f"{held} x {engine.weight_bytes:g} bytes{_over(layout.parameter_shards)}"
    yield "gradients", memory.gradients, f"x {engine.gradient_bytes:g} bytes{_over(layout.gradient_shards)}"
    yield "optimizer", memory.optimizer, f"x {engine.optimizer_bytes:g} bytes{_over(layout.optimizer_shards)}"
    yield "activations", memory.activations, _activations(job, memory.rank)
    yield "logits", memory.logits, _logits(job) if part.head else "none: the head is on the last rank"
    yield "buffers", memory.buffers, _buffers(job, parameters)
    yield "temporary", memory.temporary, _temporary(job)
    share = f"{engine.fragmentation:.0%} of what comes and goes + {engine.cache_bytes / 1e9:.1f} GB of freed blocks"
    yield "fragmentation", memory.fragmentation, share
    yield "context", memory.context, "CUDA, cuBLAS and NCCL, outside the allocator"


def _over(shards: int) -> str:
    return f" / {shards} shards" if shards > 1 else ""


def _activations(job: Job, rank: int) -> str:
    layout, part = job.layout, job.ranks[rank]
    live = live_microbatches(
        layout.schedule,
        pp=layout.pp,
        rank=rank,
        microbatches=layout.microbatches,
        virtual_stages=layout.virtual_stages,
    )
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
