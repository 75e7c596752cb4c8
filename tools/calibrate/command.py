"""`parallel3d-plan calibrate`: measures this host and writes a hardware file that the planner then uses.

Without a launcher it starts as many local workers as it needs, world after world; under torchrun (or srun) every
process is one rank of the one world there is, and calibrates that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.errors import ConfigError, RankError
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.tools.arguments import Parser, whole

_EPILOG = """\
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
"""
_PRELOAD = ("torch", "parallel3d.tools.calibrate.worker", "parallel3d.models.llama")
_PATIENCE_S = 1800.0  # of a collective: under a launcher the others wait for rank 0
_TARGET = "parallel3d.tools.calibrate.worker:worker"


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.output is not None and options.output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"-o {options.output}: must end in .yaml, by which --hardware tells a file; try mine.yaml")
    rendezvous = Rendezvous.from_environment()
    if rendezvous is not None and options.check:
        raise ConfigError("--check: starts workers of its own; leave it out under a launcher")
    if options.check and options.output is not None and options.output.is_file() and not options.again:
        print(f"{options.output}: there already, checked as it is (--again measures anew)", file=sys.stderr)
        text = options.output.read_text()
    else:
        measured = _under_launcher(rendezvous, options) if rendezvous else _started_here(options)
        if rendezvous is not None and rendezvous.rank > 0:
            return 0
        from parallel3d.tools.calibrate.hardware_file import hardware_text

        text = hardware_text(measured, date=datetime.now(UTC).date().isoformat())
        _write(options.output, text)
    if not options.check:
        return 0
    from parallel3d.tools.calibrate.check import check

    return check(text, device=options.device, as_json=options.json)


def _parser() -> Parser:
    parser = Parser(
        prog="parallel3d-plan calibrate",
        description="Measures this very machine and writes it as a hardware file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-o", "--output", metavar="FILE.yaml", type=Path, help="where to write it (standard output)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: half a minute, less exact")
    parser.add_argument(
        "--ranks", metavar="N", type=whole, nargs="+", help="workers to start (1, 2, 4; as many as there are GPUs)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto: GPUs if there are)")
    parser.add_argument("--check", action="store_true", help="then train eight layouts and compare; uses FILE if there")
    parser.add_argument("--again", action="store_true", help="with --check: measure even if FILE is there")
    parser.add_argument("--json", action="store_true", help="with --check: the comparison as one JSON object")
    return parser


def _write(output: Path | None, text: str) -> None:
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise ConfigError(f"-o {output}: cannot be written ({error.strerror}); try another path") from error
    print(f"wrote {output}; use it: parallel3d-plan --hardware {output} --gpus N ...", file=sys.stderr)


def _started_here(options: argparse.Namespace) -> dict[int, Any]:
    """What each world has measured, by its number of ranks."""
    return {ranks: _started(options, ranks) for ranks in sorted({1, *(options.ranks or _usual_ranks(options.device))})}


def _started(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """What so many workers, started here, have measured. Raises RankError where one of them failed."""
    from parallel3d.launch.local import launch_local

    print(f"measuring with {ranks} process{'es' * (ranks > 1)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="parallel3d-calibrate-") as folder:
        status = launch_local(_TARGET, _recipe(options, ranks, folder), ranks, preload=_PRELOAD)
        if status != 0:
            raise RankError(f"calibrate: {ranks} workers did not finish (exit status {status})")
        return _results(folder)


def _usual_ranks(device: str) -> list[int]:
    from parallel3d.launch.local_worker import cores

    if device != "cpu":
        import torch

        if gpus := torch.cuda.device_count():
            return [n for n in (2**k for k in range(12)) if n <= gpus]
    return [n for n in (1, 2, 4, 8) if n <= max(4, cores())]


def _under_launcher(rendezvous: Rendezvous, options: argparse.Namespace) -> dict[int, Any]:
    """The launcher's world, on rank 0, which before has measured what one process does."""
    from parallel3d.tools.calibrate.worker import worker

    size = rendezvous.world_size
    if size != rendezvous.local_world_size:
        raise ConfigError(f"calibrate: measures one host, and its {size} ranks are on several; start it on one of them")
    measured = {1: _started(options, 1)} if rendezvous.rank == 0 else {}
    if size == 1:
        return measured
    with tempfile.TemporaryDirectory(prefix="parallel3d-calibrate-") as folder:
        worker(_recipe(options, size, folder), rendezvous)
        return {**measured, size: _results(folder)} if rendezvous.rank == 0 else {}


def _recipe(options: argparse.Namespace, ranks: int, folder: str) -> Recipe:
    """What the launcher wants to know of a world: its size, its device and where results go."""
    return Recipe(
        model=ModelConfig(layers=1, hidden=8, heads=1, kv_heads=1, ffn_hidden=8, vocab=8),
        parallel=ParallelConfig(dp_replicate=ranks),
        train=TrainConfig(
            steps=1 if options.quick else 2,
            global_batch_size=ranks,
            seq_len=8,
            device=options.device,
            timeout_s=_PATIENCE_S,
        ),
        run_dir=folder,
    )


def _results(folder: str) -> dict[str, Any]:
    from parallel3d.tools.calibrate.worker import RESULTS

    found = json.loads((Path(folder) / RESULTS).read_text())
    assert isinstance(found, dict)
    return found
