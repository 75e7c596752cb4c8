"""Saves tensors that are laid over the mesh, by their global names, and loads them. Each rank
writes its own parts with their place in the global tensors, so any other layout can read the parts
that it needs.

A save has two steps: `plan_save`, in which the ranks agree who writes what, and `write_and_commit`.
Between them `parallel3d.checkpoint.saver` copies the parts, for a save that goes on while training
does."""

from __future__ import annotations

import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import parallel3d
from parallel3d.checkpoint import store
from parallel3d.checkpoint.collectives import collect
from parallel3d.checkpoint.difference import differences
from parallel3d.checkpoint.integrity import damaged_extents, missing_files, share_of
from parallel3d.checkpoint.manifest import (
    CONFIG_FILE,
    FORMAT,
    INDEX_FILE,
    Manifest,
    Progress,
    SavedFile,
    SavedTensor,
    read_manifest,
    save_file,
)
from parallel3d.checkpoint.reader import read_own_part
from parallel3d.checkpoint.writer import WrittenShard, write_shard
from parallel3d.errors import CheckpointError, SaveError
from parallel3d.torch_private import DcpPlace, dcp_index

MODEL = "model."  # the names of a model's parameters begin so, and no others
# what a part takes beside its elements in its file, in the index and in the manifest
_FRAME_BYTES = 4 << 10


@dataclass(frozen=True)
class WrittenParts:
    """The parts of a state that this rank writes, as the ranks have agreed. The agreement holds for
    every state of the same names, shapes, types and placements."""

    form: list[object]
    items: list[WriteItem]
    index: Metadata | None = None  # DCP's, of all ranks; on rank 0
    bytes: int = 0  # of all ranks; on rank 0


@dataclass
class PlannedSave:
    """What this rank writes of a checkpoint, and on rank 0 what it writes for all ranks."""

    path: Path
    progress: Progress
    config: str
    written: WrittenParts
    parts: list[tuple[WriteItem, Tensor]]  # views of the state, or copies of it

    @property
    def partial(self) -> Path:
        return _partial_of(self.path)


def save_tensors(state: dict[str, Tensor], progress: Progress, path: Path, config: str) -> None:
    """Writes a checkpoint beside `path` and renames it there; `config` is the run's recipe. Every
    rank calls it. Raises SaveError if it cannot be written; an older checkpoint at `path` stays."""
    write_and_commit(plan_save(state, progress, path, config))


def plan_save(
    state: dict[str, Tensor],
    progress: Progress,
    path: Path,
    config: str,
    earlier: WrittenParts | None = None,
) -> PlannedSave:
    """Has the ranks agree who writes which part, a replicated part once, and makes the folder.
    Every rank calls it. The agreement of an `earlier` save is used again if the state has the same
    form on each rank. Raises SaveError, before anything is written, if the disk is too full."""
    planner = DefaultSavePlanner()
    form = [_form(name, tensor) for name, tensor in state.items()]
    partial = _partial_of(path)

    def make_folder_if_as_before(answers: list[bool]) -> list[bool]:
        if all(answers):
            assert earlier is not None
            _make_folder(partial, earlier.bytes + len(config))
        return [all(answers)] * len(answers)

    with warnings.catch_warnings(action="ignore"):  # DCP's own deprecations
        planner.set_up_planner(dict(state), is_coordinator=dist.get_rank() == 0)
        if earlier is not None and collect(lambda: earlier.form == form, make_folder_if_as_before):
            written = earlier
        else:
            written = _agree(planner, form, partial, len(config))
        tensors = [cast(Tensor, planner.resolve_data(item)).detach() for item in written.items]
    parts = list(zip(written.items, tensors, strict=True))
    return PlannedSave(path, progress, config, written, parts)


def _agree(
    planner: DefaultSavePlanner, form: list[object], partial: Path, more_bytes: int
) -> WrittenParts:
    """Has the ranks agree who writes which part, and makes the folder for all of them and
    `more_bytes`."""
    index: Metadata | None = None
    total = 0

    def all_plans(own_plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal index, total
        plans, index = planner.create_global_plan(own_plans)
        for plan in plans:
            total += sum(_bytes_of(item) for item in plan.items)
        _make_folder(partial, total + more_bytes)
        return plans

    plan = planner.finish_plan(collect(planner.create_local_plan, all_plans))
    return WrittenParts(form, plan.items, index, total)


def _partial_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _form(name: str, tensor: Tensor) -> object:
    """Returns what decides which parts of a tensor a rank has."""
    return name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)


