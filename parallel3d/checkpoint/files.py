"""Saves tensors that are laid over the mesh, by their global names, and loads them.

A checkpoint does not depend on the layout: DCP writes each rank's part with its place in the global tensor, and any
other layout reads the parts that it needs.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel3d.checkpoint.checksums import differs, merge_checksums, read_checksums, write_checksums
from parallel3d.checkpoint.reader import INDEX, IndexReader
from parallel3d.checkpoint.store import PROGRESS_FILE, SavedProgress, commit, read_progress, write_progress
from parallel3d.errors import CheckpointError, DamagedCheckpointError, SaveError

_NEARLY_FULL_BYTES = 64 << 20
_OWN_INDEX = (INDEX, PROGRESS_FILE)  # small files, which are read before the others


def save_tensors(state: dict[str, Tensor], progress: SavedProgress, path: Path) -> None:
    """Writes a checkpoint beside `path` and renames it there. Every rank calls it, and returns when it is in place.

    Raises SaveError, with an older checkpoint at `path` untouched, where it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP's own deprecations
            dcp.save(dict(state), checkpoint_id=partial)
        rank = dist.get_rank()
        write_checksums(partial, [file.name for file in partial.glob(f"__{rank}_*")], _checksums_of(rank))
        dist.barrier()
        if rank == 0:
            write_progress(partial, progress)
            merge_checksums(partial, [_checksums_of(other) for other in range(dist.get_world_size())], _OWN_INDEX)
            commit(partial, path)
        dist.barrier()
    except (OSError, dcp.api.CheckpointException) as error:
        raise SaveError(f"{path}: cannot be written{_if_full(path.parent)}: {_cause(error)}") from error


def load_tensors(
    state: dict[str, Tensor],
    path: Path,
    *,
    check: Callable[[SavedProgress], None] = lambda progress: None,
    choose: Callable[[SavedProgress], dict[str, Tensor]] | None = None,
) -> SavedProgress:
    """Reads a checkpoint of any layout into `state`'s tensors, or into those that `choose` returns for what was saved.
    Every rank calls it. `check` is called before names are compared, and raises CheckpointError where this run cannot
    resume from the checkpoint.

    Raises DamagedCheckpointError, before a tensor is changed, where a file is missing, cut short or differs in a bit
    from what was saved, and CheckpointError where the checkpoint is of another model.
    """
    checksums = read_checksums(path)
    for name in _OWN_INDEX:
        if name not in checksums or differs(path, name, checksums[name]):
            raise _damaged(path / name)
    progress = read_progress(path)
    check(progress)
    state = state if choose is None else choose(progress)
    reader = IndexReader(path)
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        there = stored.get(name)
        if not isinstance(there, TensorStorageMetadata):
            raise CheckpointError(f"{path}: has no {name}; it is of another model")
        if tuple(there.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: {name} is {list(there.size)} there and {list(tensor.shape)} here; it is of another model"
            )
    _check_shards(path, checksums, _device_of(state))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(dict(state), storage_reader=reader)
    except (OSError, RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error
    return progress


def _check_shards(path: Path, checksums: dict[str, str], device: torch.device) -> None:
    """Raises DamagedCheckpointError on every rank if a file differs. Each rank reads its share of the files."""
    names = sorted(checksums.keys() - set(_OWN_INDEX))
    mine = range(dist.get_rank(), len(names), dist.get_world_size())
    first = next((at for at in mine if differs(path, names[at], checksums[names[at]])), len(names))
    found = torch.tensor(first, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    if found.item() < len(names):
        raise _damaged(path / names[int(found.item())])


def _damaged(file: Path) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{file}: is not what was saved: its SHA-256 is another; take an older checkpoint")


def _checksums_of(rank: int) -> str:
    return f"rank_{rank}.sha256"


def _if_full(folder: Path) -> str:
    """Returns a note that a disk is nearly full, which torch's own error does not say (`unexpected pos 704 vs 598`)."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f", {free / 2**20:.1f} MiB are free there" if free < _NEARLY_FULL_BYTES else ""


def _device_of(state: dict[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in state.values()), torch.device("cpu"))


def _cause(error: BaseException) -> str:
    """Returns the first line of the error, on the first rank that had one."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(failure).__name__}: {failure}".splitlines()[0]
    return str(error).splitlines()[0]
