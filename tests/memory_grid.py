"""The memory model against dry runs of random layouts: named models, Llamas and GPTs, on up to 16,384 ranks.

`python tests/memory_grid.py --layouts 40 --seed 0 --options` ends with 1 where the model is further below a dry run
than the bar, more than one layout in ten is further above, or a count of parameters is not the real one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

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
from parallel3d.errors import ConfigError, Parallel3dError
from parallel3d.launch.failure import print_error
from parallel3d.models import shape_cards
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.named import card_config
from parallel3d.planner.report.text import layout_text
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from parallel3d.tools.arguments import Parser, whole
from parallel3d.tools.verify.command import Verified, verify

MOST_BELOW, MOST_ABOVE = 0.02, 0.05  # shares of the dry run's peak; nine in ten stay below the second
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
        recipe = _layout(draw, card_config(name, cards[name]))
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


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line, and returns the exit status."""
    parser = Parser(
        prog="python tests/memory_grid.py",
        description="Dry runs of random layouts (Llama and GPT, up to 16,384 ranks), each against the model.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layouts", type=whole, default=40, help="how many (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--options", action="store_true", help="draw precisions, optimizers, dropout and more, too")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args(arguments)
    draw = random_options if options.options else random_layouts
    try:
        found = [_told(*layout) for layout in draw(options.layouts, options.seed)]
    except Parallel3dError as error:
        print_error(str(error))
        return error.exit_status
    errors = sorted(each.difference for each in found)
    lowest, highest, ninth = errors[0], errors[-1], errors[max(0, len(errors) * 9 // 10 - 1)]
    exact = all(each.parameters == each.dry.parameter_count for each in found)
    is_met = lowest >= -MOST_BELOW and ninth <= MOST_ABOVE and exact
    middle = median(map(abs, errors))
    if options.json:
        tree = {
            "layouts": [_tree(each) for each in found],
            "median_abs_error_pct": 100 * middle,
            "worst_abs_error_pct": 100 * max(-lowest, highest),
            "lowest_error_pct": 100 * lowest,
            "highest_error_pct": 100 * highest,
            "nine_in_ten_below_pct": 100 * ninth,
            "parameters_exact": exact,
        }
        print(json.dumps(tree))
    else:
        print("\n".join(map(_line, found)))
        print(f"lowest {lowest:+.2%} (bar -2%), nine in ten up to {ninth:+.2%} (bar +5%), highest {highest:+.2%}")
        print(f"median {middle:.2%}; parameters exact: {exact}")
    return 0 if is_met else 1


def _told(recipe: Recipe, pipeline_rank: int) -> Verified:
    found = verify(recipe, pipeline_rank * (recipe.parallel.world_size // recipe.parallel.pp))
    print(_line(found), file=sys.stderr, flush=True)
    return found


def _line(found: Verified) -> str:
    recipe = found.recipe
    return (
        f"{found.difference:+7.2%}  {found.model.total / GIB:8.2f} {found.dry.peak.total / GIB:8.2f} GiB  "
        f"{recipe.model.name} seq_len={recipe.train.seq_len} {recipe.train.precision} {layout_text(recipe.parallel)} "
        f"x {recipe.microbatches}, rank {found.rank} of {recipe.parallel.world_size}"
    )


def _tree(found: Verified) -> dict[str, object]:
    return {
        "layout": _line(found),
        "model_gib": found.model.total / GIB,
        "dry_run_gib": found.dry.peak.total / GIB,
        "error_pct": 100 * found.difference,
    }


if __name__ == "__main__":
    sys.exit(main())
