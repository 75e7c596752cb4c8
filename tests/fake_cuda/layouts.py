"""The layouts that are trained on fake `cuda:0` tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel3d.config.recipe import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)

LLAMA = ModelConfig(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn_hidden=64,
    vocab=264,
)
DROPPED = replace(LLAMA, layers=1, dropout=0.1, attention_dropout=0.1)
TIED = replace(LLAMA, layers=4, tied_embeddings=True)
GPT = ModelConfig(
    architecture="gpt",
    layers=1,
    hidden=32,
    heads=4,
    ffn_hidden=64,
    vocab=264,
    max_positions=16,
)


def recipe(
    model: ModelConfig = LLAMA,
    *,
    optimizer: str = "adamw",
    microbatches: int = 1,
    precision: str = "bf16",
    **parallel: Any,
) -> Recipe:
    layout = ParallelConfig(**parallel)
    batch = microbatches * layout.microbatch_size * layout.dp
    train: dict[str, Any] = {"precision": precision, "device": "cuda"}
    return Recipe(
        model=model,
        parallel=layout,
        train=TrainConfig(
            steps=10,
            seq_len=16,
            global_batch_size=batch,
            **train,
        ),
        optimizer=OptimizerConfig(name=optimizer),  # type: ignore[arg-type]
    )


TP = {"tp": 2, "sequence_parallel": True}
PP = {"pp": 2, "microbatches": 2}
# The collectives of a block are the difference between these two.
BLOCKS = ("tp 2, sequence parallel", "tp 2, sequence parallel, three blocks")
LAYOUTS: dict[str, Recipe] = {
    "documents": replace(recipe(microbatches=2), data=DataConfig(documents="mask")),
    "gpt, fp16, sgd": recipe(GPT, precision="fp16", optimizer="sgd"),
    "dropout, recompute": recipe(DROPPED, recompute="full"),
    "muon, sharded, tp": recipe(replace(LLAMA, layers=1), optimizer="muon", dp_shard=2, **TP),
    BLOCKS[0]: recipe(**TP),
    BLOCKS[1]: recipe(replace(LLAMA, layers=3), **TP),
    "tp 2, copies of heads": recipe(replace(LLAMA, kv_heads=1), tp=2),
    "NO_SHARD": recipe(dp_replicate=2, sharding="NO_SHARD"),
    "SHARD_OPTIMIZER": recipe(dp_shard=2, sharding="SHARD_OPTIMIZER"),
    "HYBRID_SHARD": recipe(replace(LLAMA, layers=1), dp_replicate=2, dp_shard=2, microbatches=2),
    "offload, tp": recipe(dp_shard=2, offload=True, **TP),
    "offload, tied": recipe(replace(TIED, layers=2), offload=True, **PP),
    "zb_v, tied": recipe(TIED, schedule="zb_v", virtual_stages=2, **PP),
}
