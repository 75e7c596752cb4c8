"""Trains random decoders, as users write them, in random layouts. Each must follow plain PyTorch,
which trains the same decoder in one process in float64, or be refused in one line. A case follows
from its seed: see `fuzz_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.config.recipe import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.data.loader import Batch, BatchLoader
from parallel3d.data.windows import ShuffledWindows, TokensInMemory
from parallel3d.layers.linear import ColumnParallelLinear
from parallel3d.layers.parameter import (
    ParallelContext,
    initial_weights,
    normal,
)
from parallel3d.layers.positions import PackedDocuments
from parallel3d.layers.vocabulary import VocabParallelHead
from parallel3d.models import check_model
from parallel3d.models.decoder import Block, DecoderParts
from parallel3d.models.llama import Llama
from parallel3d.tools.bench.plain_torch.llama import PlainLlama
from parallel3d.tools.check_layout.data import Array
from parallel3d.tools.check_layout.plain import plain_optimizers
from parallel3d.tools.check_layout.record import whole
from parallel3d.training.worker import training_loader
from tests.distributed.fuzz_cases import (
    Case,
    Outcome,
    asked_or,
    assert_follow,
    draw_layout,
    train_all,
)
from tests.distributed.training_cases import make_trainer

SHORT = range(6)
LONG = range(300)
STEPS = 3
HIDDEN = 32
IGNORED_ID = 5
CLOSE = 1e-5


@dataclass(frozen=True)
class Drawn:
    """The options of a drawn decoder."""

    kinds: tuple[str, ...]  # the kind of each block: serial, parallel, attention, mlp
    # a VocabParallelHead, or a linear layer: gathered, split, or with a bias
    head: str = "vocab"
    ties: tuple[str, ...] = ()  # "b = a": two names of parameters or modules
    frozen: tuple[str, ...] = ()  # names of parameters that are not trained
    after: str = "nothing"  # what is done to the logits: soft_cap, transposed, log_softmax, float64


def finished(logits: Tensor, drawn: Drawn) -> Tensor:
    """Computes what the model does after its head."""
    match drawn.after:
        case "soft_cap":
            return 2.0 * torch.tanh(logits / 2.0)
        case "transposed":
            return logits.transpose(0, 1).contiguous().transpose(0, 1)
        case "log_softmax":
            return logits.log_softmax(dim=-1)
        case "float64":
            return logits.double()
    return logits


def change(model: Any, drawn: Drawn) -> None:
    """Ties parameters of a model and freezes some, as its constructor would."""
    for tie in drawn.ties:
        target, source = tie.split(" = ")
        owner, _, attribute = target.rpartition(".")
        source_owner, _, source_attribute = source.rpartition(".")
        shared = getattr(model.get_submodule(source_owner), source_attribute)
        setattr(model.get_submodule(owner), attribute, shared)
    for name in drawn.frozen:
        model.get_parameter(name).requires_grad_(False)


def block_forward(
    block: Any, x: Tensor, kind: str, attention: Callable[[Tensor], Tensor]
) -> Tensor:
    """Computes a block of any kind."""
    if kind == "parallel":
        y = block.attention_norm(x)
        return x + attention(y) + block.mlp(y)
    if kind != "mlp":
        x = x + attention(block.attention_norm(x))
    if kind == "attention":
        return x
    return x + block.mlp(block.mlp_norm(x))


def remove_unused(block: Any, kind: str) -> None:
    """Removes what a block of this kind does not have."""
    unused = {
        "mlp": ["attention", "attention_norm"],
        "attention": ["mlp", "mlp_norm"],
        "parallel": ["mlp_norm"],
    }
    for name in unused.get(kind, ()):
        delattr(block, name)


class FuzzedBlock(Block):
    """A block of the kind that its index has."""

    def __init__(
        self,
        config: ModelConfig,
        context: ParallelContext,
        parts: DecoderParts,
        index: int,
        *,
        selective: bool,
    ) -> None:
        super().__init__(config, context, parts, index, selective=selective)
        self.kind = Drawn(**config.options).kinds[index]
        remove_unused(self, self.kind)

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        attend = (
            None if self.kind == "mlp" else partial(self.attention, documents=documents, key=key)
        )
        return block_forward(self, x, self.kind, attend)  # type: ignore[arg-type]


class Fuzzed(Llama):
    """A decoder as its options say: the user's own class."""

    Options = Drawn
    block_class = FuzzedBlock

    def __init__(
        self, config: ModelConfig, *, tp: Any, sequence_parallel: bool, device: Any, **settings: Any
    ) -> None:
        super().__init__(
            config,
            tp=tp,
            sequence_parallel=sequence_parallel,
            device=device,
            **settings,
        )
        self.drawn = drawn = Drawn(**config.options)
        more = {"biased": {"bias": True}, "gathered": {"gather_output": True}}.get(drawn.head, {})
        kind = VocabParallelHead if drawn.head == "vocab" else ColumnParallelLinear
        context = ParallelContext(tp, sequence_parallel, device, init=normal(config.init_std))
        self.head = kind(config.hidden, config.vocab, tp=context, **more)
        change(self, drawn)

    def forward(self, *args: Any, **settings: Any) -> Tensor:
        y = super().forward(*args, **settings)
        if self.head is None:
            return y
        return finished(y, self.drawn)


