"""Trains random decoders, as users write them, in random layouts. Each must follow plain PyTorch,
which trains the same decoder in one process in float64, or be refused in one line. A case follows
from its seed: see `fuzz_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from parallel3d.layers.attention import AttentionOptions
from parallel3d.layers.linear import ColumnParallelLinear
from parallel3d.layers.norm import LayerNorm, RMSNorm
from parallel3d.layers.parameter import (
    ParallelContext,
    ParallelModule,
    ParameterSpec,
    initial_weights,
    normal,
)
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding
from parallel3d.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead
from parallel3d.models import check_model
from parallel3d.models.decoder import Block, Decoder, DecoderParts
from parallel3d.tools.bench.plain_torch.llama import PlainAttention, PlainRotary
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

SHORT = (56, 76, 86, 117, 174, 200, 224, 269, 356, 384, 418, 477, 888, 1060, 1234, 1303, 1870, 2183)
LONG = range(300)
STEPS, HIDDEN, IGNORED_ID = 3, 32, 5
CLOSE = 1e-5


@dataclass(frozen=True)
class Drawn:
    """The options of a drawn decoder."""

    kinds: tuple[str, ...]  # the kind of each block: serial, parallel, attention, mlp, twice
    activation: str = "swiglu"
    norm: str = "rms"
    biases: bool = False
    # a VocabParallelHead; gathered: a linear layer with gather_output; column and biased: others
    head: str = "vocab"
    # the seed of the order in which modules are registered; 0: as a Decoder has them
    order: int = 0
    ties: tuple[str, ...] = ()  # "b = a": two names of parameters or modules
    other_start: bool = False  # the head declares other initial values than the embedding
    frozen: tuple[str, ...] = ()  # names of parameters that are not trained
    unused: tuple[str, ...] = ()  # modules that get a linear layer which no forward uses
    after: str = "nothing"  # what is done to the logits: soft_cap, scale, log_softmax, float64
    after_in: str = "model"  # whose forward does it: the model's, or the head's
    # of the logits in memory: transposed, strided, vocab_first, reshaped
    layout: str = "contiguous"


def finished(logits: Tensor, drawn: Drawn) -> Tensor:
    """Computes what the model does after its head."""
    match drawn.after:
        case "soft_cap":
            return 2.0 * torch.tanh(logits / 2.0)
        case "scale":
            return logits * 0.7
        case "log_softmax":
            return logits.log_softmax(dim=-1)
        case "float64":
            return logits.double()
    return logits


def laid_out(logits: Tensor, drawn: Drawn) -> Tensor:
    """Returns equal logits [B, S, V] that lie otherwise in memory."""
    match drawn.layout:
        case "transposed":
            return logits.transpose(0, 1).contiguous().transpose(0, 1)
        case "strided":
            return torch.stack([logits, -logits], dim=-1)[..., 0]
        case "vocab_first":
            return logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        case "reshaped":
            return logits.flatten(0, 1).unflatten(0, logits.shape[:2])
    return logits


def finishing(kind: type[Any], drawn: Drawn) -> type[Any]:
    """Returns the class of heads whose own forward does what comes after the logits."""

    class FinishingHead(kind):
        def forward(self, x: Tensor) -> Tensor:
            return finished(super().forward(x), drawn)

    return FinishingHead if drawn.after_in == "head" else kind


def change(model: Any, drawn: Drawn, linear: Callable[[], nn.Module]) -> None:
    """Adds unused layers to a model, ties its parameters and freezes some, as its constructor
    would."""
    for name in drawn.unused:
        model.get_submodule(name).spare = linear()
    for tie in drawn.ties:
        target, source = tie.split(" = ")
        owner, _, attribute = target.rpartition(".")
        source_owner, _, source_attribute = source.rpartition(".")
        shared = getattr(model.get_submodule(source_owner), source_attribute)
        setattr(model.get_submodule(owner), attribute, shared)
    for name in drawn.frozen:
        model.get_parameter(name).requires_grad_(False)


def shuffle(model: nn.Module, seed: int) -> None:
    """Registers the modules below each module in another order; the blocks of a model stay in
    theirs."""
    random = Random(seed)
    for module in model.modules():
        if not isinstance(module, nn.ModuleDict):
            items = list(module._modules.items())
            random.shuffle(items)
            module._modules = dict(items)


def block_forward(
    block: Any, x: Tensor, kind: str, attention: Callable[[Tensor], Tensor]
) -> Tensor:
    """Computes a block of any kind."""
    if kind == "parallel":
        y = block.attention_norm(x)
        return x + block.gain(attention(y) + block.mlp(y))
    if kind != "mlp":
        x = x + attention(block.attention_norm(x))
    for _ in range({"attention": 0, "twice": 2}.get(kind, 1)):
        x = x + block.mlp(block.mlp_norm(x))
    return x


def remove_unused(block: Any, kind: str) -> None:
    """Removes what a block of this kind does not have."""
    unused = {
        "mlp": ["attention", "attention_norm"],
        "attention": ["mlp", "mlp_norm"],
        "parallel": ["mlp_norm"],
    }
    for name in unused.get(kind, ()):
        delattr(block, name)


class Gain(ParallelModule):
    """x * weight, a number for each feature."""

    def __init__(self, tp: ParallelContext) -> None:
        super().__init__(tp)
        init, is_partial = (lambda tensor, generator: tensor.fill_(0.5)), self.sequence_parallel
        self.add_parameter(
            "weight", ParameterSpec((HIDDEN,), None, init, partial_gradient=is_partial)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.replicated("weight")
        return y


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
        if self.kind == "parallel":
            self.gain = Gain(context)
        remove_unused(self, self.kind)

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        attend = (
            None if self.kind == "mlp" else partial(self.attention, documents=documents, key=key)
        )
        return block_forward(self, x, self.kind, attend)  # type: ignore[arg-type]


class Fuzzed(Decoder):
    """A decoder as its options say: the user's own class."""

    Options = Drawn
    block_class = FuzzedBlock

    def __init__(
        self, config: ModelConfig, *, tp: Any, sequence_parallel: bool, device: Any, **settings: Any
    ) -> None:
        super().__init__(
            config, tp=tp, sequence_parallel=sequence_parallel, device=device, **settings
        )
        self.drawn = drawn = Drawn(**config.options)
        init = normal(config.init_std * (3.0 if drawn.other_start else 1.0))
        kind = finishing(
            VocabParallelHead if drawn.head == "vocab" else ColumnParallelLinear,
            drawn,
        )
        more = {"biased": {"bias": True}, "gathered": {"gather_output": True}}.get(drawn.head, {})
        context = ParallelContext(tp, sequence_parallel, device, init=init)
        self.head = kind(config.hidden, config.vocab, tp=context, **more)
        change(self, drawn, partial(ColumnParallelLinear, HIDDEN, HIDDEN, tp=context))
        if drawn.order:
            shuffle(self, drawn.order)

    def parts(self, config: ModelConfig, context: ParallelContext) -> DecoderParts:
        drawn = Drawn(**config.options)
        embed = VocabParallelEmbedding(config.vocab, config.hidden, tp=context)
        norm = RMSNorm if drawn.norm == "rms" else partial(LayerNorm, bias=drawn.biases)
        return DecoderParts(
            embed=embed,
            token_weight=embed.weight,
            norm=partial(norm, config.hidden, eps=config.norm_eps, tp=context),
            rotary=RotaryEmbedding(config.head_size, theta=config.rope_theta),
            attention=AttentionOptions(head_dim=config.head_size),
            activation=drawn.activation,  # type: ignore[arg-type]
            mlp_bias=drawn.biases,
        )

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        y = super().forward(x, key, documents)
        if self.head is None:
            return y
        return laid_out(
            finished(y, self.drawn) if self.drawn.after_in == "model" else y, self.drawn
        )


