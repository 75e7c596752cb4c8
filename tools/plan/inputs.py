"""Converts a subcommand's options to a planner request."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Literal

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.hardware.framework import (
    COMPILED_PARALLEL3D,
    FRAMEWORKS,
    PARALLEL3D,
    FrameworkProfile,
    in_precision,
)
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.training import notes, optimizer_memory
from parallel3d.planner.model.uncertainty import memory_spread, safe_share
from parallel3d.planner.report.page import wrapped
from parallel3d.planner.search.goodput import Failures
from parallel3d.planner.search.request import Fixed, PlanRequest
from parallel3d.tools.aliases.layout import read_layout
from parallel3d.tools.aliases.lookup import known_name
from parallel3d.tools.plan.accuracy import recorded_accuracy
from parallel3d.tools.plan.hardware import asked_cluster
from parallel3d.tools.plan.measured import corrected_by_runs
from parallel3d.tools.plan.models import Model, find_model

_RISK = 0.05  # Default of --risk: probability of running out of memory.
_STATE_DTYPES: dict[int | None, Literal["fp32", "bf16"]] = {32: "fp32", 16: "bf16"}
# Recipe with the default of every key, and zeros for required keys.
USUAL = Recipe(
    model=ModelConfig(layers=0, hidden=0, heads=0, ffn_hidden=0, vocab=0),
    train=TrainConfig(steps=0, global_batch_size=0, seq_len=0),
)


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request, with its model as the user gave it."""

    request: PlanRequest
    model: Model
    # Dtype of the optimizer states, from --optimizer-bits. None: not given, or 8 bits.
    state_dtype: Literal["fp32", "bf16"] | None = None

    def note_lines(self) -> list[str]:
        return [line for note in self.model.notes for line in wrapped("note", note)]


def read_request(
    options: argparse.Namespace,
    *,
    gpus: int | None,
    fixed: Fixed | None = None,
    asks: str = "--gpus 64",
) -> ParsedRequest:
    """Converts parsed options to a request.

    Args:
        options: Parsed options of a subcommand.
        gpus: Number of devices. None: that of the recipe.
        fixed: Layout settings that the user fixed. None: none.
        asks: Example of an option that sets the number of devices, for error messages.

    Raises:
        ConfigError: Options are missing, contradict each other, or are not supported by the model,
            device or framework.
    """
    model = find_model(options)
    train = model.recipe.train if model.recipe else None
    devices = gpus or (model.recipe.parallel.world_size if model.recipe else None)
    seq_len = options.seq_len or (train.seq_len if train else None)
    batch = options.global_batch or (train.global_batch_size if train else None)
    if devices is None or seq_len is None or batch is None:
        needed = {asks.partition(" ")[0]: devices, "--seq-len": seq_len, "--global-batch": batch}
        missing = ", ".join(name for name, value in needed.items() if value is None)
        raise ConfigError(f"{missing}: required; try {asks} --seq-len 4096 --global-batch 1024")
    if model.shape.positions == "learned" and seq_len > model.shape.position_rows:
        rows = model.shape.position_rows
        raise ConfigError(
            f"--seq-len {seq_len}: must not exceed the positions of {model.shape.name}; try {rows}"
        )
    cluster = asked_cluster(options)
    precision = options.precision or (train.precision if train else "bf16")
    if precision == "fp8" and precision not in cluster.device.peak_flops:
        rule = f"{cluster.device.name} does not support fp8 matmuls; try --precision bf16"
        raise ConfigError(f"--precision fp8: {rule}")
    framework = _framework(options, cluster, precision, compiled=bool(train and train.compile))
    config = model.recipe.model if model.recipe else model.config
    if framework.is_parallel3d and config and config.architecture == "transformers":
        framework = replace(framework, axes=())  # Its attention sees only the tokens of its rank.
    request = PlanRequest(
        shape=model.shape,
        cluster=cluster,
        gpus=devices,
        seq_len=seq_len,
        global_batch_size=batch,
        precision=precision,
        framework=framework,
        fixed=fixed or Fixed(),
        failures=_failures(options),
        training=optimizer_memory(
            model.recipe or USUAL, precision=precision, state_bits=options.optimizer_bits
        ),
        imbalance=options.imbalance,
        recorded=recorded_accuracy(),
    )
    if request.lacks_experts:
        lacks = f"has experts or attention that {framework.name} cannot train"
        raise ConfigError(f"--model {model.shape.name}: {lacks}; try --framework megatron-core")
    request, measured = corrected_by_runs(request, options)
    request = _with_memory_limit(request, options)
    more = [*measured, *(notes(model.recipe) if model.recipe else ())]
    if model.longest is not None and seq_len > model.longest:
        more.append(
            f"sequences of {seq_len} tokens exceed max_position_embeddings = {model.longest} of "
            "config.json"
        )
    return ParsedRequest(
        request=request,
        model=replace(model, notes=(*model.notes, *more)),
        state_dtype=_STATE_DTYPES.get(options.optimizer_bits),
    )