def write_and_commit(save: PlannedSave, group: dist.ProcessGroup | None = None) -> None:
    """Writes this rank's parts; when all ranks have written theirs, rank 0 writes the manifest and
    gives the checkpoint its name. Every rank calls it. Raises SaveError, and removes what was
    written, if one of them cannot write."""

    def own_shard() -> WrittenShard:
        try:
            return write_shard(save.partial, dist.get_rank(group), save.parts)
        except OSError as error:
            raise _cannot_write(save.path, f"rank {dist.get_rank(group)}: {error}") from error

    def commit(shards: list[WrittenShard]) -> list[None]:
        try:
            _manifest(save, shards).write(save.partial)
            store.sync_folder(save.partial)
            store.commit(save.partial, save.path)
        except OSError as error:
            raise _cannot_write(save.path, str(error)) from error
        return [None] * len(shards)

    try:
        collect(own_shard, commit, group)
    except SaveError:
        if dist.get_rank(group) == 0:
            with suppress(OSError):  # which would hide the error
                store.tidy(save.path.parent)
        raise


def _manifest(save: PlannedSave, shards: list[WrittenShard]) -> Manifest:
    """Writes the index of DCP and the recipe, and returns the manifest of what all ranks wrote."""
    files: dict[str, SavedFile] = {}
    places: dict[MetadataIndex, DcpPlace] = {}
    parts: dict[str, list[SavedTensor]] = {}
    for shard in shards:
        files |= shard.files
        places |= shard.places
        for name, part in shard.tensors:
            parts.setdefault(name, []).append(part)
    tensors = {}
    for name, own in parts.items():
        pieces = tuple(piece for part in own for piece in part.pieces)
        tensors[name] = replace(own[0], pieces=pieces)
    assert save.written.index is not None
    index = dcp_index(save.written.index, places)
    files[INDEX_FILE] = save_file(save.partial / INDEX_FILE, index)
    files[CONFIG_FILE] = save_file(save.partial / CONFIG_FILE, save.config.encode())
    versions = parallel3d.__version__, torch.__version__
    return Manifest(FORMAT, *versions, save.progress, files, tensors)


def load_tensors(
    state: dict[str, Tensor],
    path: Path,
    choose: Callable[[Progress], dict[str, Tensor]] | None = None,
) -> Progress:
    """Reads a checkpoint of any layout into `state`'s tensors, or into those that `choose` returns
    for what was saved. Every rank calls it. `choose` is called before names are compared, and
    raises CheckpointError where this run cannot resume from the checkpoint. Raises
    DamagedCheckpointError, before a tensor is changed, where a file is missing, cut short or
    differs in a bit from what was saved, and CheckpointError where the checkpoint is of another
    model."""
    wanted = state
    manifest: Manifest | None = None

    def check() -> dict[str, tuple[int, ...]]:
        nonlocal wanted, manifest
        manifest = read_manifest(path)
        for damage in missing_files(path, manifest):
            raise damage.error(path)
        wanted = state if choose is None else choose(manifest.progress)
        return {name: tuple(tensor.shape) for name, tensor in wanted.items()}

    def compare(everyone: list[dict[str, tuple[int, ...]]]) -> list[None]:
        assert manifest is not None
        here = ChainMap(*everyone)
        there = {
            name: tensor.shape
            for name, tensor in manifest.tensors.items()
            if name in here or name.startswith(MODEL)
        }
        if lines := differences(there, here):
            raise CheckpointError("\n  ".join([f"{path}: is of another model:", *lines]))
        return [None] * len(everyone)

    def check_bytes() -> None:
        assert manifest is not None
        share = share_of(manifest.extents, dist.get_rank(), dist.get_world_size())
        for damage in damaged_extents(path, share):
            raise damage.error(path)

    def read() -> None:
        assert manifest is not None
        for name, tensor in wanted.items():
            read_own_part(path, manifest.tensors[name], tensor)

    collect(check, compare)
    collect(check_bytes, lambda done: done)
    collect(read, lambda done: done)
    assert manifest is not None
    return manifest.progress


def _bytes_of(item: WriteItem) -> int:
    return _FRAME_BYTES + (item.tensor_storage_size() or 0)


def _make_folder(partial: Path, needed: int) -> None:
    """Makes the folder that a checkpoint is written into, if there is room for it. All ranks write
    into the one folder, so it has to have room for what they need together."""
    try:
        shutil.rmtree(partial, ignore_errors=True)
        store.check_room(partial.parent, "a checkpoint", needed)
        partial.mkdir()  # the parents are not made: a run's folder that was moved stays moved
    except OSError as error:
        raise _cannot_write(partial.with_suffix(""), str(error)) from error


def _cannot_write(path: Path, cause: str) -> SaveError:
    return SaveError(f"{path}: cannot be written: {cause}")
