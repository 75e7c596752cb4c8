"""Builds a model that is not written with parallel3d's layers, for the trainer.

`ExistingModel` is called like a class in `parallel3d.models`. It returns the full model on the meta
device, split over tp by rules. The model keeps its class, forward pass and parameter names. It gets
two attributes that the trainer reads: `split_spec`, the names by which it is split into stages, and
in each module `specs`, which says how the parameters are sharded and initialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel3d.config.hugging_face import with_sizes
from parallel3d.config.import_class import import_class
from parallel3d.config.load import read_options
from parallel3d.config.recipe import BlockRecompute, ModelConfig, Recipe, TpRule
from parallel3d.config.rules import refuse
from parallel3d.convert.apply import plan_modules, split_dims, tensor_parallelize
from parallel3d.convert.check import AFTERWARDS
from parallel3d.convert.families import FAMILIES, rules_of
from parallel3d.convert.pretrained import parameters_on_meta
from parallel3d.convert.rules import (
    Column,
    Divide,
    Enter,
    Replicate,
    Row,
    Rules,
    SplitExperts,
    Style,
    Vocab,
)
from parallel3d.errors import ConfigError
from parallel3d.layers.collectives import outside_graph
from parallel3d.layers.parameter import ParameterSpec
from parallel3d.layers.recompute import recomputed
from parallel3d.mesh import LAYER_AXES, Role
from parallel3d.pipeline.split_model import FAMILIES as STAGE_FAMILIES
from parallel3d.pipeline.split_model import LLAMA, check_stages, spec_of, without_absent
from parallel3d.pipeline.stage import SplitSpec, block_ranges, check_nothing_lost

Constructor = Callable[[], nn.Module]
_FEW_BLOCKS = 2
_MASK_TOLERANCE = 1e-4  # Relative to the largest logit.
_ATTENTION = ("self_attn", "self_attention", "attention", "attn")


@dataclass(frozen=True)
class ExistingModel:
    """Builds a model by its constructor. `construct` gets the `model` section of a recipe."""

    construct: Callable[[ModelConfig], nn.Module]

    def __call__(
        self,
        config: ModelConfig,
        *,
        tp: DeviceMesh | None,
        sequence_parallel: bool,
        recompute: BlockRecompute,
        recompute_every: int,
        device: torch.device | str,
    ) -> nn.Module:
        """Returns the full model on the meta device, split over `tp`. Buffers have values.

        Raises ConfigError if the model cannot be built, split or trained.
        """
        assert str(device) == "meta"
        construct = partial(self.construct, config)
        model = self.on_meta(config)
        names = stage_names(model, config)
        initializers = _initializers(model, construct)
        if tp is not None and tp.size() > 1:
            names = replace(names, sequence_parts=tp.size() if sequence_parallel else 1)
            with _naming("model.tp_rules"):
                rules = tp_rules(model, config, tp.size(), sequence_parallel=sequence_parallel)
                tensor_parallelize(model, tp, rules, check=False)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            path, _, attribute = name.rpartition(".")
            owner: Any = model.get_submodule(path)
            dim = None
            if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard):
                dim = parameter.placements[0].dim
            spec = ParameterSpec(tuple(parameter.shape), dim, initializers[name], uneven=True)
            owner.specs = {**vars(owner).get("specs", {}), attribute: spec}
        model.split_spec = names  # type: ignore[assignment]
        if names.positions is not None:
            hook = partial(_pass_positions, names)
            model.register_forward_pre_hook(hook, with_kwargs=True)
        if recompute != "none":
            _recompute(model, names, recompute, recompute_every)
        return model

    def on_meta(self, config: ModelConfig) -> nn.Module:
        """Returns the unsplit model, with parameters on the meta device."""
        with parameters_on_meta():
            return self.construct(config)

    def block_weights(self, config: ModelConfig) -> float | None:
        """Returns the mean number of weights in the matrices of a block that compute a token.

        Returns None if the model has experts but no number of experts per token.
        """
        model = self.on_meta(config)
        chosen: Any = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
        total = 0
        for weight in model.get_submodule(stage_names(model, config).blocks).parameters():
            if weight.ndim == 3 and chosen is None:
                return None
            if weight.ndim == 3:  # The matrices of all experts.
                total += chosen * weight[0].numel()
            elif weight.ndim == 2:
                total += weight.numel()
        return total / config.layers

    def check(self, recipe: Recipe) -> None:
        """Raises ConfigError if the model cannot be trained in the layout of the recipe."""
        config = recipe.model
        parallel = recipe.parallel
        model = self.on_meta(config)
        names = stage_names(model, config)
        blocks = len([*model.get_submodule(names.blocks).children()])
        faults = []
        if blocks != config.layers:
            faults.append(f"model.layers = {config.layers}: {names.blocks} has {blocks} blocks")
        for name, part in model.named_modules():
            if isinstance(part, nn.Dropout) and part.p > 0:
                faults.append(
                    f"{name}: has dropout {part.p}, whose draws would depend on the layout; set "
                    "it to 0 in model.options"
                )
            elif isinstance(part, nn.modules.batchnorm._BatchNorm):
                faults.append(
                    f"{name}: {type(part).__name__} averages over the batch of one rank, so it "
                    "would depend on the layout; use another norm"
                )
        if config.dropout or config.attention_dropout:
            faults.append("model.dropout: not supported by this architecture; set it to 0")
        for axis, why in LAYER_AXES.items():
            if parallel.axes[axis] > 1:
                faults.append(
                    f"parallel.{axis} = {parallel.axes[axis]}: not supported by this architecture, "
                    f"because {why}; try parallel.{axis}=1"
                )
        refuse([*faults, *_too_few_rows(model, names, recipe)])
        if parallel.recompute != "none":
            _recompute(model, names, parallel.recompute, 1)
        held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        with _naming("model.stages"):
            check_nothing_lost(held, block_ranges([blocks]), names)
        if parallel.tp > 1:
            with _naming("model.tp_rules"):
                rules = tp_rules(
                    model, config, parallel.tp, sequence_parallel=parallel.sequence_parallel
                )
                split_dims(plan_modules(model, rules, parallel.tp))

    def compare(self, recipe: Recipe, mesh: DeviceMesh) -> None:
        """Compares a split copy of the model with the unsplit one, by one forward and backward pass
        of a few tokens. With `data.documents: mask`, checks the masks too. Collective.

        Skips families with built-in rules, unless the recipe sets its own. A Hugging Face model has
        at most `_FEW_BLOCKS` blocks here. Raises ConfigError if an output or a gradient differs.
        """
        config = recipe.model
        tp = mesh[Role.SPLIT_TENSORS]
        family = _family(self.on_meta(config))
        has_tables = family in FAMILIES and family in STAGE_FAMILIES
        is_known = has_tables and not config.tp_rules and config.stages is None
        masks = recipe.data.documents == "mask"
        if is_known and not masks:
            return
        if config.config is not None:
            config = with_sizes(config, layers=min(config.layers, _FEW_BLOCKS))
        with _seeded(torch.Generator().manual_seed(recipe.train.seed)):
            model = self.construct(config).to(mesh.device_type)
        example = (torch.arange(8 * tp.size()) * 7 + 1).view(2, -1) % config.vocab
        example = example.to(mesh.device_type)
        names = stage_names(model, config)
        if masks and names.positions is not None:
            _check_masks(model, names, example)
        if is_known:
            return
        with _naming("model.stages"):
            check_stages(model, names, example)
        if tp.size() == 1:
            return
        with _naming("model.tp_rules"):
            rules = tp_rules(
                model, config, tp.size(), sequence_parallel=recipe.parallel.sequence_parallel
            )
            tensor_parallelize(model, tp, rules, example=example)


def _pass_positions(
    names: SplitSpec,
    model: nn.Module,
    args: Any,
    keywords: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Replaces the argument `documents` by positions that restart in each document.

    From them Hugging Face models make a mask. Stages inherit this hook.
    """
    documents = keywords.pop("documents", None)
    if documents is not None:
        keywords |= {**names.settings, str(names.positions): documents.positions}
    return args, keywords


