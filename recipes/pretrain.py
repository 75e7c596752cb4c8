"""The command `parallel3d-train`, which also runs as a worker of torchrun or srun. Its commands on
existing runs are in `evaluate`.

Recipes are checked here, before local workers start and before torch is imported. Only callbacks
and models from outside this project (`module:Class`, transformers) import torch earlier."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import parallel3d
from parallel3d import recipes
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import fit_to_workers, product
from parallel3d.config.schema import recipe_schema
from parallel3d.errors import ClusterError, ConfigError, CtrlCError, PreemptedError, printable
from parallel3d.launch.failure import Failure, end_process, print_error, writing_output
from parallel3d.launch.local import launch_local
from parallel3d.launch.peer_monitor import ReportedError
from parallel3d.launch.provenance import user_command
from parallel3d.launch.rendezvous import Rendezvous, join_attempt, was_requeued
from parallel3d.launch.run_dir import RunOutcome, check_compiler, check_run_dir
from parallel3d.launch.run_lock import locked
from parallel3d.launch.signals import SAVE_SIGNAL, handled
from parallel3d.models import check_model
from parallel3d.recipes import Job, evaluate, named_recipe, shipped_recipes
from parallel3d.recipes.deepspeed import from_deepspeed
from parallel3d.recipes.range_test import range_test_settings
from parallel3d.tools.arguments import Parser, add_recipe
from parallel3d.tools.cli_output import exit_status

# A layout with more workers is for a cluster and was started without a launcher by mistake.
_MOST_LOCAL_WORKERS = 256
# Modules imported once, in the fork server of the local workers. Eager code also needs parts of the
# compiler, whose import would otherwise take half a second in every worker.
_PRELOAD = ("torch", "torch._dynamo", "parallel3d.training.worker", "parallel3d.models.llama")
_RESUME = "checkpoint.resume="
_USAGE = """\
%(prog)s [options] RECIPE [key=value ...]
       %(prog)s {range-test,evaluate,generate,replay} ...
"""
_DESCRIPTION = """\
Trains a model as described by a recipe. Starts one local worker per device of the layout. Under
torchrun or srun it runs as one of the workers.
"""
_RANGE_TEST = """\
Finds a learning rate. Trains a recipe for 100 steps while the learning rate rises from 1e-6 to 1,
prints the loss at each rate, and suggests a peak learning rate.
"""
_RANGE_TEST_EPILOG = """\
examples:
  parallel3d-train range-test quickstart
  parallel3d-train range-test my.yaml train.steps=200 optimizer.lr=0.1
"""
_EPILOG = """\
examples:
  parallel3d-train quickstart
  parallel3d-train quickstart train.steps=50 optimizer.lr=1e-3
  parallel3d-train my.yaml checkpoint.resume=auto
  parallel3d-train --from-deepspeed ds.json > my.yaml
  torchrun --nproc-per-node 8 -m parallel3d.recipes.pretrain my.yaml

commands, each with its own --help:
  range-test RECIPE    find a learning rate
  evaluate RUN         compute the validation loss of the newest checkpoint of a run
  generate RUN         generate text with the newest checkpoint of a run
  replay RUN SINK      send the metrics of a run to a dashboard

exit status:
    0  done
    2  wrong usage, or a recipe that breaks a rule
   65  data or a checkpoint cannot be read
   69  the workers did not find each other
   70  a rank failed, was killed or hung
   71  the loss or the gradient norm is not finite
   73  a checkpoint or stdout cannot be written, another run uses the folder, or a replay failed
   75  stopped by SIGTERM after saving
  130  stopped by Ctrl-C, after saving if checkpoint.every is set and it was pressed once
  143  stopped by SIGTERM without saving
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    return exit_status(argv, _run)


def _run(arguments: list[str]) -> int:
    is_on_a_run = bool(arguments) and arguments[0] in evaluate.COMMANDS
    options = evaluate.parse(arguments) if is_on_a_run else _parse(arguments)
    if options.command == "replay":
        return evaluate.replay(options)
    if options.command == "print-schema":
        print(json.dumps(recipe_schema(), indent=2))
        return 0
    if options.command == "from-deepspeed":
        return _translate(Path(options.from_deepspeed))
    rendezvous = Rendezvous.from_environment()
    if options.print_config:
        recipe = options.load(options).recipe
        if rendezvous is not None:
            recipe = fit_to_workers(recipe, rendezvous.world_size)
        print(to_yaml(recipe), end="")
        return 0
    with handled((SAVE_SIGNAL,), signal.SIG_IGN):  # nothing can be saved yet
        return _launch(options) if rendezvous is None else _join(options, rendezvous)