class Plain(PlainLlama):
    """The same decoder in plain torch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.drawn = drawn = Drawn(**config.options)
        for block, kind in zip(self.layers.values(), drawn.kinds, strict=True):
            remove_unused(block, kind)
        self.head = nn.Linear(config.hidden, config.vocab, bias=drawn.head == "biased")
        change(self, drawn)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block, kind in zip(self.layers.values(), self.drawn.kinds, strict=True):
            x = block_forward(block, x, kind, getattr(block, "attention", None))  # type: ignore[arg-type]
        y: Tensor = self.head(self.norm(x))
        return finished(y, self.drawn)


def draw_ties(random: Random, model: nn.Module) -> tuple[str, ...]:
    """Draws pairs of parameters of one use, or of whole MLPs, that a model is to share."""
    blocks = [name for name, _ in model.named_parameters() if name.startswith("layers.")]
    mlps = [name for name, _ in model.named_modules() if name.endswith(".mlp")]
    pairs = [
        f"{b} = {a}"
        for a, b in combinations([*blocks, *mlps], 2)
        if a.split(".")[2:] == b.split(".")[2:]
    ]
    drawn = random.sample(pairs, min(random.choice([0, 1, 2]), len(pairs)))
    is_tied = not drawn or random.random() < 0.5
    return (*drawn, *["head.weight = embed.weight"] * is_tied)


def draw(seed: int) -> Case:
    """Draws the model, the layout and the training of a seed. A model has a few of the oddities,
    never all."""
    random = Random(seed)
    parallel = draw_layout(random, random.choice([2, 4]))
    kinds = ["ties", "frozen", "head", "after", "chunk", "vocab", "loss"]
    odd = random.sample(kinds, random.randint(1, 4))
    layers = max(parallel.stages, random.randint(2, 4))
    head = random.choice(["column", "biased", "gathered"]) if "head" in odd else "vocab"
    odd_vocab = random.choice([261, 4099]) if head == "vocab" else 4096
    vocab = odd_vocab if "vocab" in odd else 260
    afters = ["soft_cap", "transposed", "float64"]
    if parallel.tp == 1 or head == "gathered":  # else no rank has all logits of a token
        afters.append("log_softmax")
    after = random.choice(afters) if "after" in odd else "nothing"
    block_kinds = ["serial", "serial", "parallel", "attention", "mlp"]
    drawn = Drawn(
        kinds=tuple(random.choices(block_kinds, k=layers)),
        head=head,
        after=after,
    )
    config = ModelConfig(
        architecture=f"{__name__}:Fuzzed",
        layers=layers,
        hidden=HIDDEN,
        heads=4,
        kv_heads=random.choice([1, 2, 4]),
        ffn_hidden=random.choice([48, 64]),
        vocab=vocab,
        init_std=0.15,
        options=asdict(drawn),
    )
    plain = Plain(config)
    names = [name for name, _ in plain.named_parameters()]
    ties = draw_ties(random, plain) if "ties" in odd else ()
    frozen = tuple(random.sample(names, 3)) if "frozen" in odd else ()
    config = replace(config, options=asdict(replace(drawn, ties=ties, frozen=frozen)))
    batch = parallel.dp * parallel.microbatch_size * random.choice([1, 2, 4])
    train = TrainConfig(
        steps=STEPS,
        global_batch_size=batch,
        seq_len=32 if vocab > 4000 else random.choice([8, 12]),
        seed=seed,
        grad_clip=random.choice([None, 0.5]),
        loss_chunk_tokens=5 if "chunk" in odd else None,
        z_loss=random.choice([0.0, 1e-2]) if "loss" in odd else 0.0,
    )
    optimizer = OptimizerConfig(
        name="sgd",
        lr=0.03,
        weight_decay=random.choice([0.0, 0.5]),
        min_lr_ratio=1.0,
    )
    data = DataConfig(ignore_token_ids=(IGNORED_ID,) if "loss" in odd else ())
    return Case(
        seed,
        Recipe(
            model=config,
            train=train,
            parallel=parallel,
            optimizer=optimizer,
            data=data,
        ),
    )


def batches(recipe: Recipe, rank: int) -> BatchLoader:
    """Returns batches of random ids."""
    train = recipe.train
    length = (train.steps + 1) * train.global_batch_size * train.seq_len + 1
    ids = np.random.default_rng(train.seed).integers(0, recipe.model.vocab, length, dtype=np.int32)
    source = ShuffledWindows(TokensInMemory(ids), seq_len=train.seq_len, seed=train.seed)
    return training_loader(recipe, source, rank, None)


@dataclass(frozen=True)
class Trained:
    """The results of a training."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    weights: list[tuple[str, Array]]
    parameters: int


