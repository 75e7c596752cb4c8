"""`parallel3d-plan recommend`, the default: its options. The work is in `plan_answer`."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallel3d.errors import ConfigError
from parallel3d.tools.arguments import Parser, plan_parser, whole
from parallel3d.tools.plan.launch import LAUNCHERS, launch_file
from parallel3d.tools.plan.options import add_constraints, add_options
from parallel3d.tools.plan.units import tokens

OBJECTIVES = ("throughput", "memory", "cost")  # `ranking.Objective`
_EPILOG = """\
examples:
  parallel3d-plan --model llama3-70b --gpu h100 --gpus 512 --seq-len 8192 --global-batch 1024
  parallel3d-plan --model config.json --gpu a100 --gpus 64 --seq-len 4096 --global-batch 512 --why tp=8,pp=2
  parallel3d-plan --model my.yaml --gpu h100 --network-gb-per-s 400Gbps --tokens 2T --price 2.5
  parallel3d-plan --model llama3-8b --gpu h100 --gpus 16 --seq-len 8192 --global-batch 512 \\
      --emit-recipe plan.yaml --emit-launch slurm

columns: vs stages on each rank, dp s x r data ranks (sharded x replicated), mb microbatch
exit status: 0 done, 2 a bad input, 3 nothing fits (the page then says what would)
docs/plan.md lists the keys of --json and explains the columns
"""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    _check_files(options)
    from parallel3d.tools.plan.answer import answer  # the planner, which --help and a mistyped option need not wait for

    return answer(options)


def _parser() -> Parser:
    parser = plan_parser(
        "recommend",
        takes="--model X --gpu NAME --gpus N --seq-len N --global-batch N [options]",
        does="The best layouts for a model on a cluster: what fits, how fast, how long, how much, and why. "
        "`recommend` may be left out.",
        epilog=_EPILOG,
    )
    add_options(parser)
    which = parser.add_argument_group("the choice")
    which.add_argument("--objective", choices=OBJECTIVES, default="throughput", help="what is best (throughput)")
    add_constraints(which)
    which.add_argument("--why", metavar="KEY=VALUE", nargs="+", default=[], help="why not this layout? tp=8,pp=2")
    out = parser.add_argument_group("the answer")
    out.add_argument(
        "--top", metavar="K", type=whole, help="strategies, the best of each tp x pp (10; the page shows 5)"
    )
    out.add_argument("--tokens", metavar="N", type=tokens, help="of the whole run, such as 2T: days and price")
    out.add_argument("--explain", action="store_true", help="the winner's memory line by line, every stage")
    out.add_argument("--html", metavar="F", type=Path, help="write the plan as one page with its figures")
    out.add_argument("--emit-recipe", metavar="F", type=Path, help="write the best as a recipe for parallel3d-train")
    out.add_argument(
        "--emit-launch", metavar=("KIND", "F"), nargs="+", help=f"and its launcher: {', '.join(LAUNCHERS)}"
    )
    return parser


def _check_files(options: argparse.Namespace) -> None:
    """What can be refused before the search is."""
    launch, outputs = options.emit_launch, [options.emit_recipe, options.html]
    if launch is not None:
        if launch[0] not in LAUNCHERS or len(launch) > 2:
            raise ConfigError(
                f"--emit-launch {' '.join(launch)}: must be one of {', '.join(LAUNCHERS)}, then a file or none"
            )
        if options.emit_recipe is None:
            raise ConfigError("--emit-launch: starts a recipe; add --emit-recipe plan.yaml")
        outputs.append(launch_file(launch[0], options.emit_recipe, launch[1:]))
    named = [path.resolve() for path in outputs if path is not None]
    for number, path in enumerate(named):
        if path in named[:number]:
            raise ConfigError(f"{path.name}: named for two outputs, and the one would replace the other; rename one")
