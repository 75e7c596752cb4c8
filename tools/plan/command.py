"""`parallel3d-plan`: its subcommands, and the front that reads the command line, prints the answer and tells errors.

Each subcommand is a module of its own, which is imported, and the planner with it, once the options are known to be
right. To add one: a module with `answer(options: argparse.Namespace) -> Reply`, which raises this package's errors and
imports no torch at its top; a function in options.py; and an entry in COMMANDS.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

import parallel3d
from parallel3d.errors import ConfigError, Parallel3dError
from parallel3d.launch.failure import print_error
from parallel3d.tools.arguments import Parser
from parallel3d.tools.plan import options

_PROGRAM = "parallel3d-plan"
_DEFAULT = "recommend"
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. `module` has `answer(options) -> Reply`; `summary` is its line in the list of all subcommands; the
    rest is its own --help, with argparse's usage line where `takes` is None."""

    module: str
    summary: str
    does: str
    epilog: str
    add_options: Callable[[Parser], object]
    takes: str | None = None

    def parser(self, name: str) -> Parser:
        """Returns the parser of all options, --json among them."""
        parser = Parser(
            prog=f"parallel3d-plan {name}",
            usage=self.takes and f"parallel3d-plan {name} {self.takes}",
            description=self.does,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
        self.add_options(parser)
        return parser


COMMANDS = {
    "recommend": Command(
        module="parallel3d.tools.plan.recommend",
        summary="the best layouts for a model on a cluster (the default)",
        takes="--model X --gpu NAME --gpus N --seq-len N --global-batch N [options]",
        does="The best layouts for a model on a cluster: what fits, how fast, how long, how much, and why. "
        "`recommend` may be left out.",
        add_options=options.recommend_options,
        epilog="""\
examples:
  parallel3d-plan --model llama3-70b --gpu h100 --gpus 512 --seq-len 8192 --global-batch 1024
  parallel3d-plan --model config.json --gpu a100 --gpus 64 --seq-len 4096 --global-batch 512 --why tp=8,pp=2
  parallel3d-plan --model my.yaml --gpu h100 --network-gb-per-s 400Gbps --tokens 2T --price 2.5
  parallel3d-plan --model llama3-8b --gpu h100 --gpus 16 --seq-len 8192 --global-batch 512 \\
      --emit-recipe plan.yaml --emit-launch slurm

columns: vs stages on each rank, dp s x r data ranks (sharded x replicated), mb microbatch
exit status: 0 done, 2 a bad input, 3 nothing fits (the page then says what would)
docs/plan.md lists the keys of --json and explains the columns
""",
    ),
    "memory": Command(
        module="parallel3d.tools.plan.memory",
        summary="what each device of one layout holds",
        takes="--model X --gpu NAME [--layout tp=8,pp=2] --seq-len N --global-batch N [options]",
        does="The memory of one layout: every pipeline rank, by kind.",
        add_options=options.memory_options,
        epilog="""\
examples:
  parallel3d-plan memory --model llama3-70b --gpu h100 --layout tp=8,pp=4,dp_shard=16 --seq-len 8192 --global-batch 1024
  parallel3d-plan memory --model my.yaml --gpu a100 --explain

GiB on each device at its peak. recompute=, microbatch_size=, virtual_stages= and schedule= are keys of --layout too.
exit status: 0 it fits, 2 a bad input, 3 it does not fit
""",
    ),
    "verify": Command(
        module="parallel3d.tools.verify.command",
        summary="one rank trained dry, its memory beside the model's",
        takes="RECIPE [key=value ...] [--rank R | --pipeline-rank P] [--json]",
        does="One rank of a recipe, trained dry: its memory beside the memory model's.",
        add_options=options.verify_options,
        epilog="""\
examples:
  parallel3d-plan verify quickstart
  parallel3d-plan verify my.yaml parallel.pp=16 parallel.dp_shard=64 --pipeline-rank 15
  parallel3d-plan verify my.yaml --rank 4097 --json

Without --rank the pipeline rank that the memory model finds fullest is run. train.device = cpu: the CPU's operators;
else a GPU's. What a GPU takes beyond tensors (CUDA, NCCL, kernels' own workspaces, the allocator's fragmentation) is
in neither column. docs/verify.md says how it is done.
exit status: 0 done, 2 a bad input
""",
    ),
    "timeline": Command(
        module="parallel3d.tools.plan.timeline",
        summary="simulate and draw a pipeline schedule",
        does="Simulates a pipeline schedule and draws it. Times are a stage's for a microbatch, in any unit.",
        add_options=options.timeline_options,
        epilog="""\
examples:
  parallel3d-plan timeline --schedule 1f1b --pp 4 --microbatches 8
  parallel3d-plan timeline --schedule interleaved_1f1b --pp 4 --virtual-stages 2 --microbatches 8 --svg timeline.svg
  parallel3d-plan timeline --schedule zb_v --pp 8 --microbatches 32 --forward 1 --split 1.1 0.8 --json
  parallel3d-plan timeline --schedule-file mine.csv
""",
    ),
    "limits": Command(
        module="parallel3d.tools.plan.limits",
        summary="the smallest cluster, the longest sequence, the largest model",
        takes="[cluster|sequence|batch|model] --model X --gpu NAME --gpus N --seq-len N --global-batch N [options]",
        does="How far it goes: the smallest cluster, the longest sequence, the largest batch and model.",
        add_options=options.limits_options,
        epilog="""\
examples:
  parallel3d-plan limits cluster --model llama3-70b --gpu h100 --seq-len 8192 --global-batch 1024 --tokens 2T
  parallel3d-plan limits sequence --model llama3-8b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 512
  parallel3d-plan limits --model llama3-8b --gpu l4 --gpus 8 --seq-len 2048 --global-batch 64 --fix recompute=none

cluster   the fewest devices that hold the model, with its best layout there (no --gpus needed)
sequence  the longest that fits, to a 16th of the last doubling
batch     the most sequences at once; a larger batch fits as several microbatches
model     the largest of this kind (layers grow with the width), and the largest that has a name
exit status: 0 done, 2 a bad input, 3 something that was asked has no answer
""",
    ),
    "sweep": Command(
        module="parallel3d.tools.plan.sweep",
        summary="clusters of several sizes, and the cheapest that is done in time",
        takes="--model X --gpu NAME --gpus N,N,... --seq-len N --global-batch N [options]",
        does="The best layout on each of several numbers of devices, and what the larger ones cost.",
        add_options=options.sweep_options,
        epilog="""\
examples:
  parallel3d-plan sweep --model llama3-70b --gpu h100 --gpus 64-1024 --seq-len 8192 --global-batch 1024
  parallel3d-plan sweep --model llama3-8b --gpu a100 --gpus 16,24,32,64 --seq-len 4096 --global-batch 512 \\
      --tokens 1T --max-days 30 --price 1.8

columns: vs stages on each rank, dp s x r data ranks (sharded x replicated), mb microbatch, scaling: tokens/s of a
device, over those on the fewest
exit status: 0 done, 2 a bad input, 3 no size fits, or none is done within --max-days
""",
    ),
    "score": Command(
        module="parallel3d.tools.plan.score",
        summary="predict measured runs, and how far off that is",
        does="Predicts measured runs (the format of tools/cases/README.md) and prints how far off that is.",
        add_options=options.score_options,
        epilog="""\
examples:
  parallel3d-plan score tools/cases/published.json
  parallel3d-plan score mine.json --hardware my-clusters/ --json

exit status: 0 done, 2 a file that is none
docs/planner.md says how each figure is predicted, docs/plan.md lists the keys of --json
""",
    ),
    "calibrate": Command(
        module="parallel3d.tools.calibrate.command",
        summary="measure this machine, for plans of what runs on it",
        does="Measures this very machine and writes it as a hardware file.",
        add_options=options.calibrate_options,
        epilog="""\
examples:
  parallel3d-plan calibrate -o mine.yaml
  parallel3d-plan calibrate -o mine.yaml --check
  torchrun --nproc-per-node 8 -m parallel3d.tools.plan calibrate -o node.yaml
  parallel3d-plan --model my.yaml --hardware mine.yaml --gpus 4

Products, attention and norms by size, collectives and messages by size and ranks, and short runs of the trainer itself:
about three minutes on an idle machine. What other programs do meanwhile is in the figures. --check then trains eight
layouts of another model and prints what the file predicts beside what they took.

exit status: 0 done, 2 a bad input, 70 a worker failed
docs/planner.md says what is measured and how a step is priced by it
""",
    ),
    "compare": Command(
        module="parallel3d.tools.plan.compare",
        summary="a run that was made, beside the plan of its recipe",
        takes="RUN_DIR (--gpu NAME | --hardware FILE) [--json]",
        does="A run that was made, beside the plan of its recipe.",
        add_options=options.compare_options,
        epilog="""\
examples:
  parallel3d-plan compare runs/quickstart --hardware mine.yaml     # of parallel3d-plan calibrate -o mine.yaml
  parallel3d-plan compare runs/llama3-8b --gpu h100

measured: the median of the lines of metrics.jsonl but the first, which has the start in it, and those of a batch that
still grows
exit status: 0 done, 2 a bad input, 65 a run folder that cannot be read
""",
    ),
    "hardware": Command(
        module="parallel3d.tools.plan.hardware",
        summary="the devices known, and the figures and sources of one",
        takes="[NAME] [--json]",
        does="Lists the devices and clusters that the planner knows, or shows one's file with its sources.",
        add_options=options.hardware_options,
        epilog="""\
examples:
  parallel3d-plan hardware
  parallel3d-plan hardware h100
  parallel3d-plan hardware h100 > mine.yaml    # then --hardware mine.yaml
  parallel3d-plan hardware meta-24k-roce       # a cluster: its network, and the name of its device

A device's file has its usual nodes and network; --gpus-per-node, --node-gb-per-s and --network-gb-per-s change those.
docs/planner.md says what each key means.
""",
    ),
    "models": Command(
        module="parallel3d.tools.plan.models",
        summary="the models known, and the parameters of one",
        takes="[MODEL] [--json]",
        does="Lists the models that --model knows by name, or counts the parameters of one.",
        add_options=options.models_options,
        epilog="""\
examples:
  parallel3d-plan models
  parallel3d-plan models llama3-70b
  parallel3d-plan models path/to/config.json
""",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except Parallel3dError as error:
        print_error(str(error))
        if {"-v", "--verbose"} & set(arguments):
            traceback.print_exc()
        return error.exit_status
    except BrokenPipeError:  # the reader of a pipe has gone, such as `| head`; nothing is to be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: list[str]) -> int:
    words = [word for word in arguments if word not in ("-v", "--verbose")]
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if name == "--version":
        print(f"parallel3d {parallel3d.__version__}")
        return 0
    if name.startswith("-"):
        name, words = _DEFAULT, [_DEFAULT, *words]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}"
        said = f"{name}: no such command" if name else "no command is given"
        raise ConfigError(f"{said}; {advice}; see {_PROGRAM} --help")
    command = COMMANDS[name]
    asked = command.parser(name).parse_intermixed_args(words[1:])
    reply = import_module(command.module).answer(asked)
    for line in [json.dumps(reply.tree())] if asked.json and reply.tree else reply.page():
        print(line)
    sys.stdout.flush()
    return int(reply.status)


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return f"""\
usage: {_PROGRAM} [-h] [-v] [--version] [COMMAND] ...

Plans a run before it is started, without torch and without a GPU. Without a COMMAND it recommends a layout:

  {_PROGRAM} --model llama3-70b --gpu h100 --gpus 512 --seq-len 8192 --global-batch 1024

commands:
{commands}

options:
  -h, --help     show this text; {_PROGRAM} COMMAND --help shows a command's own
  -v, --verbose  show tracebacks of errors that have a message
  --version      show the version

exit status:
  0   done
  2   usage, or a layout that breaks a rule
  3   nothing fits
  65  data that cannot be read
  70  a worker of calibrate failed
"""
