"""The work of `parallel3d-plan recommend`: the strategy for a model on a cluster, explained and ready to run."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from parallel3d.tools.plan.accuracy import recorded_accuracy
from parallel3d.tools.plan.devices import larger_devices
from parallel3d.tools.plan.emit import emit_recipe, recipe_of_plan
from parallel3d.tools.plan.launch import emit_launch, launch_file, start_command
from parallel3d.tools.plan.memory import explained
from parallel3d.tools.plan.question import ParsedQuestion, read_fixed, read_layout, read_question, with_fixed

NOTHING_FITS = 3
_TOP = 10


def answer(options: argparse.Namespace) -> int:
    """Prints the plan and writes what was asked for; returns the exit status."""
    asked = read_question(options, gpus=options.gpus)
    fixed = read_fixed(options)
    question = with_fixed(asked.question, fixed)
    plan = _plan(options, question)
    plan = replace(plan, notes=asked.model.notes)
    plan = replace(plan, commands=tuple(_emit(options, asked, plan)))
    if options.html is not None:
        _write_html(options.html, plan)
    if options.json:
        print(json.dumps(to_json(plan)))
    else:
        print(page(plan, bold=_bold()), end="")
        if options.explain and plan.best is not None:
            print("\n" + "\n".join(explained(question, plan.best.parallel, whole=True)))
    return 0 if plan.best is not None else NOTHING_FITS


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
    """A search makes a million objects and no cycles; to look for some takes a twentieth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _remedies(question: Question, answer: Answer) -> Sequence[str]:
    """What would fit: fewer constraints first, then more devices, shorter sequences, larger devices."""
    found = []
    if question.fixed.recompute not in (None, "full"):
        leaner = fastest(replace(question, fixed=replace(question.fixed, recompute="full")))
        if leaner:
            found.append(f"recompute=full in the place of {question.fixed.recompute}")
    found += list(remedies(question))
    needed = (answer.rejected[0].short_bytes + question.usable_bytes) / question.memory_fraction
    larger = larger_devices(needed)
    if larger:
        found.append(f"devices of {needed / GIB:.0f} GiB or more: {', '.join(larger)}")
    return found


def _emit(options: argparse.Namespace, asked: ParsedQuestion, plan: Plan) -> Sequence[str]:
    """Writes the files, and says what to type next."""
    best = plan.best
    if best is None:
        return []
    if options.emit_recipe is None:
        return [] if asked.model.recipe is None else [_override_command(asked, plan)]
    emit_recipe(options.emit_recipe, asked, plan)
    if options.emit_launch is None:
        return [f"parallel3d-train {shlex.quote(str(options.emit_recipe))} --print-config"]
    kind, *said = options.emit_launch
    file = launch_file(kind, options.emit_recipe, said)
    written = emit_launch(kind, file, options.emit_recipe, plan.question, best)
    return [start_command(kind, written, options.emit_recipe, plan.question, best)]


def _write_html(path: Path, plan: Plan) -> None:
    from parallel3d.planner.report.html import html_page  # what only --html needs

    try:
        path.write_text(html_page(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written ({error.strerror}); try another path") from error


def _override_command(asked: ParsedQuestion, plan: Plan) -> str:
    """The user's recipe, with what the plan has otherwise."""
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
