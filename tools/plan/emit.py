"""What a plan writes: a recipe, complete and checked, with what led to each choice in a comment, and its launcher."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import CheckpointConfig, DataConfig, OptimizerConfig, Recipe, TrainConfig
from parallel3d.config.rules import can_step_in_backward, validate
from parallel3d.config.yaml_text import dump_yaml, shown
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.model.named import card_config
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.report.page import Plan
from parallel3d.planner.report.text import memory_text, si, time_text
from parallel3d.planner.search.question import Strategy
from parallel3d.tools.launch.script import LAUNCHERS, Launcher
from parallel3d.tools.plan.inputs import ParsedQuestion
from parallel3d.tools.reply import check_free, write_output

_TRIAL_STEPS = 100  # where no token budget is given
_COMMENT_COLUMN = 36


def launch_file(options: argparse.Namespace) -> Path | None:
    """Returns where a launcher is written: as the user said, or beside the recipe. Raises ConfigError for what can be
    refused before the search is made."""
    outputs, file = [options.emit_recipe, options.html], None
    check_free("--emit-recipe", options.emit_recipe)
    check_free("--html", options.html)
    if options.full and options.emit_recipe is None:
        raise ConfigError("--full: writes a recipe with every key; add --emit-recipe plan.yaml")
    if options.emit_launch is not None:
        kind, *said = options.emit_launch
        if kind not in LAUNCHERS or len(said) > 1:
            words = " ".join(options.emit_launch)
            known = ", ".join(LAUNCHERS)
            raise ConfigError(f"--emit-launch {words}: must be one of {known}, then a file or none")
        if options.emit_recipe is None:
            raise ConfigError("--emit-launch: starts a recipe; add --emit-recipe plan.yaml")
        file = Path(said[0]) if said else options.emit_recipe.with_name(LAUNCHERS[kind][0])
        outputs.append(file)
    named = [path.resolve() for path in outputs if path is not None]
    check_free("--emit-launch", file)
    for number, path in enumerate(named):
        if path in named[:number]:
            raise ConfigError(f"{path.name}: named for two outputs, and the one would replace the other; rename one")
    return file


def emit(options: argparse.Namespace, asked: ParsedQuestion, plan: Plan, launch: Path | None) -> Iterator[str]:
    """Writes the best layout's recipe and its launcher, and yields what to type next. Raises ConfigError for a model
    that the trainer does not have, and for devices that a launcher cannot divide into nodes."""
    best, path = plan.best, options.emit_recipe
    if best is None:
        return
    if path is None:
        if asked.model.recipe is not None and plan.question.program.is_parallel3d:
            yield _override_command(asked, asked.model.recipe, recipe_of_plan(asked, plan, best, run="plan"))
        return
    recipe = recipe_of_plan(asked, plan, best, run=path.stem)
    validate(recipe)
    lines = _lines(recipe, asked, plan, best, is_full=options.full)
    write_output("--emit-recipe", path, "".join(f"{line}\n" for line in lines))
    if recipe.data == DataConfig():
        yield f"# set data: in {path} to your corpus; its stand-in is Python's own source"
    if launch is None:
        yield f"parallel3d-train {shlex.quote(str(path))} --print-config"
    else:
        yield _write_launcher(options.emit_launch[0], launch, path, recipe, plan.question.cluster.gpus_per_node)


def recipe_of_plan(asked: ParsedQuestion, plan: Plan, best: Strategy, *, run: str) -> Recipe:
    """Returns the user's own recipe, or the defaults, with the plan's model, batch and layout. Raises ConfigError for a
    model or a program that the trainer does not have."""
    q, base = plan.question, asked.model.recipe
    if not q.program.is_parallel3d:
        raise ConfigError(f"--emit-recipe: the plan is for {q.program.name}; leave out --engine")
    own = replace(best.parallel, sharding=None)
    parallel = own if own.strategy == best.parallel.strategy else best.parallel
    steps = _TRIAL_STEPS if plan.tokens is None else ceil(plan.tokens / (q.global_batch_size * q.seq_len))
    planned: dict[str, Any] = {key: getattr(q, key) for key in ("global_batch_size", "seq_len", "precision")}
    evaluated = TrainConfig.eval_sequences if base is None else base.train.eval_sequences
    slice_ = parallel.dp * parallel.microbatch_size
    planned["eval_sequences"] = ceil(evaluated / slice_) * slice_
    if base is not None:
        train = replace(base.train, **planned, steps=base.train.steps if plan.tokens is None else steps)
        is_early = base.optimizer.step_in_backward and can_step_in_backward(
            parallel, q.global_batch_size, tied_embeddings=q.shape.tied_embeddings
        )
        optimizer = replace(base.optimizer, step_in_backward=is_early)
        model = replace(base.model, vocab=q.shape.vocab)
        return replace(base, model=model, train=train, parallel=parallel, optimizer=optimizer)
    config = asked.model.config
    if config is None:
        what = f"{q.shape.name} ({q.shape.lacks_module})" if q.shape.lacks_module else q.shape.name
        raise ConfigError(f"--emit-recipe: the trainer has no module for {what}, only for Llamas and GPTs; drop it")
    if config.architecture == "gpt":
        config = replace(config, max_positions=max(config.max_positions or 0, q.seq_len))
    large = total_parameters(q.shape) > 15e9  # Llama 2's rates (arXiv 2307.09288, section 2.2)
    warmup_steps = 0 if plan.tokens is None else min(2000, steps // 10)
    # A trial needs none.
    every = None if plan.tokens is None else max(1, min(round(3600 / best.cost.step_time_s), steps // 4))
    return Recipe(
        model=replace(config, vocab=q.shape.vocab),
        train=TrainConfig(steps=steps, eval_every=every, **planned),
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1.5e-4 if large else 3e-4, warmup_steps=warmup_steps),
        checkpoint=CheckpointConfig(every=every),
        run_dir=f"runs/{run}",
    )


def _lines(recipe: Recipe, asked: ParsedQuestion, plan: Plan, best: Strategy, *, is_full: bool) -> Iterator[str]:
    """Yields the recipe's YAML below a comment that says what the plan expects of it: what differs from the defaults
    and what a comment explains, or every key where it `is_full`."""
    q, answer, known = plan.question, plan.answer, plan.accuracy
    model, device = shown(q.shape.name), shown(q.cluster.device.name)
    yield f"# {model} on {q.gpus} x {device}: planned by parallel3d-plan, the best of"
    yield f"# {answer.considered:,} layouts in the order of time, with the memory of {answer.checked:,} of them."
    if recipe.data == DataConfig():
        yield "# THE DATA IS A STAND-IN, Python's own source: set `data:` to your corpus before you train in earnest."
    yield f"#   step    {best.cost.step_time_s:.3g} s: {time_text(best.cost.parts)}"
    yield f"#   speed   {best.cost.tokens_per_s_per_gpu:,.0f} tokens/s a device, MFU {best.cost.mfu:.1%}"
    yield f"#   memory  GiB on pipeline rank {best.memory.rank}: {memory_text(best.memory)}"
    if known is not None:
        speed, memory = known["blind"]["throughput_median"], known["blind"]["memory_median"]
        yield f"#   error   median {speed:.1f}% of speed, {memory:.1f}% of memory on published runs of other programs"
        yield f"#           whose source was left out, scored {known['date']}; parallel3d was never measured on a GPU"
    comments = dict(_comments(recipe, asked, plan, best))
    section = ""
    tree = asdict(recipe) if is_full else differing(recipe, shape_cards(), also=comments)
    for line in dump_yaml(tree).splitlines():
        key = line.partition(":")[0]
        if not line.startswith(" "):
            section = key
            yield ""
        comment = comments.get(f"{section}.{key.strip()}")
        yield f"{line:<{_COMMENT_COLUMN}}# {comment}" if comment else line


def differing(recipe: Recipe, cards: Mapping[str, Path], *, also: Collection[str] = ()) -> dict[str, Any]:
    """Returns the sections of a recipe with the keys whose values are not the defaults (for the model those of the
    shape card that it names), and with the keys of `also`, such as data.source."""
    tree, name = asdict(recipe), recipe.model.name
    if name is not None and name in cards:
        card = asdict(card_config(name, cards[name]))
        tree["model"] = {key: value for key, value in tree["model"].items() if key == "name" or value != card[key]}
    else:
        tree["model"] = _without_defaults(recipe.model, also)
    for section in fields(recipe):
        if is_dataclass(value := getattr(recipe, section.name)) and section.name != "model":
            tree[section.name] = _without_defaults(value, {key.removeprefix(f"{section.name}.") for key in also})
    return {section: value for section, value in tree.items() if value not in ({}, None)}


def _without_defaults(section: Any, also: Collection[str]) -> dict[str, Any]:
    values = asdict(section)
    for key in fields(section):
        usual = key.default if key.default_factory is MISSING else key.default_factory()
        if getattr(section, key.name) == usual and key.name not in also:
            del values[key.name]
    return values


def _comments(recipe: Recipe, asked: ParsedQuestion, plan: Plan, best: Strategy) -> Iterator[tuple[str, str]]:
    """Yields (key, comment): why each choice was made, with its figure."""
    q, parallel, parts, step = plan.question, best.parallel, best.cost.parts, best.cost.step_time_s
    node, tokens = q.cluster.gpus_per_node, q.global_batch_size * q.seq_len
    if parallel.pp > 1:
        bubble, transfers = parts.pp_bubble / step, parts.pp_p2p / step
        yield "parallel.pp", f"its bubble takes {bubble:.1%} of a step, transfers {transfers:.1%}"
    if parallel.tp > 1:
        where = "within a node" if parallel.tp <= node else "across nodes"
        yield "parallel.tp", f"{where} of {node}; its traffic takes {parts.tp / step:.1%} of a step"
    yield "parallel.dp_shard", f"{parts.dp / step:.1%} of a step is data-parallel traffic that nothing hides"
    if parallel.virtual_stages > 1:
        yield "parallel.virtual_stages", "stages on each rank: a smaller bubble for more transfers"
    several = "es" * (recipe.microbatches > 1)
    yield "parallel.microbatch_size", f"sequences; {recipe.microbatches} microbatch{several} a step"
    if parallel.recompute != "none":
        yield "parallel.recompute", f"{parts.recompute / step:.1%} of a step; without it does not fit"
    else:
        share = best.memory.total / q.cluster.device.memory_bytes
        yield "parallel.recompute", f"it fits without: {share:.0%} of a device's memory"
    yield "train.global_batch_size", f"sequences: {si(tokens)} tokens"
    if plan.tokens is not None:
        yield "train.steps", f"{si(plan.tokens)} tokens"
    if asked.model.recipe is None:
        if plan.tokens is None:
            yield "train.steps", f"a trial: a step is {si(tokens)} tokens"
        else:
            yield "checkpoint.every", "steps: about an hour, at most a quarter of the run"
        yield "optimizer.lr", "Llama 2's for this size; yours may differ"
        yield "data.source", "a stand-in that is there everywhere; your corpus: source: text, path: ..."


def _write_launcher(kind: str, written: Path, path: Path, recipe: Recipe, gpus_per_node: int) -> str:
    """Writes the script that starts a recipe, and returns what to type. Raises ConfigError where the devices are not
    whole nodes."""
    gpus = recipe.parallel.world_size
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        fitting = -(-gpus // gpus_per_node) * gpus_per_node
        raise ConfigError(f"--emit-launch: {gpus} GPUs are not whole nodes of {gpus_per_node}; try --gpus {fitting}")
    launcher = Launcher(kind=kind, recipe=recipe, said=(str(path),), per_node=per_node, file=written.name)
    write_output("--emit-launch", written, launcher.text())
    notes = {"k8s": "    # with your image and claim in it; the recipe is in it, too"}
    if launcher.nodes > 1:
        notes["torchrun"] = "    # on every node"
    return f"{launcher.start} {shlex.quote(str(written))}{notes.get(kind, '')}"


def _override_command(asked: ParsedQuestion, mine: Recipe, planned: Recipe) -> str:
    """Returns the command that trains the user's recipe, with what the plan has otherwise as overrides."""
    # What `sharding: null` stands for need not be said.
    if replace(planned.parallel, sharding=mine.parallel.sharding).strategy == planned.parallel.strategy:
        planned = replace(planned, parallel=replace(planned.parallel, sharding=mine.parallel.sharding))
    overrides = []
    for section in ("model", "parallel", "train"):
        before = asdict(getattr(mine, section))
        for key, value in asdict(getattr(planned, section)).items():
            if value != before[key]:
                overrides.append(f" {section}.{key}={shown(value)}")
    return f"parallel3d-train {shlex.quote(asked.model.said)}{''.join(overrides)}"
