"""What a recipe says of its training that a plan of this project's own program depends on, and what a plan leaves
out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.config.recipe import Recipe
from parallel3d.optimizers.step_bytes import MuonCosts, narrow_step_bytes


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """What a recipe's optimizer, dropout and loss add to a rank's memory; the defaults are AdamW beside float32
    masters."""

    state_bytes: float = 8.0  # bytes of a parameter's optimizer states
    step_bytes: float = 0.0  # bytes that a step makes for each number of the parameter that it is at
    is_adafactor: bool = False  # Adafactor's states, and what it makes in a step, stand for those bytes
    muon: MuonCosts | None = None  # Muon's matrices of blocks; those bytes are of all other parameters then
    stochastic_rounding_states: int | None = None  # 16-bit states that a step rounds stochastically; None: it does not
    has_dropout: bool = False  # dropout between the layers
    steps_in_backward: bool = False  # each parameter is stepped when its gradient is complete, which then goes
    loss_chunk_tokens: int | None = None  # tokens whose logits exist at a time; None: as the trainer chooses


@dataclass(frozen=True, kw_only=True)
class UnmodeledSetting:
    """A setting of a recipe that the memory model does not know."""

    setting: str
    known: str
    instead: str


def optimizer_memory(recipe: Recipe) -> OptimizerMemory:
    """Reads it from a recipe; `unmodeled_settings` says what it leaves out."""
    state_bytes, step_bytes = _optimizer_bytes(recipe)
    return OptimizerMemory(
        state_bytes=state_bytes,
        step_bytes=step_bytes,
        is_adafactor=recipe.optimizer.name == "adafactor",
        muon=_muon(recipe),
        stochastic_rounding_states=_rounded_states(recipe),
        has_dropout=recipe.model.dropout > 0,
        steps_in_backward=recipe.optimizer.step_in_backward,
        loss_chunk_tokens=recipe.train.loss_chunk_tokens,
    )


def unmodeled_settings(recipe: Recipe) -> Iterator[UnmodeledSetting]:
    """Yields the settings that would change the memory and are not counted."""
    yield from _unmodeled_rounding(recipe)
    if recipe.model.attention_dropout:
        setting = f"model.attention_dropout = {recipe.model.attention_dropout}"
        known = "the memory model knows dropout between the layers alone"
        yield UnmodeledSetting(setting=setting, known=known, instead="model.attention_dropout=0")
    if recipe.local_sgd.sync_every is not None:
        setting = f"local_sgd.sync_every = {recipe.local_sgd.sync_every}"
        known = "the memory model knows replicas that sum their gradients in each step"
        yield UnmodeledSetting(setting=setting, known=known, instead="local_sgd.sync_every=null")


def _unmodeled_rounding(recipe: Recipe) -> Iterator[UnmodeledSetting]:
    optimizer = recipe.optimizer
    if optimizer.stochastic_rounding and (optimizer.name == "muon" or optimizer.step_in_backward):
        other = "optimizer.step_in_backward = true" if optimizer.step_in_backward else "optimizer.name = muon"
        known = f"the memory model knows no such steps with {other}"
        instead = "optimizer.stochastic_rounding=false"
        yield UnmodeledSetting(setting="optimizer.stochastic_rounding = true", known=known, instead=instead)


def notes(recipe: Recipe) -> Iterator[str]:
    """What a plan, which chooses layouts of its own, does not count of a recipe."""
    yield from (f"{vain.setting} is not counted: {vain.known}" for vain in unmodeled_settings(recipe))
    if recipe.parallel.prefetch is not None:
        where = "in the layout of the recipe alone: a plan's own leave it to torch"
        yield f"parallel.prefetch = {recipe.parallel.prefetch} is counted {where}"
    if recipe.optimizer.step_in_backward:
        where = "where a layout has one microbatch a step; others are counted with a step after the backward"
        yield f"optimizer.step_in_backward = true is counted {where}"


def _optimizer_bytes(recipe: Recipe) -> tuple[float, float]:
    """Returns the bytes of a parameter's states, and those that a step makes for each number of the parameter."""
    optimizer, width = recipe.optimizer.resolved, _state_bytes(recipe)
    states = int(bool(optimizer.momentum)) if optimizer.name == "sgd" else 2
    rounds = optimizer.stochastic_rounding
    step = narrow_step_bytes(
        optimizer.name == "sgd", state_bytes=width, master_bytes=_master_bytes(recipe), rounds_stochastically=rounds
    )
    return float(width * states), step


def _muon(recipe: Recipe) -> MuonCosts | None:
    optimizer = recipe.optimizer.resolved
    if optimizer.name != "muon":
        return None
    assert optimizer.ns_steps is not None
    return MuonCosts(
        state_bytes=_state_bytes(recipe),
        item_bytes=4 if optimizer.ns_dtype == "fp32" else 2,
        nesterov=bool(optimizer.nesterov),
        iterations=optimizer.ns_steps,
    )


def _master_bytes(recipe: Recipe) -> int:
    return 2 if recipe.train.precision == "bf16_pure" else 4


def _state_bytes(recipe: Recipe) -> int:
    """Returns the bytes of a number in one state."""
    return {None: _master_bytes(recipe), "fp32": 4, "bf16": 2}[recipe.optimizer.state_dtype]


def _rounded_states(recipe: Recipe) -> int | None:
    """Counts the 16-bit states of a parameter that a step widens with it (`optimizers.rounding`); None where
    no step rounds."""
    optimizer = recipe.optimizer.resolved
    if not optimizer.stochastic_rounding:
        return None
    if optimizer.name == "adafactor" or optimizer.state_dtype == "fp32":
        return 0
    return 2 if optimizer.name != "sgd" else int(bool(optimizer.momentum))
