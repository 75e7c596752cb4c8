"""What a recipe says of its training that a plan of this project's own framework counts, and what a
plan leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.config.recipe import Recipe
from parallel3d.planner.model.muon import MuonCosts


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """What a recipe's optimizer, dropout, documents and loss add to a rank's memory; by default
    AdamW beside float32 masters."""

    state_bytes: float = 8.0  # bytes of a parameter's optimizer states
    # Muon's matrices of blocks; those bytes are of all other parameters then
    muon: MuonCosts | None = None
    has_dropout: bool = False  # dropout between the layers
    has_attention_dropout: bool = False
    has_documents: bool = False  # attention stays within documents
    # tokens whose logits exist at a time; None: as the trainer chooses
    loss_chunk_tokens: int | None = None


def master_bytes(precision: str) -> int:
    """Returns the bytes of a number of the weights that the optimizer steps."""
    if precision == "bf16_pure":
        return 2
    return 4


def optimizer_memory(
    recipe: Recipe, *, precision: str | None = None, state_bits: int | None = None
) -> OptimizerMemory:
    """Reads it from a recipe, trained in another precision or with other bits of a number of the
    optimizer's states; `unmodeled_settings` says what it leaves out."""
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
    """Yields the settings that would change the memory and are not counted, with what is counted
    and a remedy."""
    train = recipe.train
    every = recipe.local_sgd.sync_every
    has_window = recipe.model.has_window(train.seq_len)
    if has_window and train.precision == "fp32" and train.device != "cpu":
        known = "the memory model knows windows in float32 on CPUs alone"
        yield f"model.window = {recipe.model.window}", known, "model.window=null"
    if every is not None:
        known = "the memory model knows replicas that sum their gradients in each step"
        yield f"local_sgd.sync_every = {every}", known, "local_sgd.sync_every=null"


def notes(recipe: Recipe) -> Iterator[str]:
    """Yields what a plan, which chooses layouts of its own, does not count of a recipe."""
    yield from (
        f"{setting} is not counted: {known}" for setting, known, _ in unmodeled_settings(recipe)
    )
    if recipe.model.attention_dropout:
        where = "in memory alone: its time is taken for a fused kernel's"
        yield f"model.attention_dropout = {recipe.model.attention_dropout} is counted {where}"
    if recipe.data.documents == "mask":
        yield "data.documents = mask is counted as documents that fill their windows"
    if recipe.parallel.prefetch is not None:
        yield f"parallel.prefetch = {recipe.parallel.prefetch} is not counted"
