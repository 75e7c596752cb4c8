"""Splits an existing model into pipeline stages by the names of its modules.

[Note: one forward] Every stage runs the model's own `forward`. The modules of other stages are
replaced: by `Zero` if their output is added to an embedding, else by `Identity`. So every stage
computes masks, rotary positions and other intermediate values as the full model does. Modules that
no stage owns, such as rotary embeddings, are kept on every stage. On later stages the first block
of the model is replaced by `StageStart`, which returns the stage's input. So a `forward` that
scales the embeddings, as Granite's does, scales them on the first stage only. A stage before the
last returns the tensor that its `forward` passes to the first module of `SplitSpec.last`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.pipeline.stage import BlockRange, SplitSpec, cut, names_by_stage
from parallel3d.torch_private import with_modules

_TOLERANCE = 1e-4  # Largest allowed difference, relative to the largest output.


_HIDDEN: dict[str, Any] = {
    "hidden": "inputs_embeds",
    "settings": {"use_cache": False},
    "positions": "position_ids",
}
LLAMA = SplitSpec("model.layers", ("model.embed_tokens",), ("model.norm", "lm_head"), **_HIDDEN)
GPT2 = SplitSpec(
    "transformer.h",
    ("transformer.wte", "transformer.drop"),
    ("transformer.ln_f", "lm_head"),
    added=("transformer.wpe",),
    **_HIDDEN,
)
PHI = replace(
    LLAMA,
    first=("model.embed_tokens", "model.embed_dropout"),
    last=("model.final_layernorm", "lm_head"),
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
# Keyed by `config.model_type`. For the classes with a language-model head.
FAMILIES: dict[str, SplitSpec] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), LLAMA),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), LLAMA),
    **dict.fromkeys(("olmo", "olmo2", "cohere", "cohere2", "granite", "smollm3"), LLAMA),
    **dict.fromkeys(("olmo3", "arcee"), LLAMA),
    **dict.fromkeys(("ernie4_5", "stablelm", "nemotron", "exaone4", "starcoder2"), LLAMA),
    **dict.fromkeys(("glm", "glm4"), LLAMA),
    "phi": PHI,
    **dict.fromkeys(("gpt2", "gpt_bigcode"), GPT2),
    "gptj": replace(GPT2, added=()),
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
    "falcon": FALCON,
}


class Identity(nn.Module):
    """Returns its first input. Replaces a module that belongs to another stage."""

    def __init__(self, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return (x,) if self.as_tuple else x


class StageStart(Identity):
    """Returns the input of the stage. Replaces the first block of the model on later stages."""

    given: Any = None

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.given
        self.given = None
        return super().forward(given)


class StageEnd(Identity):
    """Stores its input, which `_forward` returns as the output of the stage.

    Replaces the first module of `SplitSpec.last` on all stages except the last.
    """

    taken: Any = None
    sequence_parts = 1

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.taken = x
        return _with_all_parts(x, self.sequence_parts)


class Zero(nn.Module):
    """Returns 0. Replaces the modules of `SplitSpec.added` on all stages except the first."""

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
    """Splits a model into pipeline stages. Call it after `tensor_parallelize` and before `shard`.

    The stages share the modules of the model and keep the names of its parameters.

    Args:
        model: Hugging Face decoder with a head, or any other model with `rules`.
        boundaries: Index of the first block of each stage except the first.
        rules: Names of the modules. Default: the entry of the model's family in `FAMILIES`.
        check: Compares the outputs of the stages with those of the model. Skipped on the meta
            device.
        example: Token ids for the check, [batch, seq]. Optional for Hugging Face models, whose
            `config.vocab_size` is known.

    Returns:
        One module per stage. The first takes token ids, the others take the output of the previous
        stage. Each returns one tensor. Keyword arguments go to the model's own `forward`.

    Raises:
        ValueError: No rules are known for the model, a stage has no blocks, a parameter is on no
            stage or on two, `output_router_logits` is True, the check needs an `example`, or the
            output of the stages differs from that of the model.
        AttributeError: `rules.blocks` is not in the model.

    Example:
        >>> stages = parallel3d.split_model(model, [4, 8, 12])  # Hugging Face model, 4 stages
        >>> mine = [stages[index] for index in schedule.stages_of(pp.get_local_rank())]
    """
    config = getattr(model, "config", None)
    rules = without_absent(model, rules or spec_of(model))
    if boundaries and getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits = True: its loss needs all blocks' routers, but a stage has "
            "only its own; set output_router_logits=False, or use one stage"
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
            raise ValueError(
                "example = None: the check needs token ids; try example=ids or check=False"
            )
        _check(model, stages, rules, example.to(tensors[0].device))
    return stages


cut_model = split_model  # Former name, kept as an alias.


def cut_stage(model: nn.Module, blocks: BlockRange) -> nn.Module:
    """Returns one stage of a model that the trainer has built.

    A model with the attribute `split_spec` keeps its own forward pass. Any other model has the
    parts of a `Decoder`. Those of other stages are removed from it.
    """
    spec: SplitSpec | None = getattr(model, "split_spec", None)
    if spec is None:
        return cut(model, blocks)
    own = [str(index) for index in range(blocks.first, blocks.end)]
    return _stage(model, spec, own, blocks.is_first_stage, blocks.is_last_stage)


def check_stages(model: nn.Module, spec: SplitSpec, example: Tensor) -> None:
    """Splits a model into two stages and compares their output with the model's.

    `example` holds token ids [batch, seq]. Raises ValueError if the outputs differ. A model with
    one block is not checked.
    """
    spec = without_absent(model, spec)
    names = [name for name, _ in model.get_submodule(spec.blocks).named_children()]
    if len(names) > 1:
        stages = [
            _stage(model, spec, names[:1], True, False),
            _stage(model, spec, names[1:], False, True),
        ]
        _check(model, stages, spec, example)


def spec_of(model: nn.Module) -> SplitSpec:
    """Returns the rules of a model's family. Raises ValueError if the family is unknown."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(
            f"{type(model).__name__}: model_type = {kind}: has no rules, only "
            f"{', '.join(FAMILIES)} do; pass your own, for example SplitSpec('blocks', "
            "first=('embed',), last=('norm', 'head'))"
        )
    return FAMILIES[kind]


