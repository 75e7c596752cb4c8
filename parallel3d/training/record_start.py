"""Adds a start of a run, and its checkpoints, to run.json."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.checkpoint.store import step_of
from parallel3d.launch.provenance import own_versions
from parallel3d.launch.run_log import write_log
from parallel3d.launch.run_record import RunStart, add_start, update_start
from parallel3d.training.callbacks import Callback, RunView
from parallel3d.training.trainer import Trainer


def record_run_start(trainer: Trainer, command: Sequence[str], run_dir: Path) -> str:
    """Adds this start to run.json and log.txt. Returns a message for the user, or "".

    Collective: all-gathers host and device names, so no rank continues before rank 0."""
    device = trainer.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    places = [("", "")] * dist.get_world_size()
    dist.all_gather_object(places, (socket.gethostname(), name))
    if dist.get_rank() != 0:
        return ""
    hosts: dict[str, list[int]] = {}
    devices: dict[str, list[int]] = {}
    for rank, (host, device_name) in enumerate(places):
        hosts.setdefault(host, []).append(rank)
        devices.setdefault(device_name, []).append(rank)
    start = RunStart(
        command=command,
        step=trainer.step,
        recipe=asdict(trainer.recipe),
        versions=own_versions() | {"torch": torch.__version__, "cuda": torch.version.cuda},
        hosts=hosts,
        devices=devices,
    )
    note = add_start(run_dir, start)
    write_log(run_dir, f"started: {shlex.join(command)}")
    return note


class RecordSaves(Callback):
    """Adds each completed checkpoint to run.json."""

    def saved(self, run: RunView, checkpoint: Path) -> None:
        update_start(run.run_dir, saved=[step_of(checkpoint)])
