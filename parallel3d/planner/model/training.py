"""Training options of a recipe that affect the plan, and notes on those not modeled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.config.recipe import Recipe
from parallel3d.planner.model.muon import MuonCosts


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Options of optimizer, dropout, documents and loss that affect memory. The default is AdamW
    with float32 states."""

    state_bytes: float = 8.0  # Bytes of optimizer states per parameter.
    # Muon for the matrices of blocks. `state_bytes` then applies to all other parameters.
    muon: MuonCosts | None = None
    has_dropout: bool = False  # True if there is dropout between layers.
    has_attention_dropout: bool = False
    has_documents: bool = False  # True if attention is masked to documents.
    # Tokens per chunk of logits, or None for the trainer's choice.
    loss_chunk_tokens: int | None = None


def master_bytes(precision: str) -> int:
    """Returns the bytes per element of the master weights."""
    if precision == "bf16_pure":
        return 2
    return 4


def optimizer_memory(
    recipe: Recipe, *, precision: str | None = None, state_bits: int | None = None
) -> OptimizerMemory:
    """Returns the memory options of a recipe, except `unmodeled_settings`.

    `precision` and `state_bits` replace the recipe's precision and width of optimizer states.
    """
    optimizer = recipe.optimizer.resolved
    master = master_bytes(precision or recipe.train.precision)
    width = {None: master, "fp32": 4, "bf16": 2}[recipe.optimizer.state_dtype]
    if state_bits is not None:
        width = state_bits // 8
    muon = None
    states = 2
    if optimizer.name == "sgd":
        states = int(bool(optimizer.momentum))
    if optimizer.name == "muon":
        assert optimizer.ns_steps is not None
        muon = MuonCosts(
            state_bytes=width,
            item_bytes=4 if optimizer.ns_dtype == "fp32" else 2,
            iterations=optimizer.ns_steps,
        )
    return OptimizerMemory(
        state_bytes=float(width * states),
        muon=muon,
        has_dropout=recipe.model.dropout > 0,
        has_attention_dropout=recipe.model.attention_dropout > 0,
        has_documents=recipe.data.documents == "mask",
        loss_chunk_tokens=recipe.train.loss_chunk_tokens,
    )


def unmodeled_settings(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields each setting that affects memory but is not modeled, with the assumption and a
    remedy."""
    train = recipe.train
    every = recipe.local_sgd.sync_every
    has_window = recipe.model.has_window(train.seq_len)
    if has_window and train.precision == "fp32" and train.device != "cpu":
        known = "the memory model supports float32 windows only on CPUs"
        yield f"model.window = {recipe.model.window}", known, "model.window=null"
    if every is not None:
        known = "the memory model assumes that replicas sum gradients in each step"
        yield f"local_sgd.sync_every = {every}", known, "local_sgd.sync_every=null"


def notes(recipe: Recipe) -> Iterator[str]:
    """Yields notes on the settings of a recipe that a plan ignores or approximates."""
    yield from (
        f"{setting} is ignored: {known}" for setting, known, _ in unmodeled_settings(recipe)
    )
    if recipe.model.attention_dropout:
        where = "in memory only, with the time of a fused kernel"
        yield f"model.attention_dropout = {recipe.model.attention_dropout} is counted {where}"
    if recipe.data.documents == "mask":
        yield "data.documents = mask: each document counts as long as a sequence"
    if recipe.parallel.prefetch is not None:
        yield f"parallel.prefetch = {recipe.parallel.prefetch} is ignored"
