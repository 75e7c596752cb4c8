"""`parallel3d-plan`: the front of the planner's commands. Each is a module of its own, imported when it is asked for.

To add one: a module `parallel3d.tools.plan_<name>` with `main(arguments) -> exit status`, which raises the package's
errors and leaves telling them to this front, and a line in COMMANDS. No torch here or there.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

import parallel3d
from parallel3d.errors import ConfigError, Parallel3dError
from parallel3d.launch.failure import print_error

_PROGRAM = "parallel3d-plan"
_DEFAULT = "recommend"
_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    module: str
    summary: str


COMMANDS = {
    "recommend": Command("parallel3d.tools.plan.recommend", "the best layouts for a model on a cluster (the default)"),
    "memory": Command("parallel3d.tools.plan.memory", "what each device of one layout holds"),
    "verify": Command("parallel3d.tools.verify.command", "one rank trained dry, its memory beside the model's"),
    "timeline": Command("parallel3d.tools.plan.timeline", "simulate and draw a pipeline schedule"),
    "limits": Command("parallel3d.tools.plan.limits", "the smallest cluster, the longest sequence, the largest model"),
    "sweep": Command("parallel3d.tools.plan.sweep", "clusters of several sizes, and the cheapest that is done in time"),
    "score": Command("parallel3d.tools.plan.score", "predict measured runs, and how far off that is"),
    "calibrate": Command("parallel3d.tools.calibrate.command", "measure this machine, for plans of what runs on it"),
    "compare": Command("parallel3d.tools.plan.compare", "a run that was made, beside the plan of its recipe"),
    "hardware": Command("parallel3d.tools.plan.hardware", "the devices known, and the figures and sources of one"),
    "models": Command("parallel3d.tools.plan.models", "the models known, and the parameters of one"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: returns the exit status."""
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
    status = import_module(COMMANDS[name].module).main(words[1:])
    sys.stdout.flush()
    return int(status)


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
