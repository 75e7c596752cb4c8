"""Reduces a recipe to a size that trains in seconds on a CPU. Its layout stays the same, and sizes
stay divisible as the layout requires.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel3d.config.example_values import multiple_from
from parallel3d.config.hugging_face import with_sizes
from parallel3d.config.recipe import CheckpointConfig, ModelConfig, Recipe
from parallel3d.config.rules import validate

SEQ_LEN = 16
VOCAB = 264
STEPS = 3
# Epsilon of AdamW and Muon. With the usual 1e-8, a gradient that is only rounding error would
# change a weight by the full learning rate.
EPS = 1e-3


def shrink(
    recipe: Recipe, *, layers: int | None = None, hidden: int | None = None, steps: int = STEPS
) -> Recipe:
    """Returns the recipe in float32 on the CPU with a smaller model and batch, and at least one
    layer per pipeline stage.

    Sizes stay divisible as tp, dp and the schedule require. A vocabulary size that tp does not
    divide stays indivisible. Raises ConfigError if the layout is invalid.
    """
    parallel = recipe.parallel
    train = recipe.train
    shards = parallel.tp
    microbatches = max(1, min(recipe.microbatches, 2 * parallel.pp))
    microbatch_size = min(parallel.microbatch_size, 2)
    # Everything is float32, because bf16 would amplify the rounding differences of gradients.
    optimizer = replace(recipe.optimizer, warmup_steps=0, decay_steps=None, state_dtype=None)
    if optimizer.name == "muon":
        optimizer = replace(optimizer, ns_dtype="fp32")
    if optimizer.name in ("adamw", "muon"):
        optimizer = replace(optimizer, eps=EPS)
    small = replace(
        recipe,
        model=_shrink_model(recipe.model, max(layers or 2, parallel.stages), hidden or 64, shards),
        # stage_boundaries refers to the layers of the full model.
        parallel=replace(parallel, microbatch_size=microbatch_size, stage_boundaries=None),
        train=replace(
            train,
            steps=steps,
            global_batch_size=parallel.dp * microbatch_size * microbatches,
            seq_len=multiple_from(SEQ_LEN, parallel.sequence_chunks * shards),
            precision="fp32",
            loss_chunk_tokens=None,
            batch_warmup_start=None,
            batch_warmup_increment=None,
            batch_warmup_steps=None,
            device="cpu",
            compile=False,
            eval_every=None,
            sample_tokens=0,
            sample_top_k=1,
            start_timeout_s=min(train.start_timeout_s, 120.0),
            timeout_s=min(train.timeout_s, 120.0),
        ),
        optimizer=optimizer,
        data=replace(recipe.data, ignore_token_ids=()),
        checkpoint=CheckpointConfig(),
        run_dir=None,
    )
    validate(small)
    return small


def _shrink_model(model: ModelConfig, layers: int, hidden: int, shards: int) -> ModelConfig:
    """Returns a smaller model whose layers can have `shards` shards. Key-value heads serve at most
    two query heads each, or as many as before if `shards` would not divide the query heads.
    A class that is split by rules keeps its sizes.
    """
    if model.stages is not None and model.config is None:
        return model  # The sizes of a user's class are unknown.
    group = min(model.heads // model.key_value_heads, 2)
    kv_heads = min(model.key_value_heads, max(shards, 2))
    if kv_heads * group % shards:
        group = model.heads // model.key_value_heads
    heads = kv_heads * group
    hidden = multiple_from(hidden, 2 * heads)  # Rotary positions need an even head_dim.
    ratio = model.query_hidden / model.hidden
    head_dim = None
    if model.head_dim is not None:
        head_dim = max(2, 2 * round(ratio * hidden / heads / 2))
    sizes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": None if model.kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "ffn_hidden": multiple_from(hidden * model.ffn_hidden // model.hidden, shards),
        "vocab": min(model.vocab, multiple_from(VOCAB, shards) + model.vocab % shards),
    }
    if model.config is not None:
        return with_sizes(model, **sizes)
    if model.experts is not None:
        ratio = hidden / model.hidden
        sizes["experts"] = replace(
            model.experts,
            hidden=max(2, round(model.experts.hidden * ratio)),
            shared_hidden=multiple_from(round(model.experts.shared_hidden * ratio), shards),
            dense_layers=min(model.experts.dense_layers, layers - 1),
        )
    return replace(model, name=None, **sizes)
