"""`parallel3d-plan calibrate`: measures this host and writes a hardware file that the planner then
uses.

Without a launcher it starts as many local workers as it needs, world after world; under torchrun
(or srun) every process is one rank of the one world there is, and calibrates that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.errors import ConfigError
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.tools.reply import Reply, check_free, write_output

_PATIENCE_S = 1800.0  # timeout of a collective: under a launcher the others wait for rank 0


def answer(options: argparse.Namespace) -> Reply:
    """Measures, writes the file, and checks it where that is asked. A rank other than 0 of a
    launcher says nothing."""
    if options.output is not None and options.output.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"-o {options.output}: must end in .yaml, by which --hardware tells a file; try "
            "mine.yaml"
        )
    rendezvous = Rendezvous.from_environment()
    if rendezvous is not None and options.check:
        raise ConfigError("--check: starts workers of its own; leave it out under a launcher")
    is_there = options.output is not None and options.output.is_file()
    if options.check and is_there and not options.again:
        print(f"{options.output}: there already (--again measures anew)", file=sys.stderr)
        text = options.output.read_text()
    else:
        if not options.again:
            check_free("-o", options.output)
        measured = _measured(rendezvous, options)
        if measured is None:
            return Reply(page=list)
        text = _written(measured, options)
    if not options.check:
        return Reply(page=list)
    from parallel3d.tools.calibrate.check import check

    return check(text, device=options.device)


def _measured(rendezvous: Rendezvous | None, options: argparse.Namespace) -> dict[int, Any] | None:
    """Returns what each world has measured; None on a rank other than 0 of a launcher. There is one
    world under a launcher, and rank 0 measures one process before."""
    from parallel3d.tools.calibrate.worker import RESULTS, measure, run_workers

    worlds = [1]
    if rendezvous is None:
        worlds = sorted({1, *(options.ranks or _usual_ranks(options.device))})
    measured = {}
    if rendezvous is None or rendezvous.rank == 0:
        for ranks in worlds:
            print(f"measuring with {ranks} processes", file=sys.stderr, flush=True)
            measured[ranks] = run_workers(measure, _recipe(options, ranks))
    if rendezvous is None:
        return measured
    size = rendezvous.world_size
    if size != rendezvous.local_world_size:
        raise ConfigError(
            f"calibrate: measures one host, and its {size} ranks are on several; start it on one "
            "of them"
        )
    if size > 1:
        with tempfile.TemporaryDirectory(prefix="parallel3d-calibrate-") as folder:
            measure(replace(_recipe(options, size), run_dir=folder), rendezvous)
            if rendezvous.rank == 0:
                measured[size] = json.loads((Path(folder) / RESULTS).read_text())
    return measured or None


def _written(measured: dict[int, Any], options: argparse.Namespace) -> str:
    """Writes the hardware file, or prints it, and returns its text."""
    from parallel3d.tools.calibrate.hardware_file import hardware_text

    text = hardware_text(measured, date=datetime.now(UTC).date().isoformat())
    if options.output is None:
        print(text, end="", flush=True)
        return text
    if options.again:
        options.output.unlink(missing_ok=True)
    write_output("-o", options.output, text)
    used = f"parallel3d-plan --hardware {options.output} --gpus N ..."
    print(f"wrote {options.output}; use it: {used}", file=sys.stderr)
    return text


def _usual_ranks(device: str) -> list[int]:
    from parallel3d.launch.local import cores

    most = max(4, cores())
    if device != "cpu":
        import torch

        most = torch.cuda.device_count() or most
    return [n for n in (1, 2, 4, 8) if n <= most]


def _recipe(options: argparse.Namespace, ranks: int) -> Recipe:
    """Returns a recipe that says what a launcher wants to know: the world's size and its device."""
    steps = 1 if options.quick else 2
    return Recipe(
        model=ModelConfig(layers=1, hidden=8, heads=1, kv_heads=1, ffn_hidden=8, vocab=8),
        parallel=ParallelConfig(dp_replicate=ranks),
        train=TrainConfig(
            steps=steps,
            global_batch_size=ranks,
            seq_len=8,
            device=options.device,
            start_timeout_s=_PATIENCE_S,
        ),
    )