def train_case(recipe: Recipe) -> Trained:
    """Trains the case on this rank."""
    validate(recipe)
    check_model(recipe)
    trainer = make_trainer(recipe)
    loader = batches(recipe, dist.get_rank())
    results = [trainer.train_step(loader.batch(step)) for step in range(STEPS)]
    batch = loader.batch(STEPS)
    weights = [
        (p.name, whole(p.part.distributed(p.local.detach())).numpy()) for p in trainer.parameters
    ]
    evaluation = trainer.evaluate([batch])
    return Trained(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        evaluation,
        weights,
        trainer.progress.parameters,
    )


def plain_loss(
    logits: Tensor,
    labels: Tensor,
    train: TrainConfig,
) -> Tensor:
    """Returns the mean loss over the labels that count."""
    labels, counts = labels.flatten(), (labels != -100).flatten()
    logits = logits.flatten(0, -2)
    loss = F.cross_entropy(logits, labels)
    return loss + train.z_loss * logits.logsumexp(-1)[counts].square().mean()


def train_plainly(recipe: Recipe) -> tuple[Trained, dict[str, Array]]:
    """Trains the case in plain torch, and returns the initial weights, too."""
    model = Plain(recipe.model)
    train = recipe.train
    alone = Recipe(
        model=recipe.model,
        train=train,
        parallel=ParallelConfig(),
        data=recipe.data,
    )
    loader = batches(alone, 0)
    meta = Fuzzed(
        recipe.model,
        tp=None,
        sequence_parallel=False,
        device="meta",
    )
    with torch.no_grad():
        for name, weight in initial_weights(meta, train.seed).items():
            model.get_parameter(name).copy_(weight)
    model.double()
    names = [name for name, _ in meta.named_parameters()]
    start = {name: model.get_parameter(name).detach().clone().numpy() for name in names}
    optimizers = plain_optimizers(model, recipe.optimizer, matrices=[])
    losses = []
    norms = []
    for step in range(STEPS):
        inputs, labels = flat(loader.batch(step))
        model.zero_grad()
        loss = plain_loss(model(inputs), labels, train)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip or float("inf"))
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    inputs, labels = flat(loader.batch(STEPS))
    with torch.no_grad():
        evaluation = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).item()
    weights = [(name, model.get_parameter(name).detach().numpy()) for name in names]
    return Trained(
        losses,
        norms,
        evaluation,
        weights,
        sum(p.numel() for p in model.parameters()),
    ), start


def flat(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.inputs.flatten(0, 1), batch.labels.flatten(0, 1)


def differences(outcome: Outcome) -> Iterator[str]:
    """Yields each difference between a training in a layout and plain PyTorch."""
    if not outcome.answers:
        return
    expected, start = train_plainly(outcome.case.recipe)
    weights = dict(expected.weights)
    for rank, answer in enumerate(outcome.answers):
        for what in ("losses", "norms", "evaluation", "parameters"):
            ours = getattr(answer, what)
            theirs = getattr(expected, what)
            if ours != pytest.approx(theirs, rel=CLOSE):
                yield f"rank {rank}: {what} {ours}, in plain PyTorch {theirs}"
        for name, ours in answer.weights:
            error = np.linalg.norm(ours - weights[name])
            moved = np.linalg.norm(weights[name] - start[name])
            size = np.linalg.norm(weights[name])
            if not error <= min(CLOSE * size, 10 * CLOSE * moved + CLOSE / 10 * size):
                yield (
                    f"rank {rank}: {name} is off by {error:.2g}, and plain PyTorch moved it by "
                    f"{moved:.2g}"
                )
    held = {name for answer in outcome.answers for name, _ in answer.weights}
    if held != set(weights):
        yield f"parameters {held ^ set(weights)} are not in both models"


@pytest.mark.parametrize("seeds", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=len)
def test_random_models_follow_plain_torch_or_are_refused(
    world: Callable, tmp_path: Path, seeds: range
) -> None:
    cases = [draw(seed) for seed in asked_or(seeds)]
    outcomes = train_all(world, train_case, cases, tmp_path)
    assert_follow((outcome, list(differences(outcome))) for outcome in outcomes)