@torch.no_grad()
def _check_masks(model: nn.Module, names: SplitSpec, example: Tensor) -> None:
    """Raises ConfigError if positions that restart do not separate documents."""
    half = example.shape[1] // 2
    restarted = {
        **names.settings,
        str(names.positions): torch.arange(half, device=example.device).repeat(1, 2),
    }
    alone = model(example[:, half:]).logits
    try:
        packed = model(example, **restarted).logits[:, half:]
    except TypeError:  # The model takes no positions.
        packed = torch.full_like(alone, torch.inf)
    if not (packed - alone).abs().max() <= _MASK_TOLERANCE * alone.abs().max():
        raise ConfigError(
            f"data.documents = mask: {type(model).__name__} does not separate documents by "
            f"{names.positions}; use data.documents=join"
        )


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Converts a ValueError, which the rules under `key` cause, to a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{key}: {str(error).removesuffix(f'. {AFTERWARDS}')}") from error


def _family(model: nn.Module) -> str | None:
    """Returns the `model_type` of a Hugging Face model, or None for another model."""
    return getattr(getattr(model, "config", None), "model_type", None)


def _some_names(modules: set[str]) -> str:
    """Returns the first names of modules as text, the shortest first."""
    names = sorted(modules - {""}, key=lambda name: (name.count("."), name))
    return ", ".join(names[:11]) + (", ..." if len(names) > 11 else "")


