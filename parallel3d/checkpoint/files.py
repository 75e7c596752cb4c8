"""Saves tensors that are laid over the mesh, by their global names, and loads them. DCP writes each rank's part with
its place in the global tensor, so any other layout can read the parts that it needs."""

from __future__ import annotations

import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel3d.checkpoint import store
from parallel3d.checkpoint.reader import INDEX, IndexReader
from parallel3d.checkpoint.store import SavedProgress, sha256_of
from parallel3d.errors import CheckpointError, DamagedCheckpointError, SaveError

_NEARLY_FULL_BYTES = 64 << 20
_OWN_INDEX = (INDEX, store.PROGRESS_FILE)  # small files, which are read before the others


def save_tensors(state: dict[str, Tensor], progress: SavedProgress, path: Path) -> None:
    """Writes a checkpoint beside `path` and renames it there. Every rank calls it, and returns when it is in place.
    Raises SaveError, with an older checkpoint at `path` untouched, where it cannot be written."""
    partial, rank = path.with_name(f"{path.name}.partial"), dist.get_rank()
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        with warnings.catch_warnings(action="ignore"):  # DCP's own deprecations
            dcp.save(dict(state), checkpoint_id=partial)
        mine = {file.name: sha256_of(file) for file in partial.glob(f"__{rank}_*")}
        everyone = [mine] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(mine, everyone)
        if everyone is not None:
            store.write_progress(partial, progress)
            everyone.append({name: sha256_of(partial / name) for name in _OWN_INDEX})
            store.write_checksums(partial, dict(ChainMap(*everyone)))
            store.commit(partial, path)
        dist.barrier()
    except (OSError, dcp.api.CheckpointException) as error:
        note = ""  # torch's own error does not say that a disk is full (`unexpected pos 704 vs 598`)
        with suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            note = f", {free / 2**20:.1f} MiB are free there" if free < _NEARLY_FULL_BYTES else ""
        raise SaveError(f"{path}: cannot be written{note}: {_cause(error)}") from error


def load_tensors(
    state: dict[str, Tensor], path: Path, choose: Callable[[SavedProgress], dict[str, Tensor]] | None = None
) -> SavedProgress:
    """Reads a checkpoint of any layout into `state`'s tensors, or into those that `choose` returns for what was saved.
    Every rank calls it. `choose` is called before names are compared, and raises CheckpointError where this run cannot
    resume from the checkpoint. Raises DamagedCheckpointError, before a tensor is changed, where a file is missing, cut
    short or differs in a bit from what was saved, and CheckpointError where the checkpoint is of another model."""
    checksums = store.read_checksums(path)
    for name in _OWN_INDEX:
        if name not in checksums or sha256_of(path / name) != checksums[name]:
            raise _damaged(path / name)
    progress = store.read_progress(path)
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
    # Each rank reads its share of the files, and all ranks raise the same error.
    names = sorted(checksums.keys() - set(_OWN_INDEX))
    mine = range(dist.get_rank(), len(names), dist.get_world_size())
    first = next((at for at in mine if sha256_of(path / names[at]) != checksums[names[at]]), len(names))
    found = torch.tensor(first, device=next((tensor.device for tensor in state.values()), None))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    if found.item() < len(names):
        raise _damaged(path / names[int(found.item())])
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(dict(state), storage_reader=reader)
    except (OSError, RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error
    return progress


def _damaged(file: Path) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{file}: is not what was saved: its SHA-256 is another; take an older checkpoint")


def _cause(error: BaseException) -> str:
    """Returns the first line of the error, on the first rank that had one."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(failure).__name__}: {failure}".splitlines()[0]
    return str(error).splitlines()[0]
