"""Random layouts for `plan_verify_grid`: named models, Llamas and GPTs up to 405B and 1T, on up to 16,384 ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import yaml

from parallel3d.config import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.pipeline.schedules import STAGES_PER_RANK
from parallel3d.validation import validate

_MOST_RANKS = 16_384
_SCHEDULES = ("1f1b", "1f1b", "interleaved_1f1b", "interleaved_1f1b", "gpipe", "zb_h1", "looped_bfs")
_STRATEGIES = (None, None, "SHARD_OPTIMIZER", "NO_SHARD", "SHARD_GRAD_OP")
_MOST_BLOCKS = 96  # forwards and backwards of a block in a dry run, so that it takes seconds


def random_layouts(count: int, seed: int) -> Iterator[tuple[Recipe, int]]:
    """(recipe, pipeline rank), each a layout that the trainer accepts."""
    draw = random.Random(seed)
    cards = shape_cards()
    names = sorted(name for name in cards if name.startswith(("llama", "gpt", "qwen", "mistral", "megatron")))
    found = 0
    while found < count:
        name = draw.choice(names)
        recipe = _layout(draw, ModelConfig(name=name, **yaml.safe_load(cards[name].read_text())))
        if recipe is not None:
            found += 1
            yield recipe, draw.choice((0, recipe.parallel.pp - 1, draw.randrange(recipe.parallel.pp)))


def _layout(draw: random.Random, model: ModelConfig) -> Recipe | None:
    """None where the numbers drawn do not suit each other."""
    tp, pp = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2, 4, 8, 16))
    schedule = draw.choice(_SCHEDULES) if pp > 1 else "1f1b"
    rule = STAGES_PER_RANK[schedule]
    virtual = 1 if rule.most == 1 else draw.choice((2, 3, 4))
    if model.layers < pp * virtual:
        return None
    shards = draw.choice((1, 2, 8, 32, 128, 512))
    replicas = draw.choice((1, 1, 2, 4))
    strategy = draw.choice(_STRATEGIES)
    if strategy == "SHARD_GRAD_OP" and replicas > 1:
        strategy = "_HYBRID_SHARD_ZERO2"
    microbatch = draw.choice((1, 1, 2, 4))
    microbatches = pp * draw.choice((1, 2, 4)) if virtual > 1 else draw.choice((1, 2, pp, 2 * pp, 3 * pp + 1))
    parallel = ParallelConfig(
        pp=pp,
        dp_replicate=replicas,
        dp_shard=shards,
        tp=tp,
        virtual_stages=virtual,
        schedule=schedule,
        microbatch_size=microbatch,
        sharding=strategy,
        sequence_parallel=tp > 1 and draw.random() < 0.6,
        recompute=draw.choice(("none", "none", "selective", "full")),
    )
    train = TrainConfig(
        steps=1,
        global_batch_size=microbatches * microbatch * parallel.dp,
        seq_len=draw.choice((1024, 2048, 4096, 8192)),
        precision=draw.choice(("bf16", "bf16", "bf16", "fp32")),
    )
    if model.max_positions is not None:
        train = replace(train, seq_len=min(train.seq_len, model.max_positions))
    recipe = Recipe(model=model, train=train, parallel=parallel, optimizer=OptimizerConfig(), run_dir="runs/verify")
    try:
        validate(recipe)
    except ConfigError:
        return None
    blocks = 2 * -(-model.layers // pp) * min(microbatches, 2 * pp)
    return recipe if parallel.world_size <= _MOST_RANKS and blocks <= _MOST_BLOCKS else None
