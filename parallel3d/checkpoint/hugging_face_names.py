"""Parameter names of Hugging Face models, with one table per family, for export and import.

A tensor of a Hugging Face model corresponds to one parameter of parallel3d, or to several that are
stacked along their first dim, and can be transposed. For example, GPT-2 packs q, k and v, and its
Conv1D stores matrices as [in, out]. In a mixture of experts, it is the matrix of one expert, which
parallel3d stacks in one parameter.

[Note: names in files] Transformers 5 stacks the experts of most families in memory and renames some
parameters, but its files keep the published names. Its own function for saving converts the state
dict. Here that function gets row numbers instead of weights. So its result has the rows and the
parameter of each tensor in a file. If that is not a range of rows, the names in memory are used,
which Transformers can read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from parallel3d.config.hugging_face import family_of
from parallel3d.config.recipe import ModelConfig
from parallel3d.convert.hugging_face import construct_hugging_face
from parallel3d.convert.pretrained import parameters_on_meta

# Buffers that older versions of Transformers saved with the weights. They are ignored.
UNREAD = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
HEAD = "lm_head.weight"
_SPACING = 1 << 32  # Distance between the row numbers of two parameters.


@dataclass(frozen=True)
class HfTensor:
    """Tensor of a Hugging Face model, made of parallel3d parameters of equal shape.

    The parameters are stacked along their first dim, then transposed if `transposed`. If they stack
    the matrices of `experts` experts, the tensor has only the rows of the one with index `expert`.
    A parameter [experts, rows, columns] counts as the matrix [experts * rows, columns].
    """

    name: str
    parameters: tuple[str, ...]
    transposed: bool = False
    expert: int = 0
    experts: int = 1

    def matrix(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter, or of the matrix that a stack of matrices forms."""
        if self.experts == 1 or len(parameter) != 3:
            return parameter
        return (parameter[0] * parameter[1], parameter[2])

    def rows(self, parameter_rows: int) -> range:
        """Returns the rows of each parameter that this tensor has, given their total number."""
        each = parameter_rows // self.experts
        return range(self.expert * each, (self.expert + 1) * each)

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of this tensor, given the shape of one of its parameters."""
        rows, *columns = self.matrix(parameter)
        stacked = (len(self.rows(rows)) * len(self.parameters), *columns)
        return stacked[::-1] if self.transposed else stacked


@dataclass(frozen=True)
class NamesTable:
    """Tensors of a model family: `first` before the blocks, `block` in each, `last` after them.

    `base` is the prefix of all names except that of the head. Files saved without a head lack it.
    Names in `block` are relative to `<blocks>.<index>`. In a block with experts, `experts` replaces
    the tensors of the MLP. A name with {} stands for one tensor per expert.
    """

    base: str
    blocks: str
    first: list[HfTensor]
    block: list[HfTensor]
    last: list[HfTensor]
    experts: list[HfTensor] = field(default_factory=list)


def _named(names: dict[str, str], *, transposed: bool = False) -> list[HfTensor]:
    return [HfTensor(theirs, (ours,), transposed) for ours, theirs in names.items()]


_MLP = ("gate", "up", "down")
_LLAMA = NamesTable(
    base="model.",
    blocks="model.layers",
    first=_named({"embed.weight": "model.embed_tokens.weight"}),
    last=_named({"norm.weight": "model.norm.weight", "head.weight": HEAD}),
    block=_named(
        {
            "attention_norm.weight": "input_layernorm.weight",
            **{f"attention.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
            "mlp_norm.weight": "post_attention_layernorm.weight",
            **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in _MLP},
        }
    ),
)
_QWEN2_BIASES = _named({f"attention.{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"})
_QWEN3_NORMS = _named({f"attention.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"})
_GPT2_LINEAR = {"attention.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_GPT2_BLOCK = [
    *_named({f"attention_norm.{leaf}": f"ln_1.{leaf}" for leaf in ("weight", "bias")}),
    *_named({f"mlp_norm.{leaf}": f"ln_2.{leaf}" for leaf in ("weight", "bias")}),
    HfTensor("attn.c_attn.weight", tuple(f"attention.{x}.weight" for x in "qkv"), transposed=True),
    HfTensor("attn.c_attn.bias", tuple(f"attention.{x}.bias" for x in "qkv")),
]
for _ours, _theirs in _GPT2_LINEAR.items():
    _GPT2_BLOCK += _named({f"{_ours}.weight": f"{_theirs}.weight"}, transposed=True)
    _GPT2_BLOCK += _named({f"{_ours}.bias": f"{_theirs}.bias"})
_GPT2 = NamesTable(
    base="transformer.",
    blocks="transformer.h",
    first=_named(
        {
            "embed.tokens.weight": "transformer.wte.weight",
            "embed.positions.weight": "transformer.wpe.weight",
        }
    ),
    last=_named(
        {
            "norm.weight": "transformer.ln_f.weight",
            "norm.bias": "transformer.ln_f.bias",
            "head.weight": HEAD,
        }
    ),
    block=_GPT2_BLOCK,
)
_QWEN_EXPERTS = _named(
    {
        "mlp.router.weight": "mlp.gate.weight",
        **{f"mlp.experts.{x}": f"mlp.experts.{{}}.{x}_proj.weight" for x in _MLP},
    }
)
_SHARED = _named(
    {
        **{f"mlp.shared.{x}.weight": f"mlp.shared_expert.{x}_proj.weight" for x in _MLP},
        "mlp.shared_gate": "mlp.shared_expert_gate.weight",
    }
)
_MIXTRAL_EXPERTS = _named(
    {
        "mlp.router.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2.weight",
    }
)
_QWEN2 = replace(_LLAMA, block=_LLAMA.block + _QWEN2_BIASES)
_QWEN3 = replace(_LLAMA, block=_LLAMA.block + _QWEN3_NORMS)
# Keyed by `model_type` of config.json.
NAMES = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(_LLAMA, experts=_MIXTRAL_EXPERTS),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(_QWEN2, experts=_QWEN_EXPERTS + _SHARED),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, experts=_QWEN_EXPERTS),
}


def hf_tensors(
    model: ModelConfig,
    names: Iterable[str],
    stored: Iterable[str] = (),
) -> Iterator[HfTensor]:
    """Yields the tensors that a model has in Hugging Face format, from the embedding to the head.

    A tied head is omitted, as in files that Transformers writes. `names` are the names of the
    model's parameters, and `stored` those in a folder to read. Both matter only with
    `architecture: transformers`. A folder with the names of the parameters is read by them.

    Raises:
        ConfigError: No Hugging Face family can represent this model.
    """
    if model.architecture == "transformers":
        own = [*names]
        has_all = set(stored).issuperset(own)
        yield from _with_names(own) if has_all else _saved_by_transformers(model, own)
        return
    table = NAMES[family_of(model)]
    yield from table.first
    for index in range(model.layers):
        block = _expert_block(model, table) if model.has_experts(index) else table.block
        for each in block:
            ours = tuple(f"layers.{index}.{name}" for name in each.parameters)
            yield replace(each, name=f"{table.blocks}.{index}.{each.name}", parameters=ours)
    yield from table.last[:-1] if model.tied_embeddings else table.last


def _expert_block(model: ModelConfig, table: NamesTable) -> Iterator[HfTensor]:
    """Yields the tensors of a block with experts."""
    assert model.experts is not None
    yield from (each for each in table.block if not each.parameters[0].startswith("mlp."))
    for each in table.experts:
        count = model.experts.count if "{}" in each.name else 1
        for index in range(count):
            yield replace(each, name=each.name.format(index), expert=index, experts=count)


@cache
def model_on_meta(model: ModelConfig) -> Any:
    """Returns the model of Hugging Face Transformers, with parameters on the meta device."""
    with parameters_on_meta():
        return construct_hugging_face(model)


def _with_names(names: list[str]) -> list[HfTensor]:
    return [HfTensor(name, (name,)) for name in names]


def _saved_by_transformers(model: ModelConfig, names: list[str]) -> list[HfTensor]:
    """Returns the tensors that Transformers saves for parameters. See [Note: names in files]."""
    whole = model_on_meta(model)
    numbers = {}
    for index, name in enumerate(names):
        shape = whole.get_parameter(name).shape
        # A stack of matrices gets two rows per matrix, because a file may have its halves.
        rows = (shape[0], 2) if len(shape) == 3 else (2,)
        columns = [1] * (len(shape) - len(rows))
        first = index * _SPACING
        numbers[name] = torch.arange(first, first + prod(rows)).view(*rows, *columns)
    try:
        loading: Any = import_module("transformers.core_model_loading")  # New in Transformers 5.
        saved = loading.revert_weight_conversion(whole, numbers)
        tensors = [_saved_part(name, part, names, numbers) for name, part in saved.items()]
    except (AssertionError, ImportError, LookupError, RuntimeError, ValueError):
        return _with_names(names)
    return tensors


def _saved_part(
    saved: str,
    part: Tensor,
    names: list[str],
    numbers: Mapping[str, Tensor],
) -> HfTensor:
    """Returns the tensor `saved`, which has the rows with the numbers `part` of a parameter."""
    index, first = divmod(int(part.flatten()[0]), _SPACING)
    name = names[index]
    whole = numbers[name]
    assert torch.equal(part.flatten(), whole.flatten()[first : first + part.numel()])
    assert part.shape == whole.shape or (part.ndim, whole.ndim) == (2, 3)
    count = part.numel()
    return HfTensor(
        saved,
        (name,),
        expert=first // count,
        experts=whole.numel() // count,
    )
