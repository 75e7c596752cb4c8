"""What a recipe says of its training that a plan of this project's own engine depends on, and what it says in vain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.config import Recipe


@dataclass(frozen=True, kw_only=True)
class Training:
    """The defaults are AdamW beside float32 masters, without dropout."""

    state_bytes: float = 8.0  # of a parameter's optimizer states
    step_bytes: float = 0.0  # that a step makes for each number of the parameter that it is at
    factors: bool = False  # Adafactor's states, and what it makes in a step, instead of those bytes
    rounded: int | None = None  # states of 16 bits in steps that are rounded stochastically; None: no such steps
    drops: bool = False  # dropout between the layers
    loss_chunk_tokens: int | None = None  # tokens whose logits exist at a time; None: as the trainer chooses


@dataclass(frozen=True, kw_only=True)
class Unpriced:
    """A setting of a recipe that the memory model does not know."""

    setting: str
    known: str
    instead: str


def training_of(recipe: Recipe) -> Training:
    """Of the optimizer, the model's dropout and the loss; see `unpriced` for what it is not."""
    state_bytes, step_bytes = _optimizer_bytes(recipe)
    return Training(
        state_bytes=state_bytes,
        step_bytes=step_bytes,
        factors=recipe.optimizer.name == "adafactor",
        rounded=_rounded_states(recipe),
        drops=recipe.model.dropout > 0,
        loss_chunk_tokens=recipe.train.loss_chunk_tokens,
    )


def unpriced(recipe: Recipe) -> Iterator[Unpriced]:
    """What would change the memory, and is not counted."""
    name, prefetch = recipe.optimizer.name, recipe.parallel.prefetch
    if name == "muon":
        known = "the memory model knows adamw, sgd and adafactor"
        yield Unpriced(setting=f"optimizer.name = {name}", known=known, instead="adamw")
    if recipe.optimizer.step_in_backward:
        known = "the memory model knows steps after the backward"
        instead = "optimizer.step_in_backward=false"
        yield Unpriced(setting="optimizer.step_in_backward = true", known=known, instead=instead)
    if recipe.model.attention_dropout:
        setting = f"model.attention_dropout = {recipe.model.attention_dropout}"
        known = "the memory model knows dropout between the layers alone"
        yield Unpriced(setting=setting, known=known, instead="model.attention_dropout=0")
    if prefetch is not None:
        known = "the memory model knows what torch gathers ahead by itself"
        yield Unpriced(setting=f"parallel.prefetch = {prefetch}", known=known, instead="parallel.prefetch=null")


def _optimizer_bytes(recipe: Recipe) -> tuple[float, float]:
    """Of a parameter's states, and what a step makes for each number of the parameter that it is at: optimizers whose
    states are of another dtype than the parameters widen what they step (`training.optimizers.narrow`)."""
    optimizer = recipe.optimizer.resolved
    master = 2 if recipe.train.precision == "bf16_pure" else 4
    width = {None: master, "fp32": 4, "bf16": 2}[optimizer.state_dtype]
    is_wide = master == 4 or optimizer.stochastic_rounding
    if optimizer.name == "sgd":
        copies, total = (4.0, 4.0) if is_wide else (12.0, 2.0)
        return float(width * bool(optimizer.momentum)), (copies + 4.0 if width != master else total)
    return 2.0 * width, (8.0 if is_wide else 16.0) if width != master else 0.0


def _rounded_states(recipe: Recipe) -> int | None:
    """Of each parameter, where a step widens it and them (`training.rounding`)."""
    optimizer = recipe.optimizer.resolved
    if not optimizer.stochastic_rounding:
        return None
    if optimizer.name == "adafactor" or optimizer.state_dtype == "fp32":
        return 0
    return 2 if optimizer.name != "sgd" else int(bool(optimizer.momentum))
