"""The tables of the families of transformers 5, and which model gets which.

A table is for all models of a family, those with a head on top and those without: a pattern that matches nothing in a
model is left out for it. `tests/distributed/test_families.py` compares each with the unsplit model in float64.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn

from parallel3d.convert.rules import (
    GPT2_BLOCKS,
    LLAMA_BLOCKS,
    Column,
    Divide,
    Enter,
    Replicate,
    Row,
    Rules,
    SplitExperts,
    Style,
    Vocab,
    Word,
    names_matching,
)

_log = logging.getLogger("parallel3d")
_Table = dict[str, Style | Word]

HEADS: _Table = {  # what stands on top of a model, whatever its family
    "**.lm_head": Column(gather_output=True),
    **dict.fromkeys(("**.score", "**.classifier", "**.qa_outputs", "**.pooler.dense"), "replicate"),
}
_HEAD_NORMS: _Table = {  # this rank norms its own heads
    "**.self_attn.q_norm": Replicate(partial_gradient=True),
    "**.self_attn.k_norm": Replicate(partial_gradient=True),
}
_LLAMA: _Table = {"**.embed_tokens": Vocab(), **LLAMA_BLOCKS, **HEADS}
_NORMED: _Table = {**_LLAMA, **_HEAD_NORMS}
_MIXTURE: _Table = {**_LLAMA, "**.layers.*.mlp": Replicate(), "**.layers.*.mlp.experts": SplitExperts()}
_PHI3: _Table = {
    "**.embed_tokens": Vocab(),
    "**.self_attn": Divide(("config.num_attention_heads", "num_key_value_heads"), shared=("num_key_value_heads",)),
    "**.self_attn.qkv_proj": Column(
        unit="head_dim",
        parts=("config.num_attention_heads", "num_key_value_heads", "num_key_value_heads"),
        shared="num_key_value_groups",
    ),
    "**.self_attn.o_proj": Row(),
    "**.mlp.gate_up_proj": Column(parts=2),
    "**.mlp.down_proj": Row(),
    **HEADS,
}
_GPT2: _Table = {"**.wte": Vocab(), "**.wpe": "replicate", **GPT2_BLOCKS, **HEADS}
_GPT_NEOX: _Table = {
    "**.embed_in": Vocab(),
    "**.attention.query_key_value": Column(heads="config.num_attention_heads"),  # q, k and v of each head in turn
    "**.attention.dense": Row(),
    "**.mlp.dense_h_to_4h": Column(),
    "**.mlp.dense_4h_to_h": Row(),
    "**.embed_out": Column(gather_output=True),
    **HEADS,
}
_OPT: _Table = {
    "**.embed_tokens": Vocab(),
    **dict.fromkeys(("**.embed_positions", "**.project_in", "**.project_out"), "replicate"),
    "**.self_attn": Divide(("num_heads",)),
    **dict.fromkeys((f"**.self_attn.{name}_proj" for name in "qkv"), Column(unit="head_dim")),
    "**.self_attn.out_proj": Row(),
    "**.fc1": Column(),
    "**.fc2": Row(),
    **HEADS,
}
_FALCON_REST: _Table = {
    "**.word_embeddings": Vocab(),
    "**.self_attention.dense": Row(),
    "**.mlp.dense_h_to_4h": Column(),
    "**.mlp.dense_4h_to_h": Row(),
    **HEADS,
}
_BERT: _Table = {
    "**.embeddings.word_embeddings": Vocab(),
    **dict.fromkeys(("**.embeddings.position_embeddings", "**.embeddings.token_type_embeddings"), "replicate"),
    "**.attention.self": Enter(),
    **dict.fromkeys((f"**.attention.self.{name}" for name in ("query", "key", "value")), Column("attention_head_size")),
    "**.attention.output.dense": Row(),
    "**.intermediate.dense": Column(),
    "**.layer.*.output.dense": Row(),
    **dict.fromkeys(("**.cls.predictions.transform.dense", "**.cls.seq_relationship"), "replicate"),
    "**.cls.predictions.decoder": Column(gather_output=True),
    **HEADS,
}
_VIT: _Table = {
    "**.attention": Enter(),
    **dict.fromkeys((f"**.attention.{name}_proj" for name in "qkv"), Column(unit="head_dim")),
    "**.attention.o_proj": Row(),
    "**.mlp.fc1": Column(),
    "**.mlp.fc2": Row(),
    **HEADS,
}
_T5: _Table = {
    **dict.fromkeys(("**.shared", "**.embed_tokens"), Vocab()),
    **dict.fromkeys(("**.SelfAttention", "**.EncDecAttention"), Divide(("n_heads",))),
    # Not Enter(): k and v of a cross attention read the encoder's output.
    **{
        f"**.{attention}.{name}": Column(unit="key_value_proj_dim")
        for attention in ("SelfAttention", "EncDecAttention")
        for name in "qkv"
    },
    **dict.fromkeys(("**.SelfAttention.o", "**.EncDecAttention.o", "**.DenseReluDense.wo"), Row()),
    "**.relative_attention_bias": Column(),  # a column for each head
    **dict.fromkeys(("**.DenseReluDense.wi", "**.DenseReluDense.wi_0", "**.DenseReluDense.wi_1"), Column()),
    **HEADS,
}
FAMILIES: Mapping[str, Rules] = {  # by the model_type of their configs
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "gemma2"), _LLAMA),
    **dict.fromkeys(("qwen3", "gemma3_text"), _NORMED),
    "mixtral": _MIXTURE,
    "qwen3_moe": {**_MIXTURE, **_HEAD_NORMS},
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "opt": _OPT,
    "falcon": _FALCON_REST,
    "bert": _BERT,
    "vit": _VIT,
    "t5": _T5,
}


def rules_of(module: nn.Module) -> Rules:
    """Returns the table for a model of transformers, the rules of its family that match something in it, and logs
    which family that is. Raises ValueError for any other module."""
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    if not isinstance(family, str) or family not in FAMILIES:
        nearest = get_close_matches(str(family), FAMILIES, 1)
        raise ValueError(
            f"tensor_parallelize: there is no table for {type(module).__name__}"
            f"{f' (model_type {family!r})' if family else ''}, only for {', '.join(sorted(FAMILIES))}; give one as "
            'rules, such as {"blocks.*.up": "column", "blocks.*.down": "row"}'
            f"{f', or that of {nearest[0]}, families.FAMILIES[{nearest[0]!r}]' if nearest else ''}"
        )
    rules = {**FAMILIES[family], **(_falcon_attention(config) if family == "falcon" else {})}
    _log.info("tensor_parallelize: %s is split by the table of %s", type(module).__name__, family)
    names = [name for name, _ in module.named_modules() if name]
    return {pattern: style for pattern, style in rules.items() if names_matching(pattern, names)}


def _falcon_attention(config: object) -> _Table:
    """Returns the rules of Falcon's fused product, of which there are three forms."""
    own, fused = "**.self_attention", "**.self_attention.query_key_value"
    if getattr(config, "new_decoder_architecture", False):  # q of a group, then its k and v
        return {own: Divide(("num_heads", "num_kv_heads")), fused: Column(heads="num_kv_heads")}
    if getattr(config, "multi_query", False):
        return {own: Divide(("num_heads",)), fused: Column(unit="head_dim", parts=("num_heads", 1, 1))}
    return {own: Divide(("num_heads", "num_kv_heads")), fused: Column(heads="num_heads")}