def usual_request(options: argparse.Namespace, *, gpus: int | None) -> PlanRequest:
    """Returns a request that defaults to H100s, sequences of 4,096 tokens and a batch size of 1."""
    usual = {"gpu": None if options.hardware else "h100", "seq_len": 4096, "global_batch": 1}
    said = {name: value for name, value in vars(options).items() if value is not None}
    filled = argparse.Namespace(**{**vars(options), **usual, **said})
    return read_request(filled, gpus=gpus).request


def sequence_bytes(request: PlanRequest) -> float:
    """Returns the activation bytes of one sequence on one device without recompute."""
    alone = replace(request, gpus=1, global_batch_size=1)
    return worst_rank(alone.planned_run(ParallelConfig())).activations


def _failures(options: argparse.Namespace) -> Failures | None:
    names = Failures._fields
    said = {name: value for name, value in vars(options).items() if name in names and value}
    return Failures(**said) if said else None


def read_fixed(options: argparse.Namespace) -> Fixed:
    """Returns the values of --fix, --max-tp, --max-pp and --schedule. Raises ConfigError if --fix
    and --schedule contradict.
    """
    said = read_layout(options.fix, "--fix")
    schedule = said.pop("schedule", options.schedule)
    if options.schedule not in (None, schedule):
        raise ConfigError(
            f"--schedule {options.schedule}: contradicts --fix schedule={schedule}; omit one"
        )
    return Fixed(**said, schedule=schedule, max_tp=options.max_tp, max_pp=options.max_pp)


def _with_memory_limit(request: PlanRequest, options: argparse.Namespace) -> PlanRequest:
    """Returns the request with the memory limit that --mem-fraction or --risk (default: 5%)
    implies.
    """
    if options.mem_fraction is not None:
        if options.risk is not None:
            raise ConfigError("--risk: cannot be combined with --mem-fraction; omit one of them")
        return replace(request, memory_fraction=options.mem_fraction)
    risk = _RISK if options.risk is None else options.risk
    spread = memory_spread(
        request.framework,
        is_mixture=request.shape.experts is not None,
        is_float8=request.precision == "fp8",
        is_corrected=request.framework.name in request.cluster.scales.weighed,
    )
    return replace(request, memory_fraction=min(1.0, round(safe_share(spread, risk), 3)), risk=risk)


def _framework(
    options: argparse.Namespace, cluster: Cluster, precision: str, *, compiled: bool
) -> FrameworkProfile:
    """Returns the framework's profile, adjusted to the precision and the user's memory options."""
    framework = FRAMEWORKS[known_name("framework", options.framework)]
    if framework.is_parallel3d:
        framework = COMPILED_PARALLEL3D if compiled else PARALLEL3D
    else:
        framework = in_precision(framework, precision)
        if options.optimizer_bits is not None:  # AdamW has two states per parameter.
            masters = framework.optimizer_bytes - framework.state_bytes
            states = options.optimizer_bits / 4
            framework = replace(framework, state_bytes=states, optimizer_bytes=masters + states)
    said = {"fragmentation": options.fragmentation, "context_bytes": options.context_memory}
    said = {field: value for field, value in said.items() if value is not None}
    if cluster.device.is_cpu and said:
        rule = "apply to GPUs only; omit them"
        raise ConfigError(f"--fragmentation, --context-memory: {rule}")
    return replace(framework, **said)
