"""`parallel3d-plan calibrate`: measures this host with local ranks, for one world size after
another, and writes a hardware file for the planner.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

import yaml

from parallel3d.errors import ConfigError
from parallel3d.launch.local import cores
from parallel3d.tools.cli_output import Reply, check_free, write_output


def answer(options: argparse.Namespace) -> Reply:
    path = options.output
    if path is not None and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"-o {path}: must end in .yaml, so that --hardware recognizes a file; try mine.yaml"
        )
    check_free("-o", path)
    # These import torch, which --help does not need.
    import torch

    from parallel3d.tools.calibrate.hardware_file import hardware_text
    from parallel3d.tools.calibrate.worker import measure
    from parallel3d.tools.local_ranks import run_ranks

    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    most = gpus or max(4, cores())
    worlds = options.ranks or [ranks for ranks in (2, 4, 8) if ranks <= most]
    if options.device == "cuda" and max([*worlds, 1]) > gpus:
        raise ConfigError(f"--device cuda: requires one GPU per rank, but torch sees {gpus}")
    device = "cuda" if gpus else "cpu"
    measured = {}
    for ranks in sorted({1, *worlds}):
        print(f"measuring with {ranks} processes", file=sys.stderr, flush=True)
        measured[ranks] = run_ranks(measure, device, options.quick, world_size=ranks, device=device)
    today = datetime.now(UTC).date()
    text = hardware_text(measured, date=today.isoformat())
    page = text.splitlines()
    if path is not None:
        write_output("-o", path, text)
        use = f"parallel3d-plan --hardware {path} --gpus N ..."
        page = [f"wrote {path}; use it: {use}"]
    return Reply(page=page, tree=lambda: yaml.safe_load(text))
