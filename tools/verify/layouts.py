"""Random layouts for `tools.verify.grid`: named models, Llamas and GPTs, on up to 16,384 ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import yaml

from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    ParallelConfig,
    Precision,
    Recipe,
    Recompute,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.config.sharding_strategies import REPLICATED, Cadence, ShardingName
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.schedules.registry import SCHEDULES, ScheduleName

_MOST_RANKS = 16_384
_SCHEDULES: tuple[ScheduleName, ...] = (
    *("1f1b", "1f1b", "interleaved_1f1b", "interleaved_1f1b", "gpipe", "looped_bfs"),
    *("zb_h1", "interleaved_zb", "zb_v", "dualpipe_v"),
)
_STRATEGIES: tuple[ShardingName | None, ...] = (None, None, "SHARD_OPTIMIZER", "NO_SHARD", "SHARD_GRAD_OP")
_RECOMPUTE: tuple[Recompute, ...] = ("none", "none", "selective", "full", "every_n")
_HOW: tuple[Cadence, ...] = ("step", "step", "microbatch")
_FAMILIES = ("llama", "gpt", "qwen", "mistral", "megatron")
_LARGE = ("llama3-70b", "llama3.1-405b", "gpt3-175b", "megatron-145.6b")  # every fourth layout
_OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw", "sgd", "adafactor", "muon")
_MOST_BLOCKS = 64  # forwards and backwards of a block in a dry run, so that it takes seconds


def random_layouts(count: int, seed: int) -> Iterator[tuple[Recipe, int]]:
    """(recipe, pipeline rank), each a layout that the trainer accepts."""
    draw = random.Random(seed)
    cards = shape_cards()
    names = sorted(name for name in cards if name.startswith(_FAMILIES))
    large = [name for name in _LARGE if name in cards]
    found = 0
    while found < count:
        name = draw.choice(names if found % 4 else large)
        recipe = _layout(draw, ModelConfig(name=name, **yaml.safe_load(cards[name].read_text())))
        if recipe is not None:
            found += 1
            yield recipe, draw.choice((0, recipe.parallel.pp - 1, draw.randrange(recipe.parallel.pp)))


def random_options(count: int, seed: int) -> Iterator[tuple[Recipe, int]]:
    """`random_layouts` with what they leave at its default: 16-bit precisions, optimizers and their states' dtype,
    stages cut by hand, dropout, a loss in chunks, blocks gathered ahead, a step in the backward."""
    draw = random.Random(seed)
    found = 0
    for recipe, rank in random_layouts(10 * count, seed):
        changed = _with_options(draw, recipe)
        if changed is not None:
            yield changed, rank
            found += 1
        if found == count:
            return


def _with_options(draw: random.Random, recipe: Recipe) -> Recipe | None:
    """None where what is drawn does not suit the layout."""
    model, parallel, train = recipe.model, recipe.parallel, recipe.train
    precision: Precision = draw.choice(("fp16", "bf16_pure", train.precision))
    name: OptimizerName = draw.choice(_OPTIMIZERS)
    optimizer = OptimizerConfig(
        name=name,
        state_dtype=draw.choice((None, "fp32", "bf16")) if name != "adafactor" else None,
        stochastic_rounding=precision == "bf16_pure" and draw.random() < 0.5 and name != "muon",
    )
    stages = parallel.pp * parallel.virtual_stages
    if stages > 1 and draw.random() < 0.5:
        cuts = tuple(sorted(draw.sample(range(1, model.layers), stages - 1)))
        parallel = replace(parallel, stage_boundaries=cuts)
    train = replace(train, precision=precision, loss_chunk_tokens=draw.choice((None, None, 256, 1024)))
    model = replace(model, dropout=draw.choice((0.0, 0.0, 0.1)))
    if parallel.strategy not in REPLICATED:
        parallel = replace(parallel, prefetch=draw.choice((None, None, 1, 2, 3)))
    if name in ("adamw", "sgd") and draw.random() < 0.4:  # which takes one microbatch, and no norm first
        optimizer = replace(optimizer, step_in_backward=True, stochastic_rounding=False)
        train = replace(train, grad_clip=None, global_batch_size=parallel.dp * parallel.microbatch_size)
    changed = replace(recipe, model=model, parallel=parallel, train=train, optimizer=optimizer)
    try:
        validate(changed)
    except ConfigError:
        return None
    return changed


def _layout(draw: random.Random, model: ModelConfig) -> Recipe | None:
    """None where the numbers drawn do not suit each other."""
    tp, pp = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2, 4, 8, 16))
    schedule: ScheduleName = draw.choice(_SCHEDULES) if pp > 1 else "1f1b"
    most = SCHEDULES[schedule].stages.most
    virtual = draw.choice((2, 3, 4)) if most is None else most
    if model.layers < pp * virtual:
        return None
    replicas = draw.choice((1, 1, 2, 4))
    everyone = _MOST_RANKS // (pp * tp * replicas)
    shards = draw.choice((1, 2, 8, 32, 128, 512, everyone, everyone))
    strategy = draw.choice(_STRATEGIES)
    if strategy == "SHARD_GRAD_OP" and replicas > 1:
        strategy = "_HYBRID_SHARD_ZERO2"
    whole = strategy in REPLICATED
    recompute = draw.choice(_RECOMPUTE)
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
        recompute=recompute,
        recompute_every=draw.choice((2, 3)) if recompute == "every_n" else None,
        gather="step" if whole else draw.choice(_HOW),
        reduce="step" if whole or SCHEDULES[schedule].splits_backward else draw.choice(_HOW),
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
