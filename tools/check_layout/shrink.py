"""A recipe made small enough to train in seconds on a CPU, with the layout, and what it divides, as they were."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel3d.config.recipe import CheckpointConfig, ModelConfig, OptimizerConfig, Recipe
from parallel3d.config.rules import validate

SEQ_LEN, VOCAB = 16, 264
EPS = 1e-3  # AdamW's: with the usual 1e-8 a gradient that is zero but for rounding moves a weight by the whole rate


@dataclass(frozen=True, kw_only=True)
class CheckSize:
    """How small a recipe becomes, and how many steps are compared."""

    layers: int = 2  # at least one for each pipeline stage
    hidden: int = 64
    steps: int = 3


def shrink(recipe: Recipe, size: CheckSize) -> Recipe:
    """Returns the recipe in float32 on the CPU, its model and batch cut down. The numbers still keep what tp, dp and
    the schedule ask of them; a vocabulary that tp does not divide stays so. Raises ConfigError."""
    parallel, train = recipe.parallel, recipe.train
    microbatches = max(1, min(recipe.microbatches, 2 * parallel.pp))
    microbatch_size = min(parallel.microbatch_size, 2)
    small = replace(
        recipe,
        model=_shrink_model(recipe.model, size, tp=parallel.tp, stages=parallel.stages),
        parallel=replace(parallel, microbatch_size=microbatch_size, stage_boundaries=None),  # they count real layers
        train=replace(
            train,
            steps=size.steps,
            global_batch_size=parallel.dp * microbatch_size * microbatches,
            seq_len=_up(SEQ_LEN, parallel.tp),
            precision="fp32",
            loss_chunk_tokens=None,
            batch_warmup_start=None,
            batch_warmup_increment=None,
            batch_warmup_steps=None,
            device="cpu",
            eval_every=None,
            sample_tokens=0,
            sample_top_k=1,
            timeout_s=min(train.timeout_s, 120.0),
        ),
        optimizer=_shrink_optimizer(recipe.optimizer),
        data=replace(recipe.data, ignore_token_ids=()),
        checkpoint=CheckpointConfig(),
        run_dir=None,
    )
    validate(small)
    return small


def _shrink_optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    """Returns the optimizer all in float32: bf16 would turn the last bit of a gradient into the first of a state."""
    small = replace(optimizer, warmup_steps=0, decay_steps=None, state_dtype=None, stochastic_rounding=False)
    if small.name == "muon":
        small = replace(small, ns_dtype="fp32")
    return replace(small, eps=EPS) if small.name in ("adamw", "muon") else small


def _shrink_model(model: ModelConfig, size: CheckSize, *, tp: int, stages: int) -> ModelConfig:
    """Returns a smaller model, in which grouped heads stay grouped, by two at most."""
    group = min(model.heads // model.key_value_heads, 2)
    kv_heads = min(model.key_value_heads, max(tp, 2))
    if kv_heads * group % tp:
        group = model.heads // model.key_value_heads
    heads = kv_heads * group
    hidden = _up(size.hidden, 2 * heads)  # rotary positions want an even number for each head
    return replace(
        model,
        name=None,
        layers=max(size.layers, stages),
        hidden=hidden,
        heads=heads,
        kv_heads=None if model.kv_heads is None else kv_heads,
        ffn_hidden=_up(hidden * model.ffn_hidden // model.hidden, tp),
        vocab=min(model.vocab, _up(VOCAB, tp) + model.vocab % tp),
    )


def _up(number: int, factor: int) -> int:
    """Returns the smallest multiple of `factor` that is at least `number`."""
    return -(-number // factor) * factor
