"""Rules for the model families of Hugging Face Transformers 5.

A table covers all models of a family, with or without a head. Patterns that match nothing in a
model are dropped for it. tests/distributed/test_families.py compares each family with the unsplit
model in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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

_WHOLE_HEADS = Column(unit="head_dim")
_SHARED_HEADS = Column(unit="head_dim", shared="num_key_value_groups")
HEADS: _Table = {"**.lm_head": Column(gather_output=True)}
_HEAD_NORMS: _Table = {  # Each rank normalizes its own heads.
    "**.self_attn.q_norm": Replicate(partial_gradient=True),
    "**.self_attn.k_norm": Replicate(partial_gradient=True),
}
_ATTENTION: _Table = {
    "**.layers.*.self_attn": Enter(),
    "**.layers.*.self_attn.q_proj": _WHOLE_HEADS,
    "**.layers.*.self_attn.k_proj": _SHARED_HEADS,
    "**.layers.*.self_attn.v_proj": _SHARED_HEADS,
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
_STARCODER2: _Table = {
    **_LLAMA,
    "**.layers.*.mlp": Enter(),
    "**.layers.*.mlp.c_fc": Column(),
    "**.layers.*.mlp.c_proj": Row(),
}
_PHI: _Table = {
    **_LLAMA,
    "**.layers.*.self_attn.dense": Row(),
    "**.layers.*.mlp": Enter(),
    "**.layers.*.mlp.fc1": Column(),
    "**.layers.*.mlp.fc2": Row(),
}
# The norms of OLMo 2 span all heads, so its attention is not split.
_OLMO2: _Table = {**_LLAMA, **dict.fromkeys(_ATTENTION, "replicate")}
_MIXTURE: _Table = {
    **_LLAMA,
    "**.layers.*.mlp": Replicate(),
    "**.layers.*.mlp.experts": SplitExperts(),
}
_QWEN2_MIXTURE: _Table = {
    **_MIXTURE,
    "**.layers.*.mlp.shared_expert": Enter("x"),
    "**.layers.*.mlp.shared_expert.gate_proj": Column(),
    "**.layers.*.mlp.shared_expert.up_proj": Column(),
    "**.layers.*.mlp.shared_expert.down_proj": Row(),
    "**.layers.*.mlp.shared_expert_gate": "replicate",
}
_PHI3: _Table = {
    "**.embed_tokens": Vocab(),
    "**.self_attn": Divide(
        ("config.num_attention_heads", "num_key_value_heads"), shared=("num_key_value_heads",)
    ),
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
_STABLELM: _Table = {
    **_LLAMA,
    "**.layers.*.self_attn": Divide(
        ("num_heads", "num_key_value_heads"), shared=("num_key_value_heads",)
    ),
}
_GPTJ: _Table = {
    "**.wte": Vocab(),
    "**.attn.q_proj": _WHOLE_HEADS,
    "**.attn.k_proj": _WHOLE_HEADS,
    "**.attn.v_proj": _WHOLE_HEADS,
    "**.attn.out_proj": Row(),
    "**.mlp.fc_in": Column(),
    "**.mlp.fc_out": Row(),
    **HEADS,
}
_GLM: _Table = {
    "**.embed_tokens": Vocab(),
    **_ATTENTION,
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
_GPT_BIGCODE: _Table = {
    **_GPT2,
    "**.h.*.attn": Divide(("embed_dim",)),
    "**.h.*.attn.c_attn": Column(
        unit="head_dim", parts=("num_heads", 1, 1), shared="num_key_value_groups"
    ),
}
_DENSE_MLP: _Table = {"**.mlp.dense_h_to_4h": Column(), "**.mlp.dense_4h_to_h": Row()}
_GPT_NEOX: _Table = {
    "**.embed_in": Vocab(),
    # Packed by heads: q, k and v of the first head, then of the next.
    "**.attention.query_key_value": Column(heads="config.num_attention_heads"),
    "**.attention.dense": Row(),
    **_DENSE_MLP,
    "**.embed_out": Column(gather_output=True),
    **HEADS,
}
_OPT: _Table = {
    "**.embed_tokens": Vocab(),
    **dict.fromkeys(("**.embed_positions", "**.project_in", "**.project_out"), "replicate"),
    "**.self_attn": Divide(("num_heads",)),
    "**.self_attn.q_proj": _WHOLE_HEADS,
    "**.self_attn.k_proj": _WHOLE_HEADS,
    "**.self_attn.v_proj": _WHOLE_HEADS,
    "**.self_attn.out_proj": Row(),
    "**.fc1": Column(),
    "**.fc2": Row(),
    **HEADS,
}
_FALCON_REST: _Table = {
    "**.word_embeddings": Vocab(),
    "**.self_attention.dense": Row(),
    **_DENSE_MLP,
    **HEADS,
}
FAMILIES: Mapping[str, Rules] = {  # Keyed by the model_type of the config.
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "gemma2"), _LLAMA),
    **dict.fromkeys(("olmo", "cohere", "cohere2", "granite", "smollm3", "ernie4_5"), _LLAMA),
    "arcee": _LLAMA,
    "nemotron": _LLAMA,
    "stablelm": _STABLELM,
    "gptj": _GPTJ,
    "gpt_bigcode": _GPT_BIGCODE,
    **dict.fromkeys(("qwen3", "gemma3_text", "exaone4"), _NORMED),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO2),
    "starcoder2": _STARCODER2,
    "phi": _PHI,
    **dict.fromkeys(("glm", "glm4"), _GLM),
    "mixtral": _MIXTURE,
    "qwen2_moe": _QWEN2_MIXTURE,
    "qwen3_moe": {**_MIXTURE, **_HEAD_NORMS},
    "olmoe": {**_MIXTURE, **dict.fromkeys(_ATTENTION, "replicate")},
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "opt": _OPT,
    "falcon": _FALCON_REST,
}


# For norms whose output is read by replicated modules.
_GATHERED = Replicate(partial_gradient=True, gather_sequence=True)
_IN_BLOCK = (
    "**.input_layernorm",
    "**.post_attention_layernorm",
    "**.pre_feedforward_layernorm",
    "**.post_feedforward_layernorm",
)
_LLAMA_SEQUENCE: _Table = {
    "**.layers.0": Scatter(),
    # These norms work on this rank's tokens.
    **dict.fromkeys(_IN_BLOCK, Replicate(partial_gradient=True)),
    "**.norm": _GATHERED,
}
# Changes for sequence parallelism, in addition to those of Enter() and Row(). The sequence is split
# from the first block to the last norm.
SEQUENCE_FAMILIES: Mapping[str, Rules] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_SEQUENCE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _LLAMA_SEQUENCE),
    **dict.fromkeys(("cohere", "cohere2", "granite", "smollm3"), _LLAMA_SEQUENCE),
    **dict.fromkeys(("ernie4_5", "nemotron", "exaone4", "starcoder2"), _LLAMA_SEQUENCE),
    "phi3": {"**.layers.0": Scatter(), **dict.fromkeys((*_IN_BLOCK[:2], "**.norm"), _GATHERED)},
    "gpt2": {"**.h.0": Scatter(), **dict.fromkeys(("**.ln_1", "**.ln_2", "**.ln_f"), _GATHERED)},
    "gpt_neox": {
        "**.layers.0": Scatter(),
        **dict.fromkeys((*_IN_BLOCK[:2], "**.final_layer_norm"), _GATHERED),
    },
}


def rules_of(
    module: nn.Module, *, sequence_parallel: bool = False, family: str | None = None
) -> Rules:
    """Returns the tensor-parallel rules for a Hugging Face model.

    Args:
        module: Model with a `config.model_type`.
        sequence_parallel: If True, activations between the halves of the blocks are split along the
            sequence. tp must divide the sequence length.
        family: Family whose rules to use. Default: `config.model_type`.

    Returns:
        The rules of the family that match a module of the model.

    Raises:
        ValueError: There are no rules for the family, or with `sequence_parallel` the model has
            dropout.

    Example:
        >>> rules = {**parallel3d.rules_of(model), "**.lm_head": "column"}
        >>> model = parallel3d.tensor_parallelize(model, tp, rules)
        >>> model(ids).logits.shape  # [batch, seq, vocab / tp]
    """
    config = getattr(module, "config", None)
    family = str(family or getattr(config, "model_type", ""))
    tables = SEQUENCE_FAMILIES if sequence_parallel else FAMILIES
    if family not in tables:
        raise ValueError(
            f"tensor_parallelize: {type(module).__name__} with model_type {family!r}: no built-in "
            f"rules, only for {', '.join(sorted(tables))}; pass rules, for example "
            '{"blocks.*.up": "column", "blocks.*.down": "row"}'
        )
    rules = dict(FAMILIES[family])
    if family == "falcon":
        rules |= _falcon_attention(config)
    modules = {name: each for name, each in module.named_modules() if name}
    if sequence_parallel:
        for name, each in modules.items():
            if isinstance(each, nn.Dropout) and each.p > 0:
                raise ValueError(
                    f"{name}: dropout cannot be used with sequence parallelism, because every "
                    "rank would drop the same tokens; set it to 0 in the config, or pass "
                    "sequence_parallel=False"
                )
        for pattern, style in rules.items():
            if isinstance(style, Enter | Row):
                rules[pattern] = replace(style, sequence=True)
        rules |= SEQUENCE_FAMILIES[family]
    return {pattern: style for pattern, style in rules.items() if names_matching(pattern, modules)}


def _falcon_attention(config: object) -> _Table:
    own = "**.self_attention"
    packed = "**.self_attention.query_key_value"
    has_groups = getattr(config, "new_decoder_architecture", False)
    if has_groups or not getattr(config, "multi_query", False):
        # Packed by key/value heads: the queries of one, followed by its k and v.
        return {own: Divide(("num_heads", "num_kv_heads")), packed: Column(heads="num_kv_heads")}
    parts = Column(unit="head_dim", parts=("num_heads", 1, 1))
    return {own: Divide(("num_heads",)), packed: parts}
