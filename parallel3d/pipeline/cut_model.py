"""Cuts a model that others wrote into pipeline stages, by a table of its modules' names; transformers' decoders have
one.

[Note: one forward] Every stage runs the model's own forward. What belongs to other stages is replaced: a block, a norm
or a head by `PassThrough`, which gives what it takes, and what is added to an embedding by `Nothing`. So all that the
forward makes between its modules (masks, rotary positions, a choice of mask by the block's number) is made on every
stage as in the whole model, and needs no declaration. A module without parameters, such as a rotary embedding, is on
every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    last: tuple[str, ...]  # each gives on an earlier stage what it takes
    added: tuple[str, ...] = ()  # of the first stage: their outputs are added to another's, as learned positions are
    hidden: str | None = None  # the keyword by which the forward takes hidden states; None: in the place of the ids
    settings: Mapping[str, Any] = field(default_factory=dict)  # keywords of every forward

    @property
    def owned(self) -> tuple[str, ...]:
        return (self.blocks, *self.first, *self.added, *self.last)


_HIDDEN: dict[str, Any] = {"hidden": "inputs_embeds", "settings": {"use_cache": False}}
LLAMA = CutRules("model.layers", ("model.embed_tokens",), ("model.norm", "lm_head"), **_HIDDEN)
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
FAMILIES: dict[str, CutRules] = {  # by the `model_type` of transformers' config, for models with a head on top
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), LLAMA),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
}


class PassThrough(nn.Module):
    """Gives its first input, in the place of a module of another stage."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
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
    example: Tensor | None = None,
) -> list[nn.Module]:
    """Cuts a model into stages, which share its modules and keep its parameters' names. `boundaries` are the numbers of
    the first block of each stage but the first. A stage takes the ids, or what the stage before gives, and gives one
    tensor; keywords go to the model's own forward. Without `rules` the table is that of the model's family in
    `FAMILIES`. Cut after `tensor_parallelize` and before `shard`.

    With `check` the ids `example` go through the model and through its stages, and must come out alike; a model of
    transformers needs no example, and one on the meta device is not compared.

    Raises ValueError for a family without a table, a name that the model does not have, a stage without blocks, a
    parameter that no rule gives to a stage, or one that two stages would share; and where the check finds another
    output."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if rules is None and kind not in FAMILIES:
        raise ValueError(
            f"{type(model).__name__}: there is no table for {kind or 'it'}, but for {', '.join(FAMILIES)}; give one, "
            "such as CutRules('blocks', first=('embed',), last=('norm', 'head'))"
        )
    rules = rules or FAMILIES[str(kind)]
    modules = dict(model.named_modules())
    if missing := [name for name in rules.owned if name not in modules]:
        raise ValueError(f"{type(model).__name__}: has no module {', '.join(missing)}, which its rules name")
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
        _check(model, stages, rules, example.to(tensors[0].device))
    return stages


def _stage(model: nn.Module, rules: CutRules, own: range, *, is_first: bool, is_last: bool) -> nn.Module:
    others = {
        f"{rules.blocks}.{name}": number
        for number, name in enumerate(dict(model.get_submodule(rules.blocks).named_children()))
    }
    replaced: dict[str, nn.Module] = {name: PassThrough() for name, number in others.items() if number not in own}
    if not is_first:
        replaced |= {name: PassThrough() for name in rules.first} | {name: Nothing() for name in rules.added}
    if not is_last:
        replaced |= {name: PassThrough() for name in rules.last}
    stage = with_modules(model, replaced)
    stage.forward = partial(_forward, stage, rules, is_first)
    return stage


def _forward(stage: nn.Module, rules: CutRules, is_first: bool, x: Tensor, **keywords: Any) -> Tensor:
    """Runs the model's own forward on ids, or on hidden states, and returns its one tensor, or the first of many."""
    whole, settings = type(stage).forward, {**rules.settings, **keywords}
    made: Any
    if is_first or rules.hidden is None:
        made = whole(stage, x, **settings)
    else:
        made = whole(stage, **{rules.hidden: x}, **settings)
    first: Tensor = made if isinstance(made, Tensor) else made[0]
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
                "something else; build the model with tie_word_embeddings=False, or untie them"
            )


@torch.no_grad()
def _check(model: nn.Module, stages: Sequence[nn.Module], rules: CutRules, example: Tensor) -> None:
    were = [(part, part.training) for each in (model, *stages) for part in each.modules()]
    model.eval()
    try:
        made = model(example, **rules.settings)
        wanted, x = made if isinstance(made, Tensor) else made[0], example
        for stage in stages:
            x = stage.eval()(x)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__}: its stages cannot be computed with the example: {error}; see CutRules"
        ) from error
    finally:
        for part, was in were:
            part.training = was
    difference = float((x - wanted).abs().max() / wanted.abs().max()) if x.shape == wanted.shape else float("inf")
    if not difference <= _TOLERANCE:
        raise ValueError(
            f"the stages of {type(model).__name__} give another output than the model, by {difference:.1e} of its "
            "size; its forward computes something between its modules that only one stage may do: see CutRules"
        )
