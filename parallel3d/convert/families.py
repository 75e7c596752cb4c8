"""The tables of the families of transformers 5, and which model gets which.

A table is for all models of a family, those with a head on top and those without: a pattern that matches nothing in a
model is left out for it. Where no table says otherwise, the models count heads from the projections' outputs.
`tests/distributed/test_families.py` compares each with the unsplit model in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn

from parallel3d.convert.rules import (
    Column,
    Divide,
    Enter,
    Replicate,
    Row,
    Rules,
    Scatter,
    SplitExperts,
    Style,
    Vocab,
    Word,
    names_matching,
)

_Table = dict[str, Style | Word]

HEADS: _Table = {  # what stands on top of a model, whatever its family
    "**.lm_head": Column(gather_output=True),
    **dict.fromkeys(("**.score", "**.classifier", "**.qa_outputs", "**.pooler.dense"), "replicate"),
}
_HEAD_NORMS: _Table = {  # this rank norms its own heads
    "**.self_attn.q_norm": Replicate(partial_gradient=True),
    "**.self_attn.k_norm": Replicate(partial_gradient=True),
}
_ATTENTION: _Table = {
    "**.layers.*.self_attn": Enter(),
    "**.layers.*.self_attn.q_proj": Column(unit="head_dim"),
    "**.layers.*.self_attn.k_proj": Column(unit="head_dim", shared="num_key_value_groups"),
    "**.layers.*.self_attn.v_proj": Column(unit="head_dim", shared="num_key_value_groups"),
    "**.layers.*.self_attn.o_proj": Row(),
}
_LLAMA: _Table = {
    "**.embed_tokens": Vocab(),
    **_ATTENTION,
    "**.layers.*.mlp": Enter("x"),
    "**.layers.*.mlp.gate_proj": Column(),
    "**.layers.*.mlp.up_proj": Column(),
    "**.layers.*.mlp.down_proj": Row(),
    **HEADS,
}
_NORMED: _Table = {**_LLAMA, **_HEAD_NORMS}
_MIXTURE: _Table = {**_LLAMA, "**.layers.*.mlp": Replicate(), "**.layers.*.mlp.experts": SplitExperts()}
_LLAMA4: _Table = {
    "**.embed_tokens": Vocab(),
    **_ATTENTION,
    # Not Enter() around all: in some layers it is a mixture, whose router reads the same input.
    **dict.fromkeys(("**.feed_forward.**.gate_proj", "**.feed_forward.**.up_proj"), Column()),
    "**.feed_forward.**.down_proj": Row(),
    "**.feed_forward.shared_expert": Enter("x"),
    "**.feed_forward.experts": SplitExperts(),
    "**.feed_forward.router": "replicate",
    **HEADS,
}
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
_GPT2: _Table = {
    "**.wte": Vocab(),
    "**.wpe": "replicate",
    "**.h.*.attn": Divide(("split_size", "num_heads")),
    "**.h.*.attn.c_attn": Column(unit="head_dim", parts=3),
    "**.h.*.attn.c_proj": Row(),
    "**.h.*.mlp.c_fc": Column(),
    "**.h.*.mlp.c_proj": Row(),
    **HEADS,
}
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
    "llama4_text": _LLAMA4,
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

_JOINED = Replicate(partial_gradient=True, gather_sequence=True)  # what reads it has the whole sequence
_LLAMA_SEQUENCE: _Table = {
    "**.layers.0": Scatter(),
    **{
        f"**.layers.*.{place}_layernorm": Replicate(partial_gradient=True)  # a norm of this rank's tokens
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    },
    "**.layers.*.self_attn": Enter(sequence=True),
    "**.layers.*.mlp": Enter("x", sequence=True),
    **dict.fromkeys(("**.layers.*.self_attn.o_proj", "**.layers.*.mlp.down_proj"), Row(sequence=True)),
    "**.norm": _JOINED,
}
# What is laid out otherwise where the sequence is split from the first block to the last norm.
SEQUENCE_FAMILIES: Mapping[str, Rules] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _LLAMA_SEQUENCE),
    "phi3": {
        "**.layers.0": Scatter(),
        **dict.fromkeys(("**.input_layernorm", "**.post_attention_layernorm", "**.norm"), _JOINED),
        **dict.fromkeys(("**.self_attn.o_proj", "**.mlp.down_proj"), Row(sequence=True)),
    },
    "gpt2": {
        "**.h.0": Scatter(),
        **dict.fromkeys(("**.ln_1", "**.ln_2", "**.ln_f"), _JOINED),
        **dict.fromkeys(("**.h.*.attn.c_proj", "**.h.*.mlp.c_proj"), Row(sequence=True)),
    },
    "gpt_neox": {
        "**.layers.0": Scatter(),
        **dict.fromkeys(("**.input_layernorm", "**.post_attention_layernorm", "**.final_layer_norm"), _JOINED),
        **dict.fromkeys(("**.attention.dense", "**.mlp.dense_4h_to_h"), Row(sequence=True)),
    },
}


def rules_of(module: nn.Module, *, sequence_parallel: bool = False) -> Rules:
    """Returns the table for a model of transformers: the rules of its family that match something in it. With
    `sequence_parallel` what lies between the halves of the blocks is split along the
    sequence, which tp must divide. Raises ValueError for a module without such a table, and where a dropout would draw
    the same mask for the tokens of every rank."""
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
    if sequence_parallel:
        if family not in SEQUENCE_FAMILIES:
            known = ", ".join(sorted(SEQUENCE_FAMILIES))
            raise ValueError(f"sequence_parallel: there is no such table for {family}, only for {known}; leave it out")
        dropouts = (name for name, each in module.named_modules() if isinstance(each, nn.Dropout) and each.p > 0)
        if name := next(dropouts, None):
            words = "set it to 0 in the config, or leave sequence_parallel out"
            raise ValueError(f"{name}: this dropout would drop the same of each rank's tokens; {words}")
        rules |= SEQUENCE_FAMILIES[family]
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
