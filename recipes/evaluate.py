"""Commands that read the folder of a run: `parallel3d-train evaluate`, `generate`, `replay`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

from parallel3d.config.load import KEYS, load_recipe
from parallel3d.config.recipe import Recipe, SinkName
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError, SinkError
from parallel3d.launch.run_lock import locked
from parallel3d.models import shape_cards
from parallel3d.recipes import Job
from parallel3d.reporting.sinks import SINKS, SinkRun, cause_of
from parallel3d.tools.arguments import Parser

_DESCRIPTIONS = {
    "evaluate": "Computes the validation loss and perplexity of the newest checkpoint of a run.",
    "generate": "Generates text with the newest checkpoint of a run.",
    "replay": "Sends all lines of metrics.jsonl of a run to a dashboard, as a new run there.",
}
COMMANDS = tuple(_DESCRIPTIONS)
_EXAMPLES = {
    "evaluate": [
        "runs/quickstart",
        "runs/quickstart --json parallel.tp=1 parallel.pp=1 parallel.dp_shard=1",
    ],
    "generate": [
        "runs/quickstart --prompt 'class '",
        "runs/quickstart --tokens 50 --top-k 5 --temperature 0.8",
    ],
    "replay": ["runs/quickstart tensorboard", "runs/quickstart wandb logging.project=mine"],
}
_SAMPLING = {  # option of `generate` -> key of the recipe, help text
    "--prompt": ("train.sample_prompt", "prompt of the text (default: train.sample_prompt)"),
    "--tokens": ("train.sample_tokens", "maximum number of tokens to generate (default: 200)"),
    "--top-k": (
        "train.sample_top_k",
        "number of most likely tokens to draw from; 1: greedy (default: train.sample_top_k)",
    ),
    "--temperature": (
        "train.sample_temperature",
        "sampling temperature; below 1 favors likely tokens (default: train.sample_temperature)",
    ),
    "--seed": ("train.sample_seed", "seed for drawing tokens (default: train.sample_seed)"),
}
# Prefixes of keys that do not affect the model. `evaluate` and `generate` reset them to their
# defaults, and use SGD, which has no optimizer states.
_NOT_READ = (
    "optimizer.",
    "loss_scale.",
    "local_sgd.",
    "checkpoint.",
    "logging.",
    "train.batch_warmup_",
    "train.on_spike",
    "train.spike",
)
_OVERRIDES = [
    f"{name}={shown(key.default)}" for name, key in KEYS.items() if name.startswith(_NOT_READ)
]
_OVERRIDES += [
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "checkpoint.resume=auto",
    "train.sample_tokens=0",
]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line of one of COMMANDS. The result's `load` returns the `Job` of
    `evaluate` or `generate`."""
    command, *rest = arguments
    prog = f"parallel3d-train {command}"
    epilog = "\n".join(["examples:", *(f"  {prog} {example}" for example in _EXAMPLES[command])])
    parser = Parser(
        prog=prog,
        description=_DESCRIPTIONS[command],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder of a run (its run_dir)")
    if command == "replay":
        names = get_args(SinkName)
        parser.add_argument(
            "sink", metavar="SINK", nargs="?", help=f"dashboard to send to: {', '.join(names)}"
        )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="key of the run's recipe to change, and its value",
    )
    if command != "replay":
        parser.add_argument(
            "--step", type=int, help="step of the checkpoint to load (default: the newest)"
        )
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object instead of text"
        )
    for option, (_, words) in _SAMPLING.items() if command == "generate" else ():
        parser.add_argument(option, help=words)
    options = parser.parse_intermixed_args(rest)
    if options.run is None:
        parser.error("no RUN given; use the folder of a run, such as runs/quickstart")
    options.command, options.print_config, options.command_line = command, False, arguments
    options.load = _job
    return options


def _job(options: argparse.Namespace) -> Job:
    # imported late, because --help does not need it
    from parallel3d.checkpoint.store import find_checkpoints

    sampling = []
    if options.command == "generate":
        options.tokens = options.tokens or "200"
        given = {
            key: getattr(options, name[2:].replace("-", "_"))
            for name, (key, _) in _SAMPLING.items()
        }
        sampling = [f"{key}={value}" for key, value in given.items() if value is not None]
    folder = Path(options.run)
    recipe = _recipe_of(folder, [*_OVERRIDES, *sampling, *options.overrides])
    saved = find_checkpoints(recipe.checkpoint.resume, folder / "checkpoints")
    if options.step is not None:
        saved = [path for path in saved if path.name == f"step_{options.step:08d}"]
    if not saved:
        there = [path.name for path in find_checkpoints("auto", folder / "checkpoints")]
        words = f"--step {options.step}: no such checkpoint" if there else "has no checkpoint"
        tries = f"there are {', '.join(there)}" if there else "train with checkpoint.every=100"
        raise ConfigError(f"{folder}: {words}; {tries}")
    # These jobs write nothing to the run folder.
    recipe = replace(
        recipe, run_dir=None, checkpoint=replace(recipe.checkpoint, resume=str(saved[0]))
    )
    return Job(recipe, function="read_saved", arguments=(options.command, options.json))


def replay(options: argparse.Namespace) -> int:
    """Sends the metrics of a run to a sink. Returns the exit status. Raises SinkError if the sink
    fails."""
    if options.sink not in SINKS:
        raise ConfigError(f"SINK = {options.sink}: no such sink; try {' or '.join(SINKS)}")
    folder = Path(options.run)
    run = SinkRun(_recipe_of(folder, options.overrides), folder, resumed_step=0)
    file = folder / "metrics.jsonl"
    if not file.exists():
        raise ConfigError(
            f"{folder}: has no metrics.jsonl, so it is not the folder of a run; try runs/quickstart"
        )
    *whole, _cut_off = file.read_text(errors="replace").split("\n")
    with locked(folder):
        # Start a new run in the dashboard, which this run continues if it is resumed later.
        run.id_file(options.sink).unlink(missing_ok=True)
        try:
            sink = SINKS[options.sink]()
            sink.start(run)
            for line in whole:
                sink.log(json.loads(line))
            sink.finish(succeeded=True)
        except Exception as error:
            raise SinkError(f"{options.sink}: {cause_of(error, options.sink)}") from error
    print(f"sent {len(whole)} lines of {file} to {options.sink}")
    return 0


def _recipe_of(folder: Path, overrides: list[str]) -> Recipe:
    """Returns the recipe of a run, read from its folder, with `key=value` overrides."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder}: has no config.yaml, so it is not the folder of a run; try runs/quickstart"
        )
    return load_recipe(folder / "config.yaml", overrides, cards=shape_cards())
