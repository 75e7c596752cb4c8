"""`python -m parallel3d.tools.bench NAME`: the project's benchmarks, each against its peer in the
same run."""

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

# The module NAME has `bench_NAME`, with - as _.
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
  checkpoint  saves and loads of what four processes share, checksums included, against torch.distributed.checkpoint and
         torch.save and torch.load; the pause of a save in the background, against one that is waited for
  data   the strategies of the data dimension on a plain model, against DistributedDataParallel, ZeroRedundancyOptimizer
         and fully_shard
  data-loading  batches of one process from shards of ids, against torch's DataLoader over the same files, Megatron's
         indexed data set where megatron-core is installed, and 50 million tokens/s
  layers a transformer block at tp 2, forward and backward, against parallelize_module and one process; the peak memory
         of the loss at vocabulary 128,256 in chunks, against the whole
  local_sgd  two replicas that synchronise every 20 steps, against two that sum gradients in every step, on the
         quickstart's model, data and tokens: the validation loss at the end, and what crosses between replicas
  pipeline  the pipeline's runtime alone, against torch.distributed.pipelining on the same stages and schedule; the
         bubble as measured, against the simulated one
  planner  the planner's errors on published runs, against those of two other planners on the same runs
  step   a training step in several layouts, against torch's own stack in the same layout (parallelize_module,
         fully_shard, torch.distributed.pipelining) and against a plain torch loop in one process
  trusted  layouts that people published, against what the planner recommends for the same jobs

A ratio is ours / peer: smaller is better. Progress goes to stderr, results to stdout. An idle machine gives the
steadiest numbers; processor time is the less disturbed of the two units. On GPUs (step,
layers, pipeline; NCCL, sizes of their own) wall time is that of the stream, the peer is compiled, and a case that needs
more GPUs than there are is left out.
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the command line names; returns the exit status."""
    return exit_status(arguments, _run)


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m parallel3d.tools.bench",
        description=(
            "Runs a benchmark of parallel3d against its peer, in turn, and prints both with their "
            "ratio."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", choices=BENCHMARKS, metavar="NAME", help=f"one of: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument("--rounds", type=whole, help="rounds of ours and peer in turn")
    parser.add_argument("--steps", type=whole, help="steps of each in a round")
    parser.add_argument(
        "--case", default="", metavar="SUBSTRING", help="only the cases whose names hold this"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto (default): GPUs where they can be used",
    )
    args = parser.parse_args(arguments)
    name = args.name.replace("-", "_")
    # imports torch, which --help does not wait for
    module = import_module(f"parallel3d.tools.bench.{name}")
    bench: Callable[[Options], list[ResultRow]] = vars(module)[f"bench_{name}"]
    device = _device(args.name, args.device)
    rows = bench(Options(rounds=args.rounds, steps=args.steps, case=args.case, device=device))
    print(as_json(rows) if args.json else as_table(rows))
    return 0


def _device(name: str, wanted: str) -> Literal["cpu", "cuda"]:
    """Returns the device that a benchmark runs on. Raises ConfigError where GPUs are asked for in
    vain."""
    import torch

    if wanted == "cuda" and name not in ON_GPUS:
        raise ConfigError(
            f"--device cuda: bench {name} runs on CPUs; on GPUs run {', '.join(ON_GPUS)}"
        )
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU on this host; try --device cpu")
    if has_gpu and wanted != "cpu" and name in ON_GPUS:
        return "cuda"
    return "cpu"


if __name__ == "__main__":
    sys.exit(main())
