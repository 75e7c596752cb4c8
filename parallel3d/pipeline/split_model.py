"""Splits a model that others wrote into pipeline stages, by a table of its modules' names.

[Note: one forward] Every stage runs the model's own forward. Modules of other stages are replaced:
a block, a norm or a head by `Identity`, and a module whose output is added to an embedding by
`Zero`. So masks, rotary positions and whatever else the forward makes between its modules are made
on every stage as in the full model. A module without parameters, such as a rotary embedding, is on
every stage. An earlier stage returns what its forward hands to the first module of the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.pipeline.stage import names_by_stage
from parallel3d.torch_private import with_modules

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class SplitSpec:
    """Names the list of blocks of a model, and the modules of the first and the last stage.

    Example:
        >>> rules = parallel3d.SplitSpec("blocks", first=("embed",), last=("norm", "head"))
        >>> stages = parallel3d.split_model(model, [4, 8, 12], rules, example=ids)
    """

    blocks: str
    first: tuple[str, ...]  # each returns its input on a later stage
    last: tuple[str, ...]  # in the forward's order; each returns its input on an earlier stage
    # of the first stage; their outputs are added to another's, as learned positions are
    added: tuple[str, ...] = ()
    # keyword by which the forward takes hidden states; None: they replace the ids
    hidden: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # keywords of every forward
    tuples: bool = False  # a block returns a tuple that starts with the hidden states


_HIDDEN: dict[str, Any] = {"hidden": "inputs_embeds", "settings": {"use_cache": False}}
LLAMA = SplitSpec("model.layers", ("model.embed_tokens",), ("model.norm", "lm_head"), **_HIDDEN)
GPT2 = SplitSpec(
    "transformer.h",
    ("transformer.wte", "transformer.drop"),
    ("transformer.ln_f", "lm_head"),
    added=("transformer.wpe",),
    **_HIDDEN,
)
GPT_NEOX = SplitSpec(
    "gpt_neox.layers",
    ("gpt_neox.embed_in", "gpt_neox.emb_dropout"),
    ("gpt_neox.final_layer_norm", "lm_head"),
    **_HIDDEN,
)
OPT = SplitSpec(
    "model.decoder.layers",
    ("model.decoder.embed_tokens", "model.decoder.project_in"),
    ("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
    added=("model.decoder.embed_positions",),
    **_HIDDEN,
)
FALCON = SplitSpec(
    "transformer.h",
    ("transformer.word_embeddings",),
    ("transformer.ln_f", "lm_head"),
    tuples=True,
    **_HIDDEN,
)
# by the `model_type` of transformers' config, for models with a head on top
FAMILIES: dict[str, SplitSpec] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"), LLAMA),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
    "falcon": FALCON,
}


class Identity(nn.Module):
    """Returns its first input, in place of a module of another stage, or of a block that returns a
    tuple."""

    def __init__(self, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return (x,) if self.as_tuple else x


class StageEnd(Identity):
    """Keeps its input for `_forward`, in place of the first module of the last stage."""

    taken: Any = None

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.taken = x
        return x


class Zero(nn.Module):
    """Returns 0, in place of a module of the first stage whose output is added to another's."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def split_model(
    model: nn.Module,
    boundaries: Sequence[int],
    rules: SplitSpec | None = None,
    *,
    check: bool = True,
    example: Tensor | None = None,
) -> list[nn.Module]:
    """Splits a model into stages, which share its modules and keep its parameters' names. Call it
    after `tensor_parallelize` and before `shard`.

    Args:
        model: Decoder of transformers with a head, or another model with `rules`.
        boundaries: Number of the first block of each stage except the first.
        rules: Table of names. Default: the one of the model's family in `FAMILIES`.
        check: Compares the stages with the model on the ids `example`.
        example: A tensor of ids. Models of transformers need none, and a model
            on the meta device is not compared.

    Returns:
        Stages that take ids or the output of the stage before, and return one tensor. Keywords go
        to the model's own forward.

    Raises:
        ValueError: No table, a name that is not in the model, a stage without blocks, a parameter
            of no stage or of two, a setting that no stage can compute, or another output.

    Example:
        >>> stages = parallel3d.split_model(model, [4, 8, 12])  # of transformers, 4 stages
        >>> mine = [stages[index] for index in schedule.stages_of(pp.get_local_rank())]
    """
    config = getattr(model, "config", None)
    rules = _without_absent(model, rules or spec_of(model))
    if boundaries and getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits = True: it adds a loss of all blocks' routers, and a stage has "
            "only its own; with more than one stage set output_router_logits=False"
        )
    names = [name for name, _ in model.get_submodule(rules.blocks).named_children()]
    blocks = names_by_stage(names, boundaries)
    _refuse_lost_or_shared(model, rules, blocks)
    stages = []
    for number, own in enumerate(blocks):
        is_last = number == len(blocks) - 1
        stages.append(_stage(model, rules, own, number == 0, is_last))
    vocab = getattr(config, "vocab_size", None)
    if example is None and vocab is not None:
        example = (torch.arange(8) * 7 + 1).view(2, 4) % vocab
    tensors = [*model.parameters(), *model.buffers()]
    if check and not any(tensor.is_meta for tensor in tensors):
        if example is None:
            raise ValueError("the stages are checked with ids; try example=ids, or check=False")
        _check(model, stages, rules, example.to(tensors[0].device))
    return stages


