"""Trains random recipes of the shipped models in random layouts of 2 to 8 processes. Each must
follow the same recipe in one process, in float32 to the numerics that a layout must not change, or
be refused in one line.

In 16 bits one process is not exact either. So the layout and one process are both compared with one
process in float32. The gradient of a parameter may be `NOISE` times as far from it as in one
process, plus one rounding of the 16-bit type.

A case follows from its seed: see `fuzz_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch.distributed as dist

from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import (
    DataConfig,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RopeScaling,
    SequenceRange,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.config.rules_layout import divides_key_value_heads
from parallel3d.shard_sizes import divisors
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.tools.check_layout.data import Array
from parallel3d.tools.check_layout.record import whole
from tests.distributed.fuzz_cases import (
    Case,
    Outcome,
    asked_or,
    assert_follow,
    draw_layout,
    train_all,
)
from tests.distributed.training_cases import make_loader, make_trainer
from tests.distributed.world import World

SHORT = (0, 1, 2, 5, 7, 10)
LONG = range(11, 211)
STEPS = 4
# relative, in float32
FIRST = 1e-6
LATER = 1e-4
GRADIENT = 1e-5
# of losses to float32's: a rounding of the type
CLOSE = {
    "fp32": LATER,
    "bf16": 4e-3,
    "bf16_pure": 4e-3,
    "fp16": 4e-4,
}
ROUNDING = {
    "fp32": 0.0,
    "bf16": 2.0**-8,
    "bf16_pure": 2.0**-8,
    "fp16": 2.0**-11,
}
NOISE = 2.0


def draw_model(
    random: Random, parallel: ParallelConfig, seq_len: int, *, masked: bool
) -> ModelConfig:
    """Draws a small model that the layout can split."""
    heads = parallel.tp * random.choice([1, 2]) * (2 if parallel.tp == 1 else 1)
    kv_heads = random.choice(
        [n for n in divisors(heads) if divides_key_value_heads(n, parallel.tp)]
    )
    dropout = random.choice([0.0, 0.0, 0.1])
    config = ModelConfig(
        architecture=random.choice(["llama", "llama", "gpt"]),
        layers=max(parallel.stages, random.randint(1, 4)),
        hidden=8 * heads,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=random.choice([None, 12]),
        ffn_hidden=parallel.tp * random.choice([12, 16]),
        vocab=random.choice([257, 260, 288]),
        tied_embeddings=random.random() < 0.5,
        dropout=dropout,
        attention_dropout=0.0 if masked else dropout,
        init_std=0.08,
    )
    if config.architecture == "gpt":
        return replace(config, max_positions=seq_len + 3)
    scaling = RopeScaling(type="llama3", factor=4.0, original_max_positions=8)
    return replace(
        config,
        qkv_bias=random.random() < 0.3,
        qk_norm=random.random() < 0.3,
        window=random.choice([None, None, 5]),
        rope_scaling=random.choice([None, None, scaling]),
    )


def draw_optimizer(
    random: Random,
    steps: int,
    *,
    precision: str,
) -> OptimizerConfig:
    """Draws an optimizer and its schedule."""
    name = random.choice(["adamw", "adamw", "sgd", "muon"])
    config = OptimizerConfig(
        name=name,  # type: ignore[arg-type]
        lr={"sgd": 0.1}.get(name, 1e-3),
        weight_decay=random.choice([0.0, 0.1]),
        warmup_steps=min(steps, random.choice([0, 2])),
        schedule=random.choice(["cosine", "linear", "constant", "wsd"]),  # type: ignore[arg-type]
    )
    if config.schedule == "wsd":
        config = replace(config, decay_start=min(steps, 3))
    if name == "sgd":
        return replace(config, momentum=random.choice([0.0, 0.9]))
    if name == "muon":
        return replace(config, ns_dtype="fp32", lr_adjust=random.choice([None, "original"]))  # type: ignore[arg-type]
    return config


def draw(seed: int) -> Case:
    """Draws the recipe of a seed."""
    random = Random(seed)
    parallel = draw_layout(random, random.choice([2, 2, 2, 3, 4, 4, 4, 6, 8]))
    if parallel.virtual_stages > 1 and parallel.schedule in (
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zb",
    ):
        parallel = replace(parallel, virtual_stages=random.choice([2, 3]))
    if random.random() < 0.25:
        parallel = replace(parallel, reduce_dtype="bf16")
    masked = random.random() < 0.3
    precision = random.choice(["fp32"] * 6 + ["bf16", "bf16", "bf16_pure", "fp16"])
    seq_len = parallel.tp * random.choice([4, 6]) * (2 if parallel.tp == 1 else 1)
    model = draw_model(random, parallel, seq_len, masked=masked)
    if random.random() < 0.15 and model.layers > 1:
        parallel = replace(parallel, recompute="every_n", recompute_every=2)
    unit = parallel.dp * parallel.microbatch_size
    batch = unit * random.choice([1, 2, 4, 3])
    grows = batch > unit and random.random() < 0.3
    train = TrainConfig(
        steps=STEPS,
        global_batch_size=batch,
        batch_warmup_start=unit if grows else None,
        batch_warmup_increment=unit if grows else None,
        batch_warmup_steps=3 if grows else None,
        seq_len=seq_len,
        seed=seed,
        precision=precision,  # type: ignore[arg-type]
        loss_chunk_tokens=random.choice([None, None, 5]),
        z_loss=random.choice([0.0, 0.0, 1e-3]),
        grad_clip=random.choice([None, 0.5]),
        on_nonfinite=random.choice(["stop", "skip"]),  # type: ignore[arg-type]
        compare_replicas_every=random.choice([None, 1]),
    )
    data = DataConfig(
        documents="mask" if masked else "join",
        ignore_token_ids=random.choice([(), (ord("t"), ord("e"))]),
        skip=random.choice([(), (SequenceRange(first=2, last=5),)]),
    )
    optimizer = draw_optimizer(random, STEPS, precision=precision)
    scale = LossScaleConfig(initial=256.0) if precision == "fp16" else LossScaleConfig()
    is_even = parallel.dp_shard % 2 == 0 and seq_len % (4 * parallel.tp) == 0
    if is_even and random.random() < 0.7:
        parallel = replace(parallel, dp_shard=parallel.dp_shard // 2, cp=2)
    # In 16 bits, tokens between two experts choose another one than in float32.
    if precision == "fp32" and model.architecture == "llama" and random.random() < 0.3:
        shared = parallel.tp * random.choice([0, 8])
        own = ExpertsConfig(
            count=12,
            per_token=random.choice([1, 2, 3]),
            hidden=random.choice([8, 12]),
            shared_hidden=shared,
            shared_gate=shared > 0 and random.random() < 0.5,
            dense_layers=random.choice([0, 1]),
            score=random.choice(["softmax", "sigmoid"]),  # type: ignore[arg-type]
            bias_rate=random.choice([0.0, 0.001]),
        )
        model = replace(model, experts=own, init_std=0.2)
        ranks = parallel.dp_shard * parallel.cp * parallel.tp
        sizes = [n for n in divisors(ranks) if n % parallel.tp == 0 and 12 % n == 0]
        parallel = replace(parallel, ep=random.choice([None, *sizes]))
    recipe = Recipe(
        model=model,
        train=train,
        parallel=parallel,
        optimizer=optimizer,
        data=data,
        loss_scale=scale,
    )
    return Case(seed, recipe)


@dataclass(frozen=True)
class Trained:
    """The results of a training: loss, norm and labels of each step, and the gradients of the first
    step."""

    losses: list[float]
    norms: list[float]
    tokens: list[int]
    evaluation: float
    gradients: list[tuple[str, Array]]


def train_case(recipe: Recipe) -> Trained:
    """Trains the recipe on this rank."""
    validate(recipe)
    trainer = make_trainer(recipe)
    loader = make_loader(recipe, dist.get_rank())
    gradients: list[tuple[str, Array]] = []

    def keep(parameter: LocalParameter) -> None:
        assert parameter.local.grad is not None
        gradients.append(
            (
                parameter.name,
                whole(parameter.part.distributed(parameter.local.grad)).float().numpy(),
            )
        )

    results = [trainer.train_step(loader.batch(0), observe=keep)]
    results += [trainer.train_step(loader.batch(step)) for step in range(1, recipe.train.steps)]
    factor = results[0].factor
    return Trained(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        [result.tokens for result in results],
        trainer.evaluate([loader.batch(recipe.train.steps)]),
        [(name, gradient * factor) for name, gradient in gradients],
    )


def alone(recipe: Recipe) -> Recipe:
    """Returns the recipe for one process, with the microbatches of the layout if their gradients
    are summed in bf16."""
    train = recipe.train
    size = train.batch_warmup_start or train.global_batch_size
    if train.precision == "bf16_pure":
        size = recipe.parallel.microbatch_size
    return replace(recipe, parallel=ParallelConfig(microbatch_size=size))


def in_float32(recipe: Recipe) -> Recipe:
    """Returns the recipe for one process without any rounding to 16 bits."""
    exact = replace(recipe, train=replace(recipe.train, precision="fp32"))
    return alone(replace(exact, loss_scale=LossScaleConfig()))


def outcomes(
    world: Callable[[int], World], cases: Sequence[Case], folder: Path
) -> Iterator[tuple[Outcome, list[Outcome]]]:
    """Yields the outcome of each case in its layout, and those of one process: in its precision,
    and in float32."""
    exact = [Case(case.seed, in_float32(case.recipe)) for case in cases]
    rounded = [
        Case(case.seed, alone(case.recipe))
        for case in cases
        if case.recipe.train.precision != "fp32"
    ]
    references: dict[int, list[Outcome]] = {}
    for outcome in (
        *train_all(world, train_case, exact, folder),
        *train_all(world, train_case, rounded, folder),
    ):
        references.setdefault(outcome.case.seed, []).append(outcome)
    for outcome in train_all(world, train_case, cases, folder):
        yield outcome, references[outcome.case.seed]


def differences(outcome: Outcome, references: Sequence[Outcome]) -> Iterator[str]:
    """Yields each difference between a training in a layout and one process."""
    for reference in references:
        if not reference.answers:
            yield f"one process: {reference.failed or reference.refused}"
            return
    recipe = outcome.case.recipe
    exact = references[0].answers[0]
    same = references[-1].answers[0]
    precision = recipe.train.precision
    ranks = recipe.parallel.dp * recipe.parallel.cp
    sends_bf16 = recipe.parallel.reduce_dtype == "bf16" and ranks > 1
    coarsest = "bf16" if sends_bf16 else precision
    close = max(CLOSE[precision], CLOSE[coarsest])
    rounding = max(ROUNDING[precision], ROUNDING[coarsest])
    first = FIRST if precision == "fp32" else close
    of_one = dict(same.gradients)
    of_exact = dict(exact.gradients)
    total = exact.norms[0]
    for rank, answer in enumerate(outcome.answers):
        pairs = [
            (answer.losses[:1], exact.losses[:1], first),
            (answer.losses, exact.losses, close),
            ([answer.evaluation], [exact.evaluation], close),
            (answer.tokens, exact.tokens, 0.0),
            (answer.norms[:1], exact.norms[:1], max(GRADIENT, 4 * rounding)),
        ]
        for ours, theirs, limit in pairs:
            if ours != pytest.approx(theirs, rel=limit):
                yield f"rank {rank}: {ours}, in one process {theirs}, limit {limit}"
        for name, gradient in answer.gradients:
            limit = max(GRADIENT, NOISE * distance(of_one[name], of_exact[name]) + rounding)
            size = np.linalg.norm(of_exact[name])
            error = np.linalg.norm(gradient - of_exact[name])
            if not error <= limit * size + GRADIENT * total:
                yield f"rank {rank}: the gradient of {name} is off by {error / size:.2g}"
    held = {name for answer in outcome.answers for name, _ in answer.gradients}
    if outcome.answers and held != set(of_exact):
        yield f"gradients of {held ^ set(of_exact)} are not in both"


def distance(ours: Array, theirs: Array) -> float:
    """Returns the distance of two tensors, relative to the second."""
    return float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1.0))


@pytest.mark.parametrize("seeds", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=len)
def test_random_recipes_follow_one_process_or_are_refused(
    world: Callable, tmp_path: Path, seeds: Sequence[int]
) -> None:
    cases = [draw(seed) for seed in asked_or(seeds)]
    found = []
    for outcome, references in outcomes(world, cases, tmp_path):
        found.append((outcome, list(differences(outcome, references))))
    assert_follow(found)
