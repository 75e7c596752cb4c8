"""`parallel3d-plan recommend`, the default: the best layouts for a model on a cluster, explained and ready to run."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.report.json import to_json
from parallel3d.planner.report.page import Plan, page
from parallel3d.planner.search.fastest import fastest
from parallel3d.planner.search.limits import remedies
from parallel3d.planner.search.question import Answer, Fixed, Question
from parallel3d.planner.search.ranking import compare, rank
from parallel3d.tools.plan.emit_recipe import emit_recipe, recipe_of_plan
from parallel3d.tools.plan.hardware import larger_devices
from parallel3d.tools.plan.inputs import ParsedQuestion, read_fixed, read_layout, read_question, with_fixed
from parallel3d.tools.plan.launch_scripts import LAUNCHERS, launch_text, start_command
from parallel3d.tools.plan.memory import explained
from parallel3d.tools.plan.score import recorded_accuracy
from parallel3d.tools.reply import NOTHING_FITS, Reply, write_output

_TOP = 10


def answer(options: argparse.Namespace) -> Reply:
    """Plans, and writes the files that were asked for."""
    launch = _launch_file(options)
    asked = read_question(options, gpus=options.gpus)
    question = with_fixed(asked.question, read_fixed(options))
    plan = replace(_plan(options, question), notes=asked.model.notes)
    if options.verify:
        from parallel3d.tools.plan.verified import verified  # what only --verify needs

        plan = verified(asked, plan)
    plan = replace(plan, commands=tuple(_emit(options, asked, plan, launch)))
    if options.html is not None:
        from parallel3d.planner.report.html import html_page  # what only --html needs

        write_output("--html", options.html, html_page(plan))

    def lines() -> Iterator[str]:
        yield from page(plan, bold=_bold()).splitlines()
        if options.explain and plan.best is not None:
            yield from ("", *explained(question, plan.best.parallel, whole=True))

    return Reply(page=lines, tree=lambda: to_json(plan), status=NOTHING_FITS if plan.best is None else 0)


def _launch_file(options: argparse.Namespace) -> Path | None:
    """Returns where a launcher is written: as the user said, or beside the recipe. Raises ConfigError for what can be
    refused before the search is made."""
    outputs, file = [options.emit_recipe, options.html], None
    if options.emit_launch is not None:
        kind, *said = options.emit_launch
        if kind not in LAUNCHERS or len(said) > 1:
            raise ConfigError(
                f"--emit-launch {' '.join(options.emit_launch)}: must be one of {', '.join(LAUNCHERS)}, "
                "then a file or none"
            )
        if options.emit_recipe is None:
            raise ConfigError("--emit-launch: starts a recipe; add --emit-recipe plan.yaml")
        file = Path(said[0]) if said else options.emit_recipe.with_name(LAUNCHERS[kind].file)
        outputs.append(file)
    named = [path.resolve() for path in outputs if path is not None]
    for number, path in enumerate(named):
        if path in named[:number]:
            raise ConfigError(f"{path.name}: named for two outputs, and the one would replace the other; rename one")
    return file


def _plan(options: argparse.Namespace, question: Question) -> Plan:
    start = time.perf_counter()
    with _without_collections():
        found = rank(question, options.objective, top=options.top or _TOP)
    seconds = time.perf_counter() - start
    why = None
    if options.why:
        why = compare(question, Fixed(**read_layout(options.why, "--why")), " ".join(options.why))
    return Plan(
        question=question,
        answer=found,
        objective=options.objective,
        seconds=seconds,
        top=options.top,
        tokens=options.tokens,
        why=why,
        remedies=() if found.strategies else tuple(_remedies(question, found)),
        accuracy=recorded_accuracy(),
    )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turns the garbage collector off: a search makes a million objects and no cycles, and looking for cycles takes a
    twentieth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _remedies(question: Question, answer: Answer) -> Iterator[str]:
    """Yields what would fit: fewer constraints first, then more devices, shorter sequences, larger devices."""
    fixed = question.fixed
    if fixed.recompute not in (None, "full") and fastest(replace(question, fixed=replace(fixed, recompute="full"))):
        yield f"recompute=full in the place of {fixed.recompute}"
    yield from remedies(question)
    needed = (answer.rejected[0].short_bytes + question.usable_bytes) / question.memory_fraction
    larger = larger_devices(needed)
    if larger:
        yield f"devices of {needed / GIB:.0f} GiB or more: {', '.join(larger)}"


def _emit(options: argparse.Namespace, asked: ParsedQuestion, plan: Plan, launch: Path | None) -> Iterator[str]:
    """Writes the recipe and its launcher, and yields what to type next."""
    best, recipe = plan.best, options.emit_recipe
    if best is None:
        return
    if recipe is None:
        if asked.model.recipe is not None:
            yield _override_command(asked, plan)
        return
    emit_recipe(recipe, asked, plan)
    if launch is None:
        yield f"parallel3d-train {shlex.quote(str(recipe))} --print-config"
        return
    kind, per_node = options.emit_launch[0], plan.question.cluster.gpus_per_node
    gpus = best.parallel.world_size
    write_output("--emit-launch", launch, launch_text(kind, launch.name, recipe, gpus=gpus, gpus_per_node=per_node))
    yield start_command(kind, launch, recipe, several_nodes=gpus > per_node)


def _override_command(asked: ParsedQuestion, plan: Plan) -> str:
    """Returns the command that trains the user's recipe, with what the plan has otherwise as overrides."""
    assert plan.best is not None and asked.model.recipe is not None
    mine, planned = asked.model.recipe, recipe_of_plan(asked, plan, plan.best, run="plan")
    # What `sharding: null` stands for need not be said.
    is_usual = replace(planned.parallel, sharding=mine.parallel.sharding).strategy == planned.parallel.strategy
    words = {True: "true", False: "false", None: "null"}
    overrides = []
    for section in ("model", "parallel", "train"):
        before = asdict(getattr(mine, section))
        for key, value in asdict(getattr(planned, section)).items():
            if value != before[key] and not (key == "sharding" and is_usual):
                text = words[value] if value is None or isinstance(value, bool) else value
                overrides.append(f" {section}.{key}={text}")
    return f"parallel3d-train {shlex.quote(asked.model.said)}{''.join(overrides)}"


def _bold() -> Callable[[str], str]:
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return str if is_plain else lambda line: f"\033[1m{line}\033[0m"