def _parse(arguments: list[str]) -> argparse.Namespace:
    is_range_test = arguments[:1] == ["range-test"]
    parser = Parser(
        prog="parallel3d-train range-test" if is_range_test else "parallel3d-train",
        usage=None if is_range_test else _USAGE,
        description=_RANGE_TEST if is_range_test else _DESCRIPTION,
        epilog=_RANGE_TEST_EPILOG if is_range_test else _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser, shipped_recipes())
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the recipe with all defaults as YAML and exit",
    )
    parser.add_argument(
        "--print-schema",
        action="store_true",
        help="print the JSON schema of recipe files, for completion in editors, and exit",
    )
    parser.add_argument(
        "--from-deepspeed",
        metavar="DS.JSON",
        help="translate a DeepSpeed configuration, print the recipe keys as YAML, and exit",
    )
    version = f"parallel3d {parallel3d.__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version and exit"
    )
    options, unknown = parser.parse_known_intermixed_args(arguments[is_range_test:])
    if unknown:
        meant = (
            f"; write {unknown[0].lstrip('-')} to set a key of the recipe"
            if "=" in unknown[0]
            else ""
        )
        parser.error(f"{unknown[0]}: no such option{meant}")
    options.load, options.command_line = _load, arguments
    if options.print_schema:
        options.command = "print-schema"
        return options
    if options.recipe is None and options.from_deepspeed is None:
        parser.error(
            "no RECIPE given; try quickstart, another name that --help lists, or the path of a "
            "YAML file"
        )
    unread = "range-test" if is_range_test else options.recipe
    if unread is not None and options.from_deepspeed is not None:
        parser.error(f"--from-deepspeed cannot be combined with a recipe; remove {unread}")
    if is_range_test:
        options.overrides = [*range_test_settings(options.recipe), *options.overrides]
    options.command = "train" if options.from_deepspeed is None else "from-deepspeed"
    return options


def _load(options: argparse.Namespace) -> Job:
    recipe = named_recipe(options.recipe, options.overrides)
    return Job(recipe, arguments=(user_command(options.command_line),))


def _translate(path: Path) -> int:
    """Prints recipe keys to stdout, and a report on each DeepSpeed key to stderr. Returns the exit
    status."""
    found = from_deepspeed(path)
    print(printable("\n".join(found.lines())), file=sys.stderr)
    print(found.to_yaml(), end="")
    return ConfigError.exit_status if found.refused else 0


def _launch(options: argparse.Namespace) -> int:
    """Starts the workers on this machine. Returns the exit status."""
    job: Job = options.load(options)
    job = _restarted(job) if was_requeued() else job
    recipe = job.recipe
    world_size = recipe.parallel.world_size
    if world_size > _MOST_LOCAL_WORKERS:
        raise ConfigError(
            f"the layout needs {product(recipe.parallel.axes)} workers, but one machine starts at "
            f"most {_MOST_LOCAL_WORKERS}; start them with torchrun on each machine, or use a "
            "smaller layout"
        )
    check_model(recipe)
    notes = _check(job, world_size)
    with _folder_of(job, notes):
        target = f"parallel3d.recipes:{job.function}"
        status = launch_local(
            target,
            recipe,
            world_size,
            arguments=job.arguments,
            preload=_PRELOAD,
            verbose=options.verbose,
        )
        if (
            status in (PreemptedError.exit_status, CtrlCError.exit_status)
            and recipe.checkpoint.every is not None
        ):
            kept = [word for word in options.command_line if not word.startswith(_RESUME)]
            command = shlex.join(["parallel3d-train", *kept, f"{_RESUME}auto"])
            print(f"resume with: {command}", file=sys.stderr)
    return status


def _join(options: argparse.Namespace, rendezvous: Rendezvous) -> int:
    """Runs this process as one rank and returns the exit status. All ranks find the same errors in
    a recipe, so only rank 0 prints them."""
    speaks = rendezvous.rank == 0
    try:
        job: Job = options.load(options)
        job = replace(job, recipe=fit_to_workers(job.recipe, rendezvous.world_size))
        check_model(job.recipe)
        rendezvous = join_attempt(rendezvous, job.recipe.train.start_timeout_s)
        job = _restarted(job) if rendezvous.is_restart else job
        recipe = job.recipe
        if speaks:
            # After a restart, memory for 0 ranks: the run fitted before, and old processes may
            # still be ending.
            notes = _check(job, 0 if rendezvous.is_restart else rendezvous.local_world_size)
    except ConfigError as error:
        if speaks:
            raise
        return error.exit_status
    with _folder_of(job, notes) if speaks else nullcontext():
        work = partial(getattr(recipes, job.function), recipe, rendezvous, *job.arguments)
        status, is_left_open = run_rank(work, recipe, rendezvous, verbose=options.verbose)
    if is_left_open:
        end_process(status)
    return status