class PlainGain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class PlainMlp(nn.Module):
    def __init__(self, config: ModelConfig, drawn: Drawn) -> None:
        super().__init__()
        self.activation = drawn.activation
        if drawn.activation == "swiglu":
            self.gate = nn.Linear(config.hidden, config.ffn_hidden, bias=drawn.biases)
        self.up = nn.Linear(config.hidden, config.ffn_hidden, bias=drawn.biases)
        self.down = nn.Linear(config.ffn_hidden, config.hidden, bias=drawn.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class PlainBlock(nn.Module):
    def __init__(
        self, config: ModelConfig, drawn: Drawn, kind: str, norm: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.kind = kind
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = PlainAttention(config, PlainRotary(config.head_size, config.rope_theta))
        self.mlp = PlainMlp(config, drawn)
        if kind == "parallel":
            self.gain = PlainGain()
        remove_unused(self, kind)

    def forward(self, x: Tensor) -> Tensor:
        return block_forward(self, x, self.kind, getattr(self, "attention", None))  # type: ignore[arg-type]


class Plain(nn.Module):
    """The same decoder in plain torch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.drawn = drawn = Drawn(**config.options)
        kind: Any = nn.RMSNorm if drawn.norm == "rms" else partial(nn.LayerNorm, bias=drawn.biases)
        norm = partial(kind, config.hidden, eps=config.norm_eps)
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleDict()
        for index, kind in enumerate(drawn.kinds):
            self.layers[str(index)] = PlainBlock(config, drawn, kind, norm)
        self.norm = norm()
        self.head = finishing(nn.Linear, drawn)(
            config.hidden, config.vocab, bias=drawn.head == "biased"
        )
        change(self, drawn, partial(nn.Linear, HIDDEN, HIDDEN, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers.values():
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return finished(y, self.drawn) if self.drawn.after_in == "model" else y


def draw_ties(random: Random, model: nn.Module) -> list[str]:
    """Draws pairs of parameters of one shape and use, or of whole MLPs, that a model is to
    share."""
    names = [name for name, _ in model.named_parameters()]
    last, ends = len(model.get_submodule("layers")) - 1, ["head.weight = embed.weight"]
    blocks = [name for name in names if name.startswith("layers.")]
    pairs = [
        (b, a) for a in blocks for b in blocks if a < b and a.split(".")[2:] == b.split(".")[2:]
    ]
    pairs += [
        ("norm.weight", name) for name in blocks if name.endswith(("norm.weight", "gain.weight"))
    ]
    far = [
        (b, a)
        for b, a in pairs
        if a.startswith("layers.0.") and not b.startswith("layers.") or f".{last}." in b
    ]
    mlps = [name for name, _ in model.named_modules() if name.endswith(".mlp")]
    modules = [(b, a) for a in mlps for b in mlps if a < b]
    match random.choice(
        ["ends", "ends", "far", "ends and far", "ends and far", "any", "two", "module", "module"]
    ):
        case "ends":
            chosen: list[tuple[str, str]] = []
        case "far" | "ends and far" as way:
            chosen, ends = random.sample(far, min(1, len(far))), ends if way != "far" else []
        case "any" | "two" as way:
            chosen, ends = random.sample(pairs, min(1 if way == "any" else 2, len(pairs))), []
        case _:
            chosen, ends = random.sample(modules, min(1, len(modules))), []
    return ends + [f"{b} = {a}" for b, a in chosen]


def draw_frozen(random: Random, model: nn.Module) -> list[str]:
    """Draws the parameters that are not trained: a few, a part of the model, or all but a part."""
    names = [name for name, _ in model.named_parameters()]
    part = random.choice(["embed.", "layers.0.", "norm.", "head.", "layers.1."])
    match random.choice(["few", "few", "part", "rest"]):
        case "few":
            return random.sample(names, min(3, len(names)))
        case "part":
            return [name for name in names if name.startswith(part)]
    return [name for name in names if not name.startswith(part)]


def draw(seed: int) -> Case:
    """Draws the model, the layout and the training of a seed. A model has a few of the oddities,
    never all."""
    random = Random(seed)
    parallel = draw_layout(random, random.choice([2, 4]))
    kinds = [
        "ties",
        "frozen",
        "unused",
        "head",
        "after",
        "layout",
        "chunk",
        "vocab",
        "order",
        "loss",
    ]
    odd = {name: name in random.sample(kinds, random.randint(1, 5)) for name in kinds}
    layers = max(parallel.stages, random.randint(2, 4))
    head = random.choice(["column", "biased", "gathered", "gathered"]) if odd["head"] else "vocab"
    vocab = random.choice([261, 4099] if head == "vocab" else [4096]) if odd["vocab"] else 260
    may_normalize = parallel.tp == 1 or head == "gathered"  # else no rank has all logits of a token
    after = random.choice(
        ["soft_cap", "soft_cap", "scale", "float64", *["log_softmax"] * may_normalize]
    )
    options: dict[str, Any] = {
        "kinds": tuple(
            random.choices(
                ["serial", "parallel", "attention", "mlp", "twice"], [2, 1, 1, 1, 1], k=layers
            )
        ),
        "activation": random.choice(["swiglu", "gelu_tanh"]),
        "norm": random.choice(["rms", "layer"]),
        "biases": random.random() < 0.3,
        "head": head,
        "order": random.randrange(1, 10**6) if odd["order"] else 0,
        "after": after if odd["after"] else "nothing",
        "after_in": random.choice(["model", "model", "head"]),
        "layout": random.choice(["transposed", "strided", "vocab_first", "reshaped"])
        if odd["layout"]
        else "contiguous",
    }
    config = ModelConfig(
        architecture=f"{__name__}:Fuzzed",
        layers=layers,
        hidden=HIDDEN,
        heads=4,
        kv_heads=random.choice([1, 2, 4]),
        ffn_hidden=random.choice([48, 64]),
        vocab=vocab,
        init_std=0.15,
        options=options,
    )
    plain = Plain(config)
    options["ties"] = tuple(draw_ties(random, plain)) if odd["ties"] else ()
    options["other_start"] = odd["ties"] and random.random() < 0.4
    options["frozen"] = tuple(draw_frozen(random, plain)) if odd["frozen"] else ()
    spare = odd["unused"] and random.random() < 0.4
    options["unused"] = (random.choice(["layers.0", "layers.1", "embed", "norm"]),) if spare else ()
    config = replace(config, options=asdict(Drawn(**options)))
    batch = parallel.dp * parallel.microbatch_size * random.choice([1, 2, 4])
    train = TrainConfig(
        steps=STEPS,
        global_batch_size=batch,
        seq_len=32 if vocab > 4000 else random.choice([8, 12]),
        seed=seed,
        grad_clip=random.choice([None, 0.5]),
        loss_chunk_tokens=5 if odd["chunk"] else None,
        z_loss=random.choice([0.0, 1e-2]) if odd["loss"] else 0.0,
    )
    optimizer = OptimizerConfig(
        name="sgd",
        lr=0.03,
        weight_decay=random.choice([0.0, 0.5]),
        min_lr_ratio=1.0,
    )
    data = DataConfig(ignore_token_ids=(IGNORED_ID,) if odd["loss"] else ())
    return Case(
        seed, Recipe(model=config, train=train, parallel=parallel, optimizer=optimizer, data=data)
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
    loss_dtype: str = ""


def train_case(recipe: Recipe) -> Trained:
    """Trains the case on this rank."""
    validate(recipe)
    check_model(recipe.model)
    trainer, loader = make_trainer(recipe), batches(recipe, dist.get_rank())
    results = [trainer.train_step(loader.batch(step)) for step in range(STEPS)]
    batch = loader.batch(STEPS)
    weights = [(p.name, whole(p.distributed(p.local.detach())).numpy()) for p in trainer.parameters]
    evaluation = trainer.evaluate(batch)
    parts = recipe.parallel.tp if recipe.parallel.sequence_parallel else 1
    sizes = {"batch": recipe.parallel.microbatch_size, "seq": recipe.train.seq_len // parts}
    loss = trainer.pipeline.evaluate(batch.inputs, batch.labels, sizes=sizes)
    return Trained(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        evaluation,
        weights,
        trainer.parameter_count,
        str(loss.dtype),
    )


def plain_loss(logits: Tensor, labels: Tensor, train: TrainConfig) -> Tensor:
    """Returns the mean loss over the labels that count."""
    labels, counts = labels.flatten(), (labels != -100).flatten()
    logits = logits.flatten(0, -2)
    loss = F.cross_entropy(logits, labels)
    return loss + train.z_loss * logits.logsumexp(-1)[counts].square().mean()


def train_plainly(recipe: Recipe) -> tuple[Trained, dict[str, Array]]:
    """Trains the case in plain torch, and returns the initial weights, too."""
    model, train = Plain(recipe.model), recipe.train
    alone = Recipe(model=recipe.model, train=train, parallel=ParallelConfig(), data=recipe.data)
    loader = batches(alone, 0)
    meta = Fuzzed(recipe.model, tp=None, sequence_parallel=False, device="meta")
    with torch.no_grad():
        for name, weight in initial_weights(meta, train.seed).items():
            model.get_parameter(name).copy_(weight)
    model.double()
    names = [name for name, _ in meta.named_parameters()]
    start = {name: model.get_parameter(name).detach().clone().numpy() for name in names}
    optimizers = plain_optimizers(model, recipe.optimizer, matrices=[])
    losses, norms = [], []
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
        losses, norms, evaluation, weights, sum(p.numel() for p in model.parameters())
    ), start


def flat(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.inputs.flatten(0, 1), batch.labels.flatten(0, 1)


def differences(outcome: Outcome) -> Iterator[str]:
    """Yields each difference between a training in a layout and plain PyTorch."""
    if not outcome.answers:
        return
    expected, start = train_plainly(outcome.case.recipe)
    weights = dict(expected.weights)
    dtypes = [answer.loss_dtype for answer in outcome.answers]
    if len(set(dtypes)) > 1:
        yield f"the ranks have losses of {dtypes}"
    for rank, answer in enumerate(outcome.answers):
        for what in ("losses", "norms", "evaluation", "parameters"):
            ours, theirs = getattr(answer, what), getattr(expected, what)
            if ours != pytest.approx(theirs, rel=CLOSE):
                yield f"rank {rank}: {what} {ours}, in plain PyTorch {theirs}"
        for name, ours in answer.weights:
            error, moved = (
                np.linalg.norm(ours - weights[name]),
                np.linalg.norm(weights[name] - start[name]),
            )
            size = np.linalg.norm(weights[name])
            if not error <= min(CLOSE * size, 10 * CLOSE * moved + CLOSE / 10 * size):
                yield (
                    f"rank {rank}: {name} is off by {error:.2g}, and plain PyTorch moved it by "
                    f"{moved:.2g}"
                )
    held = {name for answer in outcome.answers for name, _ in answer.weights}
    if held != set(weights):
        yield f"parameters {held ^ set(weights)} are not in both models"


def check(world: Callable, seeds: Iterable[int], folder: Path) -> None:
    cases = [draw(seed) for seed in asked_or(seeds)]
    outcomes = train_all(world, train_case, cases, folder)
    assert_follow((outcome, list(differences(outcome))) for outcome in outcomes)


def test_random_models_follow_plain_torch_or_are_refused(world: Callable, tmp_path: Path) -> None:
    check(world, SHORT, tmp_path)


@pytest.mark.long
def test_many_random_models_follow_plain_torch_or_are_refused(
    world: Callable, tmp_path: Path
) -> None:
    check(world, LONG, tmp_path)
