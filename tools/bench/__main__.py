"""Command line of the benchmarks: `python -m parallel3d.tools.bench NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Literal

from parallel3d.errors import ConfigError
from parallel3d.tools.arguments import Parser, whole
from parallel3d.tools.bench.report import Options, ResultRow, as_json, as_table
from parallel3d.tools.cli_output import exit_status

# Module NAME has the function `bench_NAME`, with each - in NAME replaced by _.
BENCHMARKS = (
    "checkpoint",
    "data",
    "data-loading",
    "step",
    "layers",
    "local_sgd",
    "pipeline",
    "planner",
    "trusted",
)
ON_GPUS = ("step", "layers", "pipeline")
_EPILOG = """\
benchmarks:
  checkpoint    save and load with four processes and checksums, against torch.distributed.checkpoint, torch.save and
                torch.load; the pause of a background save, against a synchronous one
  data          sharding strategies on a plain model, against DistributedDataParallel, ZeroRedundancyOptimizer and
                fully_shard
  data-loading  batches of one process from token files, against torch's DataLoader on the same files, Megatron's indexed
                data set if megatron-core is installed, and 50 million tokens/s
  layers        a transformer block at tp 2, forward and backward, against parallelize_module and one process; peak
                memory of the chunked loss at vocabulary 128,256, against the loss in one piece
  local_sgd     two replicas that synchronize every 20 steps, against summed gradients in every step: final validation
                loss and bytes between replicas for the quickstart
  pipeline      the pipeline runtime, against torch.distributed.pipelining with the same stages and schedule; measured
                against simulated bubble
  planner       errors of the planner on published runs, against two other planners on the same runs
  step          a training step in several layouts, against PyTorch's native stack in the same layout
                (parallelize_module, fully_shard, torch.distributed.pipelining) and a plain loop in one process
  trusted       published layouts, against the planner's recommendation for the same jobs

Ratios are ours / peer: smaller is better. Progress goes to stderr, results to stdout. Run on an idle machine. Processor
time is less sensitive to other load than wall time. On GPUs (step, layers, pipeline) wall time is measured on the CUDA
stream, the peer is compiled, and cases that need more GPUs than available are skipped.
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns the exit status."""
    return exit_status(arguments, _run)


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m parallel3d.tools.bench",
        description=(
            "Runs a benchmark of parallel3d and its peer alternately and prints both with their "
            "ratio."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", choices=BENCHMARKS, metavar="NAME", help=f"benchmark: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument("--rounds", type=whole, help="number of rounds (default: per case)")
    parser.add_argument("--steps", type=whole, help="steps per round (default: per case)")
    parser.add_argument(
        "--case", default="", metavar="SUBSTRING", help="run only cases with this in their name"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device type (default: auto, which is cuda if supported)",
    )
    args = parser.parse_args(arguments)
    name = args.name.replace("-", "_")
    # Imports torch, which --help does not need.
    module = import_module(f"parallel3d.tools.bench.{name}")
    bench: Callable[[Options], list[ResultRow]] = vars(module)[f"bench_{name}"]
    device = _device(args.name, args.device)
    rows = bench(Options(rounds=args.rounds, steps=args.steps, case=args.case, device=device))
    print(as_json(rows) if args.json else as_table(rows))
    return 0


def _device(name: str, wanted: str) -> Literal["cpu", "cuda"]:
    """Returns the device type. Raises ConfigError if `wanted` is not supported."""
    import torch

    if wanted == "cuda" and name not in ON_GPUS:
        raise ConfigError(
            f"--device cuda: bench {name} runs on CPUs only; try {', '.join(ON_GPUS)}"
        )
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch finds no GPU on this host; try --device cpu")
    if has_gpu and wanted != "cpu" and name in ON_GPUS:
        return "cuda"
    return "cpu"


if __name__ == "__main__":
    sys.exit(main())
