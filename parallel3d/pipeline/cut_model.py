"""Cuts a model that others wrote into pipeline stages, by a table of its modules' names; transformers' decoders have
one.

[Note: one forward] Every stage runs the model's own forward. What belongs to other stages is replaced: a block, a norm
or a head by `PassThrough`, which gives what it takes, and what is added to an embedding by `Nothing`. So all that the
forward makes between its modules (masks, rotary positions, a choice of mask by the block's number) is made on every
stage as in the whole model, and needs no declaration. A module without parameters, such as a rotary embedding, is on
every stage. What an earlier stage gives is what its forward hands to the first module of the last stage: what follows,
such as Gemma's soft cap of the logits, is for the last stage alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.torch_private import with_modules

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class CutRules:
    """Which modules of a model are the list of its blocks, and which go with the first and with the last stage."""

    blocks: str
    first: tuple[str, ...]  # each gives on a later stage what it takes
    last: tuple[str, ...]  # in the forward's order; each gives on an earlier stage what it takes
    added: tuple[str, ...] = ()  # of the first stage: their outputs are added to another's, as learned positions are
    hidden: str | None = None  # the keyword by which the forward takes hidden states; None: in the place of the ids
    settings: Mapping[str, Any] = field(default_factory=dict)  # keywords of every forward
    tuples: bool = False  # a block gives a tuple, whose first is the hidden states
    refused: Mapping[str, str] = field(default_factory=dict)  # a key of the config or the forward, and why it is off

    @property
    def owned(self) -> tuple[str, ...]:
        return (self.blocks, *self.first, *self.added, *self.last)


_HIDDEN: dict[str, Any] = {"hidden": "inputs_embeds", "settings": {"use_cache": False}}
LLAMA = CutRules("model.layers", ("model.embed_tokens",), ("model.norm", "lm_head"), **_HIDDEN)
MIXTURE = replace(
    LLAMA,
    refused={
        "output_router_logits": "it adds a loss of all blocks' routers to the model's, and a stage has only its own"
    },
)
GPT2 = CutRules(
    "transformer.h",
    ("transformer.wte", "transformer.drop"),
    ("transformer.ln_f", "lm_head"),
    added=("transformer.wpe",),
    **_HIDDEN,
)
GPT_NEOX = CutRules(
    "gpt_neox.layers",
    ("gpt_neox.embed_in", "gpt_neox.emb_dropout"),
    ("gpt_neox.final_layer_norm", "lm_head"),
    **_HIDDEN,
)
OPT = CutRules(
    "model.decoder.layers",
    ("model.decoder.embed_tokens", "model.decoder.project_in"),
    ("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
    added=("model.decoder.embed_positions",),
    **_HIDDEN,
)
FALCON = CutRules(
    "transformer.h", ("transformer.word_embeddings",), ("transformer.ln_f", "lm_head"), tuples=True, **_HIDDEN
)
FAMILIES: dict[str, CutRules] = {  # by the `model_type` of transformers' config, for models with a head on top
    **dict.fromkeys(("llama", "llama4_text", "mistral", "qwen2", "qwen3", "phi3"), LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), LLAMA),
    **dict.fromkeys(("mixtral", "qwen3_moe"), MIXTURE),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
    "falcon": FALCON,
}


class PassThrough(nn.Module):
    """Gives its first input, in the place of a module of another stage."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class PassTuple(nn.Module):
    """Gives its first input as the first of a tuple, in the place of a block that gives a tuple."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> tuple[Any]:
        return (x,)


class StageEnd(nn.Module):
    """Keeps its first input for `_forward`, in the place of the first module that only the last stage has."""

    taken: Any = None

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.taken = x
        return x


class Nothing(nn.Module):
    """Gives 0, in the place of a module of the first stage whose output is added to another's."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def cut_model(
    model: nn.Module,
    boundaries: Sequence[int],
    rules: CutRules | None = None,
    *,
    check: bool = True,
    example: Tensor | tuple[Tensor] | None = None,
) -> list[nn.Module]:
    """Cuts a model into stages, which share its modules and keep its parameters' names. `boundaries` are the numbers of
    the first block of each stage but the first. A stage takes the ids, or what the stage before gives, and gives one
    tensor; keywords go to the model's own forward. Without `rules` the table is that of the model's family in
    `FAMILIES`. Cut after `tensor_parallelize` and before `shard`.

    With `check` the ids `example`, a tensor or a tuple of it, go through the model and through its stages, and must
    come out alike; a model of transformers needs no example, and one on the meta device is not compared.

    Raises ValueError for a family without a table, a name that the model does not have, a stage without blocks, a
    parameter that no rule gives to a stage, or one that two stages would share, a setting that no stage could compute;
    and where the check finds another output."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if rules is None and kind not in FAMILIES:
        advice = "give one, such as CutRules('blocks', first=('embed',), last=('norm', 'head'))"
        if getattr(config, "is_encoder_decoder", False):
            advice = "no table can cut an encoder with a decoder, whose blocks all read the encoder's output"
        raise ValueError(
            f"{type(model).__name__}: there is no table for {kind or 'it'}, but for the decoders {', '.join(FAMILIES)}"
            f"; {advice}"
        )
    rules = _of_model(model, rules or FAMILIES[str(kind)])
    modules = dict(model.named_modules())
    if boundaries:
        _refuse_settings(rules, {name: getattr(config, name, None) for name in rules.refused})
    count = len(list(modules[rules.blocks].children()))
    ends = [0, *boundaries, count]
    if any(start >= end for start, end in zip(ends[:-1], ends[1:], strict=True)):
        raise ValueError(f"boundaries {list(boundaries)}: leave a stage without blocks, of which there are {count}")
    ranges = [range(*pair) for pair in zip(ends[:-1], ends[1:], strict=True)]
    _refuse_lost_or_shared(model, rules, ranges)
    stages = [_stage(model, rules, own, is_first=own.start == 0, is_last=own.stop == count) for own in ranges]
    if example is None and isinstance(vocab := getattr(config, "vocab_size", None), int):
        example = (torch.arange(8) * 7 + 1).view(2, 4) % vocab
    tensors = [*model.parameters(), *model.buffers()]
    if check and not any(tensor.is_meta for tensor in tensors):
        if example is None:
            raise ValueError("the stages are checked with an example of ids; try example=ids, or check=False")
        (ids,) = (example,) if isinstance(example, Tensor) else example
        _check(model, stages, rules, ids.to(tensors[0].device))
    return stages


def _of_model(model: nn.Module, rules: CutRules) -> CutRules:
    """Returns the rules without the modules that this model has as None, such as the projections of most OPTs."""
    modules = dict(model.named_modules())

    def is_none(name: str) -> bool:
        parent, _, child = name.rpartition(".")
        return getattr(modules.get(parent), child, model) is None

    first, last, added = (
        tuple(name for name in names if not is_none(name)) for names in (rules.first, rules.last, rules.added)
    )
    rules = replace(rules, first=first, last=last, added=added)
    if missing := [name for name in rules.owned if name not in modules]:
        raise ValueError(f"{type(model).__name__}: has no module {', '.join(missing)}, which its rules name")
    return rules


def _refuse_settings(rules: CutRules, values: Mapping[str, Any]) -> None:
    for name, why in rules.refused.items():
        if values.get(name):
            raise ValueError(f"{name} = {values[name]}: {why}; with more than one stage set {name}=False")


def _stage(model: nn.Module, rules: CutRules, own: range, *, is_first: bool, is_last: bool) -> nn.Module:
    others = {
        f"{rules.blocks}.{name}": number
        for number, name in enumerate(dict(model.get_submodule(rules.blocks).named_children()))
    }
    block = PassTuple if rules.tuples else PassThrough
    replaced: dict[str, nn.Module] = {name: block() for name, number in others.items() if number not in own}
    if not is_first:
        replaced |= {name: PassThrough() for name in rules.first} | {name: Nothing() for name in rules.added}
    if not is_last:
        replaced |= {name: StageEnd() if name == rules.last[0] else PassThrough() for name in rules.last}
    stage = with_modules(model, replaced)
    stage.forward = partial(_forward, stage, rules, is_first)
    return stage


def _forward(stage: nn.Module, rules: CutRules, is_first: bool, x: Tensor, **keywords: Any) -> Tensor:
    """Runs the model's own forward on ids, or on hidden states, and returns what it hands to the last stage's first
    module, or on the last stage its one tensor, or the first of many."""
    _refuse_settings(rules, keywords)
    whole, settings = type(stage).forward, {**rules.settings, **keywords}
    made: Any
    if is_first or rules.hidden is None:
        made = whole(stage, x, **settings)
    else:
        made = whole(stage, **{rules.hidden: x}, **settings)
    first: Tensor = made if isinstance(made, Tensor) else made[0]
    end = stage.get_submodule(rules.last[0]) if rules.last else None
    if isinstance(end, StageEnd):
        first, end.taken = end.taken, None
    return first


def _refuse_lost_or_shared(model: nn.Module, rules: CutRules, ranges: Sequence[range]) -> None:
    """Raises ValueError for a parameter that is on no stage, or one of two names whose stages differ."""
    numbers = {name: at for at, name in enumerate(dict(model.get_submodule(rules.blocks).named_children()))}
    stage_of: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((each for each in rules.owned if name.startswith(f"{each}.")), None)
        if owner is None:
            raise ValueError(f"{name}: no rule gives it to a stage; name its module among `first`, `added` or `last`")
        if owner == rules.blocks:
            number = numbers[name[len(owner) + 1 :].split(".")[0]]
            stage = next(at for at, own in enumerate(ranges) if number in own)
        else:
            stage = len(ranges) - 1 if owner in rules.last else 0
        other, at = stage_of.setdefault(id(parameter), (name, stage))
        if at != stage:
            raise ValueError(
                f"{name}: is tied to {other}, and they would be on stages {stage} and {at}, where each would learn "
                "something else; build a new model with tie_word_embeddings=False, or untie loaded weights before the "
                f"model is split: model.{name} = torch.nn.Parameter(model.{name}.detach().clone())"
            )


@torch.no_grad()
def _check(model: nn.Module, stages: Sequence[nn.Module], rules: CutRules, example: Tensor) -> None:
    were = [(part, part.training) for each in (model, *stages) for part in each.modules()]
    model.eval()
    outputs: list[Any] = []
    block = next(model.get_submodule(rules.blocks).children())
    hook = block.register_forward_hook(lambda block, inputs, output: outputs.append(output))
    try:
        made = model(example, **rules.settings)
        wanted, x = made if isinstance(made, Tensor) else made[0], example
        for stage in stages:
            x = stage.eval()(x)
    except Exception as error:
        advice = "see CutRules"
        if outputs and isinstance(outputs[0], tuple) != rules.tuples:
            advice = f"a block returns a {type(outputs[0]).__name__}; write CutRules(..., tuples={not rules.tuples})"
        elif rules.hidden is None and "inputs_embeds" in signature(model.forward).parameters:
            advice = "its forward takes hidden states by a keyword; write CutRules(..., hidden='inputs_embeds')"
        raise ValueError(
            f"{type(model).__name__}: its stages cannot be computed with the example: {error}; {advice}"
        ) from error
    finally:
        hook.remove()
        for part, was in were:
            part.training = was
    difference = float((x - wanted).abs().max() / wanted.abs().max()) if x.shape == wanted.shape else float("inf")
    if not difference <= _TOLERANCE:
        raise ValueError(
            f"the stages of {type(model).__name__} give another output than the model, by {difference:.1e} of its "
            "size; its forward computes something between its modules that only one stage may do: see CutRules"
        )