def stage_names(model: nn.Module, config: ModelConfig) -> SplitSpec:
    """Returns the module names by which a model is split into stages.

    They are those of `model.stages`, else of the model's family, else of Llama. Names that the
    model lacks are omitted.
    """
    given = config.stages
    modules = {name for name, _ in model.named_modules()}
    if given is not None:
        own = {key: getattr(given, key) for key in ("hidden", "tuples", "added")}
        spec = SplitSpec(given.blocks, given.first, given.last, **own)
    elif _family(model) in STAGE_FAMILIES:
        spec = spec_of(model)
    elif LLAMA.blocks in modules:
        spec = LLAMA  # An attempt, which `compare` checks.
    else:
        raise ConfigError(
            f"model.stages = null: name the modules of {type(model).__name__}, for example "
            "'{blocks: blocks, first: [embed], last: [norm, head]}'; its modules are "
            f"{_some_names(modules)}"
        )
    if spec.blocks not in modules or not any(name in modules for name in spec.last):
        raise ConfigError(
            f"model.stages: the model has no module {spec.blocks} or none of "
            f"{', '.join(spec.last)}; its modules are {_some_names(modules)}"
        )
    return without_absent(model, spec)


def _too_few_rows(model: nn.Module, names: SplitSpec, recipe: Recipe) -> Iterator[str]:
    """Yields a fault for each embedding of IDs or positions that has too few rows."""
    needed = dict.fromkeys(names.added, ("train.seq_len", recipe.train.seq_len))
    needed |= dict.fromkeys(names.first[:1], ("model.vocab", recipe.model.vocab))
    for name, (key, rows) in needed.items():
        embedding: Any = model.get_submodule(name)
        if isinstance(embedding, nn.Embedding):
            has = embedding.num_embeddings - getattr(embedding, "offset", 0)
            if has < rows:
                yield f"{key} = {rows}: {name} has only {has} rows; try {key}={has}"


def tp_rules(model: nn.Module, config: ModelConfig, tp: int, *, sequence_parallel: bool) -> Rules:
    """Returns `model.tp_rules`, else the rules of the model's family, else those of Llama.

    Raises ValueError if no rules are set and the model is not a Hugging Face model.
    """
    if config.tp_rules:
        return {rule.modules: _style(rule) for rule in config.tp_rules}
    family = _family(model)
    if family is None:
        raise ValueError(
            f"none are set, but parallel.tp = {tp}; set a style for each linear layer and embedding"
        )
    # The names of Llama's modules are an attempt, which `compare` checks.
    rules = dict(
        rules_of(
            model,
            sequence_parallel=sequence_parallel,
            family=(family if family in FAMILIES else "llama"),
        )
    )
    if config.vocab % tp == 0:  # The loss reads split logits, so they are not all-gathered.
        for pattern, style in rules.items():
            if isinstance(style, Column) and style.gather_output:
                rules[pattern] = replace(style, gather_output=False)
    return rules


def _style(rule: TpRule) -> Style:
    if rule.style == "column":
        return Column(rule.unit, rule.heads, rule.shared, rule.parts, rule.gather_output)
    if rule.style == "replicate":
        return Replicate(partial_gradient=rule.partial_gradient)
    if rule.style == "enter":
        return Enter(rule.argument) if rule.argument else Enter()
    if rule.style == "divide":
        return Divide(rule.attributes)
    styles: dict[str, Style] = {"row": Row(), "vocab": Vocab(), "experts": SplitExperts()}
    return styles[rule.style]