cut_model = split_model  # its name in earlier versions


def spec_of(model: nn.Module) -> SplitSpec:
    """Returns the table of a model's family. Raises ValueError if there is none."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(
            f"{type(model).__name__}: there is no table for model_type {kind}, only for "
            f"{', '.join(FAMILIES)}; for a decoder give one, such as SplitSpec('blocks', "
            "first=('embed',), last=('norm', 'head'))"
        )
    return FAMILIES[kind]


def _without_absent(model: nn.Module, rules: SplitSpec) -> SplitSpec:
    """Returns the rules without modules that this model does not have, such as the projections of
    most OPTs. `_refuse_lost_or_shared` finds the parameters of a name that is wrong."""
    modules = dict(model.named_modules())
    present: dict[str, Any] = {}
    for which in ("first", "last", "added"):
        present[which] = tuple(name for name in getattr(rules, which) if name in modules)
    return replace(rules, **present)


def _stage(
    model: nn.Module, rules: SplitSpec, own: Sequence[str], is_first: bool, is_last: bool
) -> nn.Module:
    replaced: dict[str, nn.Module] = {}
    for name, _ in model.get_submodule(rules.blocks).named_children():
        if name not in own:
            replaced[f"{rules.blocks}.{name}"] = Identity(as_tuple=rules.tuples)
    if not is_first:
        replaced |= {name: Identity() for name in rules.first}
        replaced |= {name: Zero() for name in rules.added}
    if not is_last:
        replaced |= {name: Identity() for name in rules.last}
        replaced[rules.last[0]] = StageEnd()
    stage = with_modules(model, replaced)
    stage.forward = partial(_forward, stage, rules, is_first)
    return stage


def _forward(
    stage: nn.Module, rules: SplitSpec, is_first: bool, x: Tensor, **keywords: Any
) -> Tensor:
    """Runs the model's own forward on ids or hidden states. Returns what it hands to the first
    module of the last stage; the last stage returns its first tensor."""
    settings = {**rules.settings, **keywords}
    inputs: tuple[Tensor, ...] = (x,)
    if not is_first and rules.hidden is not None:
        inputs = ()
        settings[rules.hidden] = x
    output = type(stage).forward(stage, *inputs, **settings)
    end = stage.get_submodule(rules.last[0]) if rules.last else None
    if isinstance(end, StageEnd):
        taken: Tensor = end.taken
        end.taken = None
        return taken
    return _first_tensor(output)


def _first_tensor(output: Any) -> Tensor:
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first


def _refuse_lost_or_shared(
    model: nn.Module, rules: SplitSpec, blocks: Sequence[Sequence[str]]
) -> None:
    """Raises ValueError for a parameter of no stage, or one of two names on different stages."""
    places: dict[str, int] = {}  # the start of a parameter's name -> its stage
    for stage, own in enumerate(blocks):
        for block in own:
            places[f"{rules.blocks}.{block}."] = stage
    for name in (*rules.first, *rules.added):
        places[f"{name}."] = 0
    for name in rules.last:
        places[f"{name}."] = len(blocks) - 1
    stage_of: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners = list(filter(name.startswith, places))
        if not owners:
            raise ValueError(
                f"{name}: no rule gives it to a stage; name its module among `first`, `added` or "
                "`last`"
            )
        stage = places[owners[0]]
        other, before = stage_of.setdefault(id(parameter), (name, stage))
        if before != stage:
            raise ValueError(
                f"{name}: is tied to {other}, and they would be on stages {stage} and {before}, "
                "where each would learn something else; build a new model with "
                "tie_word_embeddings=False, or untie loaded weights before the model is split: "
                f"model.{name} = torch.nn.Parameter(model.{name}.detach().clone())"
            )


@torch.no_grad()
def _check(
    model: nn.Module, stages: Sequence[nn.Module], rules: SplitSpec, example: Tensor
) -> None:
    """Raises ValueError if the stages do not give the model's output for an example."""
    held = nn.ModuleList([model, *stages])
    training = {part: part.training for part in held.modules()}
    held.eval()
    try:
        wanted = _first_tensor(model(example, **rules.settings))
        x = example
        for stage in stages:
            x = stage(x)
    finally:
        for part, was in training.items():
            part.training = was
    difference = float("inf")
    if x.shape == wanted.shape:
        difference = float((x - wanted).abs().max() / wanted.abs().max())
    if not difference <= _TOLERANCE:
        raise ValueError(
            f"the stages of {type(model).__name__} give another output than the model, by "
            f"{difference:.1e} of its size; its forward computes something between its modules "
            "that only one stage may do, or its blocks return tuples: see SplitSpec"
        )