def run_rank(
    work: Callable[[], None], recipe: Recipe, rendezvous: Rendezvous, *, verbose: bool = False
) -> tuple[int, bool]:
    """Runs `work` and reports how it ended.

    Returns the exit status, and True if a process group is still open. The process must then be
    ended by `end_process`."""
    speaks = rendezvous.rank == 0
    outcome = RunOutcome()
    try:
        with writing_output():
            work()
    except (PreemptedError, ConfigError, ClusterError) as error:  # raised on all ranks
        if speaks:
            print_error(str(error), recipe.run_dir)
        outcome = RunOutcome(exit_status=error.exit_status, reason=str(error))
    except ReportedError as error:  # the process group stays open
        outcome = RunOutcome.of(error.failure)
        if error.is_ours:
            traceback = error.failure.traceback_for_user(verbose=verbose)
            print_error(error.failure.line() + traceback, recipe.run_dir)
            _record_for_torchrun(error)
        if error.is_ours or speaks:
            outcome.write(recipe.run_dir)
        return outcome.exit_status, True
    except (Exception, SystemExit) as error:
        failure = Failure.of(error, rendezvous.rank, recipe)
        outcome = RunOutcome.of(failure)
        traceback = failure.traceback_for_user(verbose=verbose)
        print_error(failure.line() + traceback, recipe.run_dir)
        _record_for_torchrun(error)
    if speaks:
        outcome.write(recipe.run_dir)
    return outcome.exit_status, False


def _restarted(job: Job) -> Job:
    """Returns the job for a restart by the launcher.

    A training job then resumes from the newest checkpoint in the run folder. If there is none, it
    starts as the recipe says."""
    from parallel3d.checkpoint.store import find_checkpoints

    job = replace(job, is_restart=True)
    recipe, resume = job.recipe, job.recipe.checkpoint.resume
    if not job.trains or resume == "auto":
        return job
    if resume != "none" and not find_checkpoints(
        "auto", Path(recipe.run_dir or "") / "checkpoints"
    ):
        return job
    note = (
        "the launcher has restarted this run, which resumes as with checkpoint.resume=auto "
        f"instead of {resume}"
    )
    recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, resume="auto"))
    return replace(job, recipe=recipe, notes=(note,))


def _record_for_torchrun(error: BaseException) -> None:
    """Writes the error to torchrun's error file, if torchrun started this process."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error.__cause__ or error)


def _check(job: Job, local_ranks: int) -> list[str]:
    """Checks the run folder, the host memory for `local_ranks` ranks, the compiler, callbacks, data
    and checkpoints of a job. Returns warnings for the user.

    Only one process of a run calls this, before anything is written."""
    recipe = job.recipe
    if job.trains and not job.is_restart:
        check_run_dir(recipe)
    if job.trains:
        from parallel3d.recipes.host_memory_check import check_host  # imports the planner

        check_host(recipe, local_ranks)
    # These imports are slow (pydantic models, numpy), and --help or a wrong key does not need them.
    from parallel3d.checkpoint.store import (
        check_manifests,
        check_start,
        find_checkpoints,
        find_start,
    )
    from parallel3d.data.corpus import check_data
    from parallel3d.data.evaluation import evaluation_windows
    from parallel3d.training.callbacks import callback_classes

    if recipe.train.compile:
        check_compiler()
    if job.trains:
        callback_classes(recipe)
    train, samples_text = recipe.train, bool(recipe.train.sample_tokens)
    check_data(
        recipe.data, seq_len=train.seq_len, vocab=recipe.model.vocab, samples_text=samples_text
    )
    evaluation_windows(recipe.data, train.seq_len)
    start, resume, notes = recipe.checkpoint.start_from, recipe.checkpoint.resume, list[str]()
    saved = find_checkpoints(resume, Path(recipe.run_dir or "") / "checkpoints")
    check_manifests(saved)
    if start is not None and not saved:
        # a resumed run does not need its initial weights
        notes = check_start(find_start(start)[0], recipe.model)
    return [*job.notes, *notes]


@contextmanager
def _folder_of(job: Job, notes: Sequence[str]) -> Iterator[None]:
    """Context manager that locks the run folder, if a training job has one, prints warnings, and
    writes the report at the end."""
    if not job.trains or job.recipe.run_dir is None:
        yield
        return
    from parallel3d.tools.report.update import reporting  # imports the planner

    folder = Path(job.recipe.run_dir)
    with locked(folder, is_restart=job.is_restart) as notice, reporting(folder):
        for line in filter(None, (*notes, notice)):
            print(f"warning: {printable(line)}", file=sys.stderr, flush=True)
        yield


if __name__ == "__main__":
    sys.exit(main())
