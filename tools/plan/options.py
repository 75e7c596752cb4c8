"""The options of every subcommand of parallel3d-plan.

This module imports next to nothing, so that --help and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from parallel3d.schedules.registry import SCHEDULES
from parallel3d.tools.arguments import (
    Parser,
    amount,
    bytes_per_s,
    dollars,
    fraction,
    memory_bytes,
    share,
    tokens,
    whole,
)
from parallel3d.tools.plan.launch_scripts import LAUNCHERS

OBJECTIVES = ("throughput", "memory", "cost")  # the values of `ranking.Objective`
LIMITS = ("cluster", "sequence", "batch", "model")
_PRECISIONS = ("bf16", "fp16", "fp32")
_MOST_SIZES = 32  # sizes that a sweep tries


def _add_question(parser: Parser, *, gpus: bool = True) -> None:
    """Adds the options of a question to the planner: the model, the hardware and the batch."""
    model = parser.add_argument_group("the model")
    model.add_argument("--model", metavar="X", help="a name, such as llama3-8b, a config.json, or a recipe (.yaml)")
    model.add_argument("--layers", metavar="N", type=whole, help="or by hand, with the next three")
    model.add_argument("--hidden", metavar="N", type=whole)
    model.add_argument("--heads", metavar="N", type=whole)
    model.add_argument("--vocab", metavar="N", type=whole)
    model.add_argument("--kv-heads", metavar="N", type=whole, help="(as many as heads)")
    model.add_argument("--ffn-hidden", metavar="N", type=whole, help="(8/3 of hidden; 4 times for gpt)")
    model.add_argument("--kind", choices=("llama", "gpt"), help="of the numbers by hand (llama)")
    where = parser.add_argument_group("the hardware")
    where.add_argument("--gpu", metavar="NAME", help="a device, such as h100: see parallel3d-plan hardware")
    where.add_argument(
        "--hardware", "--cluster", metavar="FILE", help="your own file or a cluster's name, in the place of --gpu"
    )
    if gpus:
        where.add_argument("--gpus", metavar="N", type=whole, help="how many (a recipe's own number by default)")
    where.add_argument("--gpus-per-node", metavar="N", type=whole, help="devices that share the fast links")
    where.add_argument("--node-gb-per-s", metavar="X", type=bytes_per_s, help="of a device's links within the node")
    where.add_argument("--network-gb-per-s", metavar="X", type=bytes_per_s, help="a device's share: 50 or 400Gbps")
    where.add_argument("--gpu-memory", metavar="X", type=memory_bytes, help="that a process can have: 80GB, 75GiB")
    where.add_argument("--mem-fraction", metavar="X", type=fraction, default=0.95, help="of it to use (0.95)")
    where.add_argument(
        "--fragmentation", metavar="X", type=share, help="of what comes and goes, that the allocator has beside (0.04)"
    )
    where.add_argument("--context-memory", metavar="X", type=memory_bytes, help="of CUDA, cuBLAS and NCCL (1.2GB)")
    where.add_argument("--price", metavar="X", type=dollars, help="US dollars for a GPU-hour")
    batch = parser.add_argument_group("the batch")
    batch.add_argument("--seq-len", metavar="N", type=whole, help="tokens of a sequence")
    batch.add_argument("--global-batch", metavar="N", type=whole, help="sequences of a step, over all devices")
    batch.add_argument(
        "--engine",
        metavar="X",
        default="parallel3d",
        help="plan for another program, such as megatron-2021 or torchtitan",
    )
    batch.add_argument("--precision", choices=_PRECISIONS, help="of the arithmetic (bf16, or the recipe's)")


def _add_constraints(group: argparse._ArgumentGroup) -> None:
    """Adds the options by which a user decides parts of the layout."""
    group.add_argument("--fix", metavar="KEY=VALUE", nargs="+", default=[], help="a recipe's parallel keys: tp=8 pp=4")
    group.add_argument("--max-tp", metavar="N", type=whole)
    group.add_argument("--max-pp", metavar="N", type=whole)
    group.add_argument("--schedule", choices=tuple(SCHEDULES), metavar="S", help=f"one of {', '.join(SCHEDULES)}")


def recommend_options(parser: Parser) -> None:
    _add_question(parser)
    which = parser.add_argument_group("the choice")
    which.add_argument("--objective", choices=OBJECTIVES, default="throughput", help="what is best (throughput)")
    _add_constraints(which)
    which.add_argument("--why", metavar="KEY=VALUE", nargs="+", default=[], help="why not this layout? tp=8,pp=2")
    out = parser.add_argument_group("the answer")
    out.add_argument(
        "--top", metavar="K", type=whole, help="strategies, the best of each tp x pp (10; the page shows 5)"
    )
    out.add_argument("--tokens", metavar="N", type=tokens, help="of the whole run, such as 2T: days and price")
    out.add_argument("--explain", action="store_true", help="the winner's memory line by line, every stage")
    out.add_argument("--verify", action="store_true", help="its exact memory, by a dry run (needs torch)")
    out.add_argument("--html", metavar="F", type=Path, help="write the plan as one page with its figures")
    out.add_argument("--emit-recipe", metavar="F", type=Path, help="write the best as a recipe for parallel3d-train")
    out.add_argument(
        "--emit-launch", metavar=("KIND", "F"), nargs="+", help=f"and its launcher: {', '.join(LAUNCHERS)}"
    )


def memory_options(parser: Parser) -> None:
    parser.add_argument("--layout", metavar="KEY=VALUE", nargs="+", help="the axes: tp=8,pp=2 (a recipe's by default)")
    parser.add_argument("--explain", action="store_true", help="how each figure of the fullest rank comes about")
    _add_question(parser, gpus=False)


def verify_options(parser: Parser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="a key of the recipe and its value")
    parser.add_argument("--rank", type=int, metavar="R", help="the rank of the whole job that is run")
    parser.add_argument("--pipeline-rank", type=int, metavar="P", help="or the first rank of this pipeline rank")


def timeline_options(parser: Parser) -> None:
    which = parser.add_argument_group("the schedule")
    which.add_argument("--schedule", metavar="S", help=f"one of {', '.join([*SCHEDULES, 'forward_only'])}")
    which.add_argument("--pp", metavar="P", type=whole, help="pipeline ranks")
    which.add_argument("--microbatches", metavar="M", type=whole, help="microbatches of a step")
    which.add_argument(
        "--virtual-stages",
        metavar="V",
        type=whole,
        help="stages on each rank (default: 2 where it interleaves, else 1)",
    )
    which.add_argument(
        "--schedule-file", metavar="F", type=Path, help="a CSV, in place of the above: a line a rank, cells such as 2F0"
    )
    times = parser.add_argument_group("what it takes")
    time = amount("a time")
    times.add_argument("--forward", metavar="T", type=time, default=1.0, help="a forward (default 1)")
    times.add_argument("--backward", metavar="T", type=time, help="a whole backward (default: both halves)")
    times.add_argument(
        "--split", metavar=("I", "W"), nargs=2, type=time, help="the halves of a backward: input's gradient, weights' "
        "gradient (default: 1 and 1, or half of --backward each)",
    )  # fmt: skip
    times.add_argument("--transfer", metavar="T", type=time, default=0.0, help="from rank to rank (default 0)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--csv", metavar="F", type=Path, help="write the schedule, as torch.distributed.pipelining's CSV"
    )
    output.add_argument("--svg", metavar="F", type=Path, help="write the picture")
    output.add_argument("--trace", metavar="F", type=Path, help="write a trace for ui.perfetto.dev or chrome://tracing")


def limits_options(parser: Parser) -> None:
    parser.add_argument(
        "what", nargs="?", choices=("all", *LIMITS), default="all", metavar="WHAT", help="one of the four (all)"
    )
    parser.add_argument("--tokens", metavar="N", type=tokens, help="of the whole run: days and price on that cluster")
    _add_question(parser)
    _add_constraints(parser.add_argument_group("the layout"))


def sweep_options(parser: Parser) -> None:
    parser.add_argument(
        "--gpus", metavar="N,N,...", type=_sizes, required=True, help="numbers of devices, or 64-1024: doublings"
    )
    parser.add_argument("--tokens", metavar="N", type=tokens, help="of the whole run: days and price of each")
    parser.add_argument(
        "--max-days", metavar="D", type=amount("days", zero=False), help="mark the cheapest that is done in so many"
    )
    _add_question(parser, gpus=False)
    _add_constraints(parser.add_argument_group("the layout"))


def _sizes(text: str) -> tuple[int, ...]:
    """Parses numbers of devices: 16,24,32, or the doublings 64-1024."""
    first, dash, last = text.partition("-")
    parts = [first, last] if dash else text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of devices, such as 16,24,32 or 64-1024")
    numbers = [int(part) for part in parts]
    if dash:
        low, high = numbers
        numbers = [low << power for power in range(_MOST_SIZES) if low << power <= high]
        if not numbers:
            raise argparse.ArgumentTypeError(f"{text!r} must begin with the smaller number, such as 64-1024")
    if len(numbers) > _MOST_SIZES:
        raise argparse.ArgumentTypeError(f"{len(numbers)} sizes: at most {_MOST_SIZES} are tried at once")
    return tuple(numbers)


def score_options(parser: Parser) -> None:
    parser.add_argument("cases", metavar="CASES.json", type=Path, help="a file of measured runs")
    parser.add_argument("--hardware", metavar="FOLDER", type=Path, help="of hardware files beside the shipped ones")
    parser.add_argument(
        "--record", metavar="F", type=Path, help="write the figures that plans quote (tools/plan/accuracy.json)"
    )


def calibrate_options(parser: Parser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE.yaml", type=Path, help="where to write it (standard output)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: half a minute, less exact")
    parser.add_argument(
        "--ranks", metavar="N", type=whole, nargs="+", help="workers to start (1, 2, 4; as many as there are GPUs)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto: GPUs if there are)")
    parser.add_argument("--check", action="store_true", help="then train eight layouts and compare; uses FILE if there")
    parser.add_argument("--again", action="store_true", help="with --check: measure even if FILE is there")


def compare_options(parser: Parser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder: config.yaml and metrics.jsonl")
    parser.add_argument("--gpu", metavar="NAME", help="the device it was on, such as h100")
    parser.add_argument("--hardware", "--cluster", metavar="FILE", help="or your own file, or a cluster's name")


def hardware_options(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a device, a cluster, or the path of your own file")


def models_options(parser: Parser) -> None:
    parser.add_argument("name", metavar="MODEL", nargs="?", help="a name, a config.json, or a recipe")