def _recompute(model: nn.Module, names: SplitSpec, recompute: str, every: int) -> None:
    """Makes every `every`-th block, or its attention if "selective", recompute its activations."""
    for index, block in enumerate(model.get_submodule(names.blocks).children()):
        part: Any = block
        if recompute == "selective":
            found = [child for name, child in block.named_children() if name in _ATTENTION]
            if not found:
                raise ConfigError(
                    "parallel.recompute = selective: the blocks have no module named "
                    f"{', '.join(_ATTENTION)}; try parallel.recompute=full"
                )
            part = found[0]
        if index % every == 0:
            part.compute = part.forward
            part.forward = partial(_recomputed, part)


def _recomputed(part: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `part.compute`, which may be compiled, and recomputes it in the backward pass."""
    return outside_graph(recomputed, partial(part.compute, **kwargs), *args)


def _initializers(model: nn.Module, construct: Constructor) -> Mapping[str, Any]:
    """Returns the initializer of each parameter, by name."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if hasattr(model, "config") and hasattr(model, "initialize_weights"):
        with parameters_on_meta():
            whole = construct()
        return {name: _HuggingFaceInit(whole, name) for name in names}
    values = cache(partial(_values, construct))
    return {name: _ConstructorInit(values, name) for name in names}


@dataclass(frozen=True)
class _HuggingFaceInit:
    """Initializes one parameter as `_init_weights` of a Hugging Face model does.

    `_init_weights` runs for the module of the parameter and for those around it, as in
    `PreTrainedModel.initialize_weights`. All other parameters are on the meta device.
    """

    model: nn.Module = field(repr=False)
    name: str

    def __call__(self, tensor: Tensor, generator: torch.Generator | None) -> None:
        path, _, attribute = self.name.rpartition(".")
        owner = self.model.get_submodule(path)
        before = owner._parameters[attribute]
        owner._parameters[attribute] = nn.Parameter(tensor)
        model: Any = self.model
        try:
            with _seeded(generator):
                while True:
                    model._init_weights(model.get_submodule(path))
                    if not path:
                        break
                    path = path.rpartition(".")[0]
        finally:
            owner._parameters[attribute] = before


@dataclass(frozen=True)
class _ConstructorInit:
    """Initializes one parameter as the constructor of the full model does."""

    values: Callable[[int], dict[str, Tensor]] = field(repr=False)
    name: str
    is_of_model = True  # Requests a generator with the seed of the run.

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.copy_(self.values(generator.initial_seed())[self.name])


def _values(construct: Constructor, seed: int) -> dict[str, Tensor]:
    """Builds the full model on the CPU and returns its parameters by name."""
    with _seeded(torch.Generator().manual_seed(seed)):
        model = construct()
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@contextmanager
def _seeded(generator: torch.Generator | None) -> Iterator[None]:
    """Seeds torch's CPU generator in the `with` block, and restores its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        if generator is not None:
            torch.default_generator.manual_seed(generator.initial_seed())
        yield


def import_model(architecture: str) -> Any:
    """Returns the class that `model.architecture` names as `module:Class`, or an `ExistingModel`.

    A class whose constructor, or that of a base class, has the parameter `tp` builds its own
    parallel layers. Any other is wrapped in an `ExistingModel`. Raises ConfigError if there is no
    such class.
    """
    model_class = import_class("model.architecture", architecture, nn.Module, "torch.nn.Module")
    for base in model_class.mro():
        if "tp" in signature(vars(base).get("__init__", object.__init__)).parameters:
            return model_class
    return ExistingModel(partial(_construct_by_class, model_class))


def _construct_by_class(model_class: type[nn.Module], config: ModelConfig) -> nn.Module:
    """Returns an instance of a user's class.

    If the first parameter of the constructor is annotated with a dataclass, it gets that dataclass
    with the fields `model.options`. Otherwise the options are keyword arguments. Raises ConfigError
    if they do not fit the constructor.
    """
    parameters = [*signature(model_class).parameters]
    try:
        hints = get_type_hints(model_class.__init__)
    except NameError:  # A hint is imported for type checkers only.
        hints = {}
    owner: Any = hints.get(parameters[0]) if parameters else None
    if isinstance(owner, type) and is_dataclass(owner):
        return model_class(read_options(owner, config.options))
    try:
        signature(model_class).bind(**config.options)
    except TypeError as error:
        raise ConfigError(
            f"model.options: {error}; {model_class.__name__} takes {', '.join(parameters)}"
        ) from error
    return model_class(**config.options)
