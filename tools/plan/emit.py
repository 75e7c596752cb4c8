"""Output of a plan: a recipe with comments, its launch script, and the commands to run next."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.config.yaml_text import dump_yaml, shown
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.model.named import card_config
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.report.page import Plan, memory_text, si, time_text
from parallel3d.planner.search.request import Strategy
from parallel3d.tools.cli_output import check_free, write_output
from parallel3d.tools.launch.script import LAUNCHERS, Launcher
from parallel3d.tools.plan.framework_command import framework_command
from parallel3d.tools.plan.inputs import USUAL, ParsedRequest

_TRIAL_STEPS = 100  # Number of steps if --tokens is not given.


def launch_file(options: argparse.Namespace) -> Path | None:
    """Returns the path of the launch script, by default next to the recipe, or None if none was
    requested.

    Raises ConfigError if an output path already exists, or if options contradict each other.
    """
    file = None
    if _priced_only(options) and (options.emit_recipe or options.verify):
        raise ConfigError(
            "--emit-recipe, --verify: the trainer supports neither fp8 nor 8-bit optimizer "
            "states; try --precision bf16 --optimizer-bits 16"
        )
    check_free("--emit-recipe", options.emit_recipe)
    if options.emit_recipe is None and options.emit_launch is not None:
        raise ConfigError("--emit-launch: needs a recipe; add --emit-recipe plan.yaml")
    if options.emit_launch is not None:
        kind, *said = options.emit_launch
        if kind not in LAUNCHERS or len(said) > 1:
            words = " ".join(options.emit_launch)
            known = ", ".join(LAUNCHERS)
            raise ConfigError(
                f"--emit-launch {words}: must be one of {known}, and optionally a file"
            )
        file = Path(said[0]) if said else options.emit_recipe.with_name(LAUNCHERS[kind][0])
    check_free("--emit-launch", file)
    if file is not None and file.resolve() == options.emit_recipe.resolve():
        raise ConfigError(f"{file.name}: is the path of two outputs; rename one")
    return file


def _priced_only(options: argparse.Namespace) -> bool:
    """Returns True if the options ask for features that only the planner supports."""
    return options.precision == "fp8" or options.optimizer_bits == 8


def emit(
    options: argparse.Namespace, asked: ParsedRequest, plan: Plan, launch: Path | None
) -> Iterator[str]:
    """Writes the recipe of the best layout and its launch script, and yields the commands to run
    next.

    Raises:
        ConfigError: The trainer or framework does not support the plan, or the devices do not fill
            their nodes.
    """
    best = plan.best
    path = options.emit_recipe
    if best is None:
        return
    if options.emit_command:
        yield framework_command(best, asked.model, _steps(plan))
    if path is None:
        is_trained = plan.request.framework.is_parallel3d and not _priced_only(options)
        if asked.model.recipe is not None and is_trained:
            yield _override_command(
                asked, asked.model.recipe, recipe_of_plan(asked, plan, best, run="plan")
            )
        return
    recipe = recipe_of_plan(asked, plan, best, run=path.stem)
    validate(recipe)
    lines = _lines(recipe, asked, plan, best)
    write_output("--emit-recipe", path, "".join(f"{line}\n" for line in lines))
    if recipe.data == DataConfig():
        yield f"# set data: in {path}; its stand-in is Python's standard library"
    if launch is None:
        yield f"parallel3d-train {shlex.quote(str(path))} --print-config"
    else:
        yield _write_launcher(
            options.emit_launch[0], launch, path, recipe, plan.request.cluster.gpus_per_node
        )


def recipe_of_plan(asked: ParsedRequest, plan: Plan, best: Strategy, *, run: str) -> Recipe:
    """Returns the user's recipe, or one of defaults, with the plan's model, batch size and layout.

    Raises ConfigError if the trainer has no module for the model or another framework was planned.
    """
    q = plan.request
    base = asked.model.recipe
    config = asked.model.config
    if not q.framework.is_parallel3d:
        raise ConfigError(
            f"--emit-recipe: not available for {q.framework.name}; omit --framework, or "
            "use --emit-command"
        )
    own = replace(best.parallel, sharding=None)
    parallel = own if own.strategy == best.parallel.strategy else best.parallel
    steps = _steps(plan)
    evaluated = TrainConfig.eval_sequences if base is None else base.train.eval_sequences
    slice_ = parallel.dp * parallel.microbatch_size
    planned: dict[str, Any] = {
        "global_batch_size": q.global_batch_size,
        "seq_len": q.seq_len,
        "precision": q.precision,
        "eval_sequences": ceil(evaluated / slice_) * slice_,
    }
    if base is not None:
        planned["steps"] = base.train.steps if plan.tokens is None else steps
        train = replace(base.train, **planned)
        model = replace(base.model, vocab=q.shape.vocab)
        state_dtype = asked.state_dtype or base.optimizer.state_dtype
        optimizer = replace(base.optimizer, state_dtype=state_dtype)
        return replace(base, model=model, train=train, parallel=parallel, optimizer=optimizer)
    if config is None:
        lacks = f" ({q.shape.lacks_module})" if q.shape.lacks_module else ""
        known = "only for Llama and GPT models; omit it"
        raise ConfigError(
            f"--emit-recipe: the trainer has no module for {q.shape.name}{lacks}, {known}"
        )
    if config.architecture == "gpt":
        config = replace(config, max_positions=max(config.max_positions or 0, q.seq_len))
    # Learning rates of Llama 2 (arXiv 2307.09288, section 2.2).
    is_large = total_parameters(q.shape) > 15e9
    every = warmup_steps = None  # A trial run has no evaluation, checkpoints or warm-up.
    if plan.tokens is not None:
        an_hour = round(3600 / best.cost.step_time_s)
        every = max(1, min(an_hour, steps // 4))
        warmup_steps = min(2000, steps // 10)
    lr = 1.5e-4 if is_large else 3e-4
    return Recipe(
        model=replace(config, vocab=q.shape.vocab),
        train=TrainConfig(steps=steps, eval_every=every, **planned),
        parallel=parallel,
        optimizer=OptimizerConfig(
            lr=lr, warmup_steps=warmup_steps or 0, state_dtype=asked.state_dtype
        ),
        checkpoint=CheckpointConfig(every=every),
        run_dir=f"runs/{run}",
    )


def _steps(plan: Plan) -> int:
    if plan.tokens is None:
        return _TRIAL_STEPS
    return ceil(plan.tokens / (plan.request.global_batch_size * plan.request.seq_len))


def _lines(recipe: Recipe, asked: ParsedRequest, plan: Plan, best: Strategy) -> Iterator[str]:
    """Yields a comment with the predictions, then the recipe as YAML without default values."""
    q = plan.request
    cost = best.cost
    model = shown(q.shape.name)
    device = shown(q.cluster.device.name)
    yield f"# {model} on {q.gpus} x {device}: planned by parallel3d-plan"
    if recipe.data == DataConfig():
        yield "# THE DATA IS A STAND-IN, Python's standard library: set `data:` to your corpus."
    yield f"#   step    {cost.step_time_s:.3g} s: {time_text(cost.parts)}"
    yield f"#   speed   {cost.tokens_per_s_per_gpu:,.0f} tokens/s per device, MFU {cost.mfu:.1%}"
    yield f"#   memory  GiB on pipeline rank {best.memory.rank}: {memory_text(best.memory)}"
    comments = _comments(asked, plan)
    section = ""
    for line in dump_yaml(_differing(recipe, comments)).splitlines():
        key = line.partition(":")[0]
        if not line.startswith(" "):
            section = key
            yield ""
        comment = comments.get(f"{section}.{key.strip()}")
        yield f"{line:<36}# {comment}" if comment else line


def _differing(recipe: Recipe, also: Collection[str]) -> dict[str, Any]:
    """Returns the sections of a recipe without default values.

    Keys in `also`, such as data.source, are always included. A model with a shape card has the
    defaults of the card.
    """
    cards = shape_cards()
    name = recipe.model.name
    usual = asdict(USUAL)
    if name in cards:
        usual["model"] = {**asdict(card_config(name, cards[name])), "name": None}
    found = {}
    for section, value in asdict(recipe).items():
        if isinstance(value, dict):
            value = {
                key: each
                for key, each in value.items()
                if f"{section}.{key}" in also or each != usual[section][key]
            }
        if value not in ({}, None):
            found[section] = value
    return found


def _comments(asked: ParsedRequest, plan: Plan) -> dict[str, str]:
    q = plan.request
    tokens = f"{si(q.global_batch_size * q.seq_len)} tokens"
    found = {"train.global_batch_size": f"sequences: {tokens}"}
    if asked.model.recipe is None:
        if plan.tokens is None:
            found["train.steps"] = f"a trial run: {tokens} per step"
        found["optimizer.lr"] = "from Llama 2 at this size; tune it"
        found["data.source"] = "a stand-in; for your corpus: source: text, path: ..."
    return found


def _write_launcher(
    kind: str, written: Path, path: Path, recipe: Recipe, gpus_per_node: int
) -> str:
    """Writes the launch script of a recipe and returns the command that starts it.

    Raises ConfigError if the devices do not fill their nodes.
    """
    gpus = recipe.parallel.world_size
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        fitting = -(-gpus // gpus_per_node) * gpus_per_node
        raise ConfigError(
            f"--emit-launch: {gpus} GPUs do not fill nodes of {gpus_per_node}; try --gpus {fitting}"
        )
    launcher = Launcher(
        kind=kind, recipe=recipe, said=(str(path),), per_node=per_node, file=written.name
    )
    write_output("--emit-launch", written, launcher.text())
    notes = {"k8s": "    # set its image and claim first"}
    if launcher.nodes > 1:
        notes["torchrun"] = "    # on every node"
    return f"{launcher.start} {shlex.quote(str(written))}{notes.get(kind, '')}"


def _override_command(asked: ParsedRequest, mine: Recipe, planned: Recipe) -> str:
    """Returns the command that trains the user's recipe with the plan's values as overrides."""
    # Do not override parallel.sharding if its value in the recipe implies the same strategy.
    alike = replace(planned.parallel, sharding=mine.parallel.sharding)
    if alike.strategy == planned.parallel.strategy:
        planned = replace(planned, parallel=alike)
    overrides = []
    for section in ("model", "parallel", "train", "optimizer"):
        before = asdict(getattr(mine, section))
        for key, value in asdict(getattr(planned, section)).items():
            if value != before[key]:
                overrides.append(f" {section}.{key}={shown(value)}")
    return f"parallel3d-train {shlex.quote(asked.model.said)}{''.join(overrides)}"