def without_absent(model: nn.Module, rules: SplitSpec) -> SplitSpec:
    """Returns the rules without modules that this model lacks, such as OPT's optional projections.

    A misspelled name is found later: its parameters belong to no stage (`_refuse_lost_or_shared`).
    """
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
            kind = Identity if replaced or is_first else StageStart
            replaced[f"{rules.blocks}.{name}"] = kind(as_tuple=rules.tuples)
    if not is_first:
        replaced |= {name: Identity() for name in rules.first}
        replaced |= {name: Zero() for name in rules.added}
    if not is_last:
        replaced |= {name: Identity() for name in rules.last}
        end = StageEnd()
        end.sequence_parts = rules.sequence_parts
        replaced[rules.last[0]] = end
    stage = with_modules(model, replaced)
    stage.forward = partial(_forward, stage, rules, is_first)
    return stage


def _forward(
    stage: nn.Module, rules: SplitSpec, is_first: bool, x: Tensor, **keywords: Any
) -> Tensor:
    """Runs the model's own `forward` on token ids or hidden states.

    Returns:
        Hidden states for the next stage. On the last stage, the first tensor of the model's output.
    """
    settings = {**rules.settings, **keywords}
    inputs: tuple[Tensor, ...] = (x,)
    if not is_first:
        first_block: Any = next(stage.get_submodule(rules.blocks).children())
        first_block.given = x
        x = _with_all_parts(x, rules.sequence_parts)
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


def _with_all_parts(x: Any, parts: int) -> Any:
    """Returns x, or if it is a part of the sequence, a tensor with the shape of all parts.

    Only the model's own `forward` gets it, which reads the sequence length from it.
    """
    return x if parts == 1 else x.detach()[:, :1].expand(-1, x.shape[1] * parts, -1)


def _first_tensor(output: Any) -> Tensor:
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first


def _refuse_lost_or_shared(
    model: nn.Module, rules: SplitSpec, blocks: Sequence[Sequence[str]]
) -> None:
    """Raises ValueError if a parameter is on no stage, or is tied across stages."""
    places: dict[str, int] = {}  # prefix of parameter names -> stage
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
                f"{name}: is on no stage; add its module to `first`, `added` or "
                "`last` of the SplitSpec"
            )
        stage = places[owners[0]]
        other, before = stage_of.setdefault(id(parameter), (name, stage))
        if before != stage:
            raise ValueError(
                f"{name}: is tied to {other}, but they are on stages {stage} and {before}, "
                "so the copies would diverge; build the model with "
                "tie_word_embeddings=False, or untie the weights before the split: "
                f"model.{name} = torch.nn.Parameter(model.{name}.detach().clone())"
            )


@torch.no_grad()
def _check(
    model: nn.Module, stages: Sequence[nn.Module], rules: SplitSpec, example: Tensor
) -> None:
    """Raises ValueError if the stages do not compute the model's output for an example."""
    held = nn.ModuleList([model, *stages])
    training = {part: part.training for part in held.modules()}
    held.eval()
    try:
        wanted = _first_tensor(model(example, **rules.settings))
        x = example
        for stage in stages:
            x = stage(x)
    except RuntimeError as error:
        raise ValueError(
            f"the stages of {type(model).__name__} fail: {error}; check which modules are in "
            "first, last and added"
        ) from error
    finally:
        for part, was in training.items():
            part.training = was
    difference = float("inf")
    if x.shape == wanted.shape:
        difference = float((x - wanted).abs().max() / wanted.abs().max())
    if not difference <= _TOLERANCE:
        raise ValueError(
            f"the stages of {type(model).__name__} compute another output than the model (relative "
            f"difference {difference:.1e}); its `forward` computes something between its modules "
            "that must run on one stage only, or its blocks return tuples; see SplitSpec"
        )
