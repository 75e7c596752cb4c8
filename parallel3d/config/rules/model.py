"""The rules of a recipe's `model` section, and which layouts its numbers can be divided over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules.suggestions import any_of, divisors_near, multiple_from
from parallel3d.shards import shard_rows

BYTE_TOKENIZER_IDS = 257  # 256 bytes and the end of a text


def divides_key_value_heads(kv_heads: int, tp: int) -> bool:
    """True if each tp rank computes equally many key-value heads, or tp / kv_heads ranks compute each of them."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def leaves_no_rank_empty(vocab: int, tp: int) -> bool:
    """True if every tp rank has a row of the vocabulary's table, which is cut in equal parts but for the last ones."""
    return len(shard_rows(vocab, tp - 1, tp)) > 0


def model_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each number of the model that does not fit the others, the tokenizer, or tp."""
    model, tp = recipe.model, recipe.parallel.tp
    if model.hidden % model.heads:
        # A divisor of half the width leaves an even number to each head.
        tries = any_of(divisors_near(model.hidden // 2, model.heads) or [1])
        yield f"model.heads = {model.heads}: must divide model.hidden = {model.hidden}; try {tries}"
    elif model.head_dim % 2 and model.architecture == "llama":
        yield (
            f"model.heads = {model.heads}: makes heads of {model.head_dim} numbers, which rotary positions need in "
            f"pairs; try model.hidden={model.hidden + model.heads}"
        )
    if model.heads % model.key_value_heads:
        tries = any_of(divisors_near(model.heads, model.key_value_heads))
        yield f"model.kv_heads = {model.key_value_heads}: must divide model.heads = {model.heads}; try {tries}"
    if recipe.data.tokenizer == "bytes" and model.vocab < BYTE_TOKENIZER_IDS:
        yield (
            f"model.vocab = {model.vocab}: must be at least {BYTE_TOKENIZER_IDS}, the ids of data.tokenizer = bytes; "
            f"try {multiple_from(BYTE_TOKENIZER_IDS, tp)}"
        )
    elif not leaves_no_rank_empty(model.vocab, tp):
        yield (
            f"model.vocab = {model.vocab}: leaves a rank of parallel.tp = {tp} without a row of the embedding; "
            f"try {multiple_from(model.vocab, tp)}"
        )
    yield from architecture_errors(recipe)


# The keys that only one architecture has -> why the other has no use for them.
_KEYS_OF = {
    "llama": {
        "rope_theta": "gpt has learned positions",
        "qkv_bias": "gpt has biases on every linear layer",
        "qk_norm": "gpt has none",
        "window": "gpt's queries see all keys before them",
    },
    "gpt": {"max_positions": "llama turns queries and keys instead, and needs no table of positions"},
}


def architecture_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each key that the architecture does not read, and one for gpt's table of positions if it is missing
    or too short."""
    model, seq_len = recipe.model, recipe.train.seq_len
    defaults = {key.name: key.default for key in fields(model)}
    for architecture, keys in _KEYS_OF.items():
        for key, why in keys.items() if architecture != model.architecture else ():
            if getattr(model, key) != defaults[key]:
                yield (
                    f"model.{key} = {getattr(model, key)}: is not for model.architecture = {model.architecture} "
                    f"({why}); drop it, or try model.architecture={architecture}"
                )
    if model.architecture == "gpt" and (model.max_positions is None or model.max_positions < seq_len):
        shown = "null" if model.max_positions is None else model.max_positions
        yield f"model.max_positions = {shown}: must be at least train.seq_len = {seq_len}; try {seq_len}"
