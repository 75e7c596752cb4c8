"""The layouts and options that are trained on fake `cuda:0` tensors, and the layouts that the faults are planted in. No
torch here, so that the test itself can read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel3d.config.recipe import (
    DataConfig,
    LocalSgdConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.schedules.registry import SCHEDULES

LLAMA = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=64, vocab=264)
GPT = ModelConfig(
    architecture="gpt", layers=2, hidden=32, heads=4, ffn_hidden=64, vocab=264, max_positions=16, dropout=0.1
)
DROPPED = replace(LLAMA, dropout=0.1, attention_dropout=0.1)
QWEN = replace(LLAMA, qkv_bias=True, qk_norm=True)
TIED = replace(LLAMA, tied_embeddings=True)
MASK = DataConfig(documents="mask")


def recipe(
    model: ModelConfig = LLAMA,
    *,
    train: dict[str, Any] | None = None,
    optimizer: OptimizerConfig | None = None,
    local_sgd: LocalSgdConfig | None = None,
    microbatches: int = 1,
    **parallel: Any,
) -> Recipe:
    """Returns a small recipe for GPUs, in bf16 unless `train` says otherwise."""
    layout = ParallelConfig(**parallel)
    settings = {"steps": 10, "seq_len": 16, "precision": "bf16", "device": "cuda", **(train or {})}
    return Recipe(
        model=model,
        parallel=layout,
        train=TrainConfig(global_batch_size=microbatches * layout.microbatch_size * layout.dp, **settings),
        optimizer=optimizer or OptimizerConfig(),
        local_sgd=local_sgd or LocalSgdConfig(),
    )


def _in_backward(name: str = "adamw", **parallel: Any) -> Recipe:
    optimizer = OptimizerConfig(name=name, step_in_backward=True)  # type: ignore[arg-type]
    return recipe(train={"grad_clip": None}, optimizer=optimizer, **parallel)


def _pipelines() -> dict[str, Recipe]:
    """Returns each schedule with two ranks, a few with four, whose programs take long, and a block in each stage."""
    found = {}
    for pp, name in [*((2, name) for name in SCHEDULES), (4, "1f1b"), (4, "interleaved_1f1b"), (4, "zb_v")]:
        stages_per_rank = SCHEDULES[name].stages.usual
        found[f"pp {pp}, {name}"] = recipe(
            replace(LLAMA, layers=pp * stages_per_rank),
            pp=pp,
            schedule=name,
            virtual_stages=stages_per_rank,
            microbatches=pp,
            train={"precision": "fp32"},
        )
    return found


TP2, TP4 = {"tp": 2, "sequence_parallel": True}, {"tp": 4, "sequence_parallel": True}
SHARDED_TP = {"dp_shard": 2, **TP2}
SGD, MUON, ADAFACTOR = (OptimizerConfig(name=name) for name in ("sgd", "muon", "adafactor"))  # type: ignore[arg-type]

LAYOUTS: dict[str, Recipe] = {
    "fp32": recipe(train={"precision": "fp32"}),
    "bf16, two microbatches": recipe(microbatches=2),
    "fp16": recipe(train={"precision": "fp16"}),
    "bf16_pure": recipe(train={"precision": "bf16_pure"}),
    "rounded stochastically": recipe(
        train={"precision": "bf16_pure"}, optimizer=OptimizerConfig(stochastic_rounding=True)
    ),
    "biases, norms of heads": recipe(QWEN),
    "window": recipe(replace(LLAMA, window=8)),
    "documents": replace(recipe(microbatches=2), data=MASK),
    "tied": recipe(TIED),
    "gpt": recipe(GPT),
    "dropout": recipe(DROPPED, microbatches=2),
    "recompute full": recipe(recompute="full"),
    "recompute selective": recipe(recompute="selective"),
    "recompute every second block": recipe(recompute="every_n", recompute_every=2),
    "no clipping": recipe(train={"grad_clip": None}),
    "adamw with bf16 states": recipe(optimizer=OptimizerConfig(state_dtype="bf16")),
    "sgd": recipe(optimizer=SGD),
    "sgd without momentum": recipe(optimizer=OptimizerConfig(name="sgd", momentum=0.0)),
    "sgd with bf16 momentum": recipe(optimizer=OptimizerConfig(name="sgd", state_dtype="bf16")),
    "muon": recipe(optimizer=MUON),
    "muon in float32": recipe(optimizer=OptimizerConfig(name="muon", ns_dtype="fp32")),
    "muon, sharded, tp": recipe(optimizer=MUON, **SHARDED_TP),
    "adafactor": recipe(optimizer=ADAFACTOR),
    "adafactor, sharded, tp": recipe(optimizer=ADAFACTOR, **SHARDED_TP),
    "adafactor, optimizer sharded": recipe(optimizer=ADAFACTOR, dp_shard=2, sharding="SHARD_OPTIMIZER"),
    "adamw in the backward": _in_backward(),
    "sgd in the backward, replicated": _in_backward("sgd", dp_replicate=2, sharding="NO_SHARD"),
    "adamw in the backward, optimizer sharded": _in_backward(dp_shard=2, sharding="SHARD_OPTIMIZER"),
    "adamw in the backward, sharded": _in_backward(dp_shard=2),
    "tp 2": recipe(tp=2),
    "tp 2 along the sequence": recipe(**TP2),
    "tp 2 along the sequence, batch 2": recipe(microbatch_size=2, **TP2),
    "tp 2 along the sequence, recomputed": recipe(DROPPED, recompute="full", **TP2),
    "tp 2, loss in chunks": recipe(train={"loss_chunk_tokens": 8}, tp=2),
    "tp 4, copies of heads": recipe(tp=4),
    "tp 4 along the sequence, copies of heads and their norms": recipe(QWEN, **TP4),
    "NO_SHARD": recipe(dp_replicate=2, sharding="NO_SHARD"),
    "SHARD_OPTIMIZER": recipe(dp_shard=2, sharding="SHARD_OPTIMIZER"),
    "SHARD_OPTIMIZER, replicas": recipe(dp_replicate=2, dp_shard=2, sharding="SHARD_OPTIMIZER"),
    "SHARD_GRAD_OP": recipe(dp_shard=2, sharding="SHARD_GRAD_OP"),
    "FULL_SHARD": recipe(dp_shard=2, microbatches=2),
    "FULL_SHARD for each microbatch": recipe(dp_shard=2, gather="microbatch", reduce="microbatch", microbatches=2),
    "FULL_SHARD, gathered ahead, sent in bf16": recipe(dp_shard=2, prefetch=1, reduce_dtype="bf16"),
    "HYBRID_SHARD": recipe(dp_replicate=2, dp_shard=2),
    "_HYBRID_SHARD_ZERO2": recipe(dp_replicate=2, dp_shard=2, sharding="_HYBRID_SHARD_ZERO2"),
    "FULL_SHARD, tp 2 along the sequence": recipe(**SHARDED_TP),
    "FULL_SHARD, loss in chunks": recipe(train={"loss_chunk_tokens": 8}, dp_shard=2),
    "SHARD_OPTIMIZER, tp 2": recipe(dp_shard=2, tp=2, sharding="SHARD_OPTIMIZER"),
    **_pipelines(),
    "pp 2, tied": recipe(TIED, pp=2, microbatches=2),
    "pp 2, zb_v, tied": recipe(replace(TIED, layers=4), pp=2, schedule="zb_v", virtual_stages=2, microbatches=2),
    "pp 2, dropout": recipe(DROPPED, pp=2, microbatches=2),
    "pp 2, documents one by one": replace(recipe(GPT, pp=2, microbatches=2, train={"precision": "fp32"}), data=MASK),
    "pp 2, FULL_SHARD, tp 2 along the sequence": recipe(pp=2, microbatches=2, **SHARDED_TP),
    "pp 2, zb_h1, SHARD_OPTIMIZER": recipe(
        pp=2, schedule="zb_h1", microbatches=2, dp_shard=2, sharding="SHARD_OPTIMIZER"
    ),
    "pp 2, zb_h1, FULL_SHARD": recipe(pp=2, schedule="zb_h1", microbatches=2, dp_shard=2),
    "local SGD": recipe(dp_replicate=2, local_sgd=LocalSgdConfig(sync_every=1)),
    "local SGD in fragments, int8": recipe(
        dp_replicate=2,
        dp_shard=2,
        local_sgd=LocalSgdConfig(sync_every=2, fragments=2, overlap_steps=1, transport="int8"),
    ),
}
# The transformer block's own collectives are the difference between these two, which have two blocks and three.
BLOCKS = ("tp 2 along the sequence", "tp 2 along the sequence, three blocks")
LAYOUTS[BLOCKS[1]] = recipe(replace(LLAMA, layers=3), **TP2)

# Layouts whose parts the others have in other company: the long tests train these.
LONG = (
    "biases, norms of heads",
    "recompute every second block",
    "sgd without momentum",
    "sgd with bf16 momentum",
    "muon in float32",
    "muon, sharded, tp",
    "adafactor, sharded, tp",
    "tp 4, copies of heads",
    "SHARD_OPTIMIZER, replicas",
    "FULL_SHARD, loss in chunks",
    "pp 4, 1f1b",
    "pp 4, interleaved_1f1b",
    "pp 4, zb_v",
    "pp 2, dropout",
    "pp 2, zb_h1, SHARD_OPTIMIZER",
    "pp 2, zb_h1, FULL_SHARD",
)
USUAL = tuple(name for name in LAYOUTS if name not in LONG)


# The mistakes of `faults.py`, which are planted together where one does not hide another: the layout, and the mistakes.
_ONE, _TP, _PP = "sgd", "tp 2", "pp 2, 1f1b"
FAULTY: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        _ONE,
        (
            "a CPU number stacked",
            "a state on the CPU",
            "a buffer on the CPU",
            "a number read",
            "a list read",
            "a branch",
            "a copy to the CPU",
            "a constant copied",
        ),
    ),
    (_ONE, ("a CPU tensor added",)),
    (_ONE, ("a mask as an index",)),
    (_ONE, ("places of what is not zero",)),
    (
        _TP,
        (
            "a CPU tensor reduced",
            "int16 reduced",
            "a transposed tensor reduced",
            "two dtypes reduced",
            "reduced by one rank",
        ),
    ),
    ("FULL_SHARD, tp 2 along the sequence", ("orders in a ring",)),
    (_PP, ("a message too short", "a message without a receiver")),
    (BLOCKS[1], ("one more gather in each block",)),
)


def programs(of: str) -> list[tuple[str, int, tuple[str, ...]]]:
    """Returns every rank of the layouts for the "long" tests, or of the "usual" ones and then of those that mistakes
    are planted in, with these."""
    runs = [(layout, ()) for layout in LONG] if of == "long" else [*((layout, ()) for layout in USUAL), *FAULTY]
    return [(layout, rank, faults) for layout, faults in runs for rank in range(LAYOUTS[layout].parallel.world_size)]
