"""`bench checkpoint`: times saves and loads of float32 tensors sharded over four processes.

The peers are DCP (torch.distributed.checkpoint) with the same tensors, and torch.save and
torch.load of each process's shards. A further case compares the pause of a background save with
that of a synchronous one.

All write to the system's folder for temporary files and call fsync. Only parallel3d computes
checksums while it saves, and verifies them before it loads. Loads read from the page cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from parallel3d.checkpoint.files import load_tensors, save_tensors
from parallel3d.checkpoint.manifest import Progress
from parallel3d.checkpoint.saver import Saver
from parallel3d.checkpoint.store import checkpoint_path
from parallel3d.config.recipe import CheckpointConfig
from parallel3d.tools.bench.harness import (
    Case,
    TimedCase,
    check_agreement,
    run_cases,
    time_in_turn,
    time_steps,
)
from parallel3d.tools.bench.report import Options, ResultRow, Round, Timing, row_of
from parallel3d.tools.local_ranks import run_ranks

RANKS = 4
ROUNDS = 5
SIZES = {"64 MB": 16, "1 GB": 256}  # number of tensors of 4 MiB
_PROGRESS = Progress(
    step=1, tokens=1, seed=0, global_batch_size=1, seq_len=1, parameters=1, parallel={}
)
State = dict[str, DTensor]
Act = Callable[[State, Path], object]


def bench_checkpoint(options: Options) -> list[ResultRow]:
    """Times the selected cases and returns their rows."""
    cases: dict[str, Case] = {}
    for size, tensors in SIZES.items():
        for verb, act in (("save", measure_saves), ("load", measure_loads)):
            for peer in _SAVES:
                bar = 1.0 if (size, peer) == ("1 GB", "DCP") else None
                cases[f"{verb} {size}, {peer}"] = TimedCase(
                    measure=act,
                    arguments=(tensors, peer),
                    world_size=RANKS,
                    rounds=ROUNDS,
                    steps=1,
                    cpu_bar=bar,
                    wall_bar=bar,
                )
        cases[f"pause {size}, synchronous save"] = partial(_pause_rows, size)
    return run_cases(cases, options)


def _pause_rows(size: str, options: Options) -> list[ResultRow]:
    """Compares the wall time for which a background and a synchronous save pause training.

    The CPU time of a background save overlaps with training and is not reported.
    """
    name = f"pause {size}, synchronous save"
    rounds = options.rounds or ROUNDS
    steps = options.steps or 1
    found = run_ranks(measure_pauses, SIZES[size], rounds, steps, world_size=RANKS)
    pairs = [(round.ours.wall_s, round.peer.wall_s) for round in found]
    return [row_of(name, "wall_s_per_step", pairs, bar=0.25 if size == "1 GB" else None)]


def make_state(tensors: int, seed: int = 0) -> State:
    """Returns tensors of 1,024 rows of 4 KiB, whose rows are sharded over the ranks."""
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed + dist.get_rank())
    rows = 1024 // dist.get_world_size()
    return {
        f"model.{at}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)])
        for at in range(tensors)
    }


def measure_saves(tensors: int, peer: str, rounds: int, steps: int) -> list[Round]:
    """Times saves into new folders. Deleting the folders is not timed."""
    state = make_state(tensors)
    with common_folder() as folder:

        def timed(act: Act) -> Timing:
            taken = time_steps(lambda step: act(state, folder / f"step_{step}"), steps)
            _empty(folder)
            return taken

        return [Round(ours=timed(_save), peer=timed(_SAVES[peer])) for _ in range(rounds)]


def measure_pauses(tensors: int, rounds: int, steps: int) -> list[Round]:
    """Times how long `Saver.save` takes to return, for background and for synchronous saves.

    Each save starts when the previous one is complete. Memory for copies is allocated before, as
    for the second save of a run.
    """
    state = make_state(tensors)
    rule = CheckpointConfig(every=1, in_background=True)
    with (
        common_folder() as folder,
        Saver(rule, saved=lambda path: None, say=lambda line: None) as background,
        Saver(
            replace(rule, in_background=False), saved=lambda path: None, say=lambda line: None
        ) as waiting,
    ):

        def timed(saver: Saver) -> Timing:
            def begin(number: int, _step: int) -> None:
                saver.save(
                    dict(state), _PROGRESS, checkpoint_path(folder, number), "", is_last=False
                )

            taken = []
            for number in range(steps):
                taken.append(time_steps(partial(begin, number), 1))
                saver.finish()
            _empty(folder)
            return Timing(
                wall_s=fmean(each.wall_s for each in taken),
                cpu_s=fmean(each.cpu_s for each in taken),
            )

        timed(background)
        return [Round(ours=timed(background), peer=timed(waiting)) for _ in range(rounds)]


def measure_loads(tensors: int, peer: str, rounds: int, steps: int) -> list[Round]:
    """Times loads of a saved state, and checks that they restore it bitwise."""
    saved, ours, theirs = (make_state(tensors, seed) for seed in (0, 10, 20))
    with common_folder() as folder:
        _save(saved, folder / "ours")
        _SAVES[peer](saved, folder / "peer")
        found = time_in_turn(
            lambda step: load_tensors(lambda saved: dict(ours), folder / "ours"),
            lambda step: _LOADS[peer](theirs, folder / "peer"),
            rounds=rounds,
            steps=steps,
        )
        _empty(folder)
    for read, what in ((ours, "ours"), (theirs, "the peer")):
        local = {name: tensor.to_local() for name, tensor in read.items()}
        check_agreement(
            [(what, local[name], saved[name].to_local()) for name in local], tolerance=0.0
        )
    return found


def _save(state: State, path: Path) -> None:
    save_tensors(dict(state), _PROGRESS, path, config="")


def _save_dcp(state: State, path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(state), checkpoint_id=path)


def _load_dcp(state: State, path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.load(dict(state), checkpoint_id=path)


def _save_torch(state: State, path: Path) -> None:
    """Saves this rank's shards as one file, which only the same layout can load."""
    path.mkdir(exist_ok=True)
    with (path / f"{dist.get_rank()}.pt").open("wb") as file:
        torch.save({name: tensor.to_local() for name, tensor in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()


def _load_torch(state: State, path: Path) -> None:
    for name, part in torch.load(path / f"{dist.get_rank()}.pt", weights_only=True).items():
        state[name].to_local().copy_(part)


_SAVES: dict[str, Act] = {"DCP": _save_dcp, "torch": _save_torch}
_LOADS: dict[str, Act] = {"DCP": _load_dcp, "torch": _load_torch}


@contextmanager
def common_folder() -> Iterator[Path]:
    """Context manager for a temporary folder shared by all ranks. Every rank must call it."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("") as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


def _empty(folder: Path) -> None:
    """Removes the content of a shared folder. Every rank must call it."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            shutil.rmtree(path)
    dist.barrier()
