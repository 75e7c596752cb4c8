"""Saves and loads distributed tensors by global name, independent of the layout.

Each rank writes its shards with their position in the global tensors, so any layout can read the
parts that it needs.

`plan_save` assigns the tensors to ranks, and `write_and_commit` writes them. In between,
`parallel3d.checkpoint.saver` can copy the tensors so that training continues during the write.
"""

from __future__ import annotations

import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import parallel3d
from parallel3d.checkpoint import store
from parallel3d.checkpoint.collectives import collect
from parallel3d.checkpoint.manifest import (
    CONFIG_FILE,
    FORMAT,
    INDEX_FILE,
    Manifest,
    Progress,
    SavedFile,
    SavedPiece,
    SavedTensor,
    damaged_files,
    differences,
    missing_files,
    read_manifest,
    save_file,
)
from parallel3d.checkpoint.pieces import WrittenShard, read_own_part, write_shard
from parallel3d.config.recipe import CheckpointConfig
from parallel3d.errors import CheckpointError, SaveError, writing
from parallel3d.torch_private import DcpPlace, dcp_index

MODEL = "model."  # Prefix of the names of model parameters. No other tensors have it.
# Estimated overhead per part, in bytes: in its file, the index and the manifest.
_FRAME_BYTES = 4 << 10


@dataclass(frozen=True)
class Agreement:
    """Which rank writes which part of each tensor. Saves of the same `form` share it."""

    form: Sequence[tuple[object, ...]]  # Name, shape, dtype and placements of each tensor.
    items: list[WriteItem]  # Parts that this rank writes.
    index: Metadata | None  # DCP's index of all ranks' parts. None except on rank 0.
    bytes: int  # Estimated size of all ranks' parts. 0 except on rank 0.


@dataclass
class PlannedSave:
    """A save to be written: the parts of this rank, and the progress and recipe of the run."""

    path: Path
    partial: Path  # Folder that is written. Renamed to `path` when complete.
    progress: Progress
    config: str
    parts: list[tuple[WriteItem, Tensor]]  # The tensors are views of the state, or copies.
    agreed: Agreement
    # Recipe section whose `keep` keys select the older checkpoints to delete. None: keep all.
    keep: CheckpointConfig | None = None


def save_tensors(state: dict[str, Tensor], progress: Progress, path: Path, config: str) -> None:
    """Writes a checkpoint to `path`. Collective.

    Args:
        state: Tensors, keyed by global name.
        progress: Progress of the run.
        path: Folder to create. It gets this name when it is complete.
        config: Recipe of the run as YAML.

    Raises:
        SaveError: The checkpoint cannot be written. An older checkpoint at `path` remains.
    """
    write_and_commit(plan_save(state, progress, path, config))


def plan_save(
    state: dict[str, Tensor],
    progress: Progress,
    path: Path,
    config: str,
    earlier: Agreement | None = None,
) -> PlannedSave:
    """Assigns each part to one rank and creates the folder `<path>.partial`. Collective.

    It reuses the agreement of an `earlier` save if every rank's state has the same form. Raises
    SaveError if the disk is too full or not writable.
    """
    planner = DefaultSavePlanner()
    partial = path.with_name(f"{path.name}.partial")
    form = [(name, x.shape, x.dtype, getattr(x, "placements", None)) for name, x in state.items()]
    index: Metadata | None = None
    total = 0

    def make_folder(state_bytes: int) -> None:
        with writing(path):  # Runs on rank 0 only.
            shutil.rmtree(partial, ignore_errors=True)
            store.check_room(partial.parent, state_bytes + len(config))
            # Parents are not created: if the run's folder was moved, the save must fail.
            partial.mkdir()

    def all_as_before(answers: list[bool]) -> bool:
        if earlier is not None and all(answers):
            make_folder(earlier.bytes)
        return all(answers)

    def all_plans(own_plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal index, total
        plans, index = planner.create_global_plan(own_plans)
        items = [item for plan in plans for item in plan.items]
        total = sum(_FRAME_BYTES + (item.tensor_storage_size() or 0) for item in items)
        make_folder(total)
        return plans

    with warnings.catch_warnings(action="ignore"):  # DCP emits deprecation warnings of its own.
        planner.set_up_planner(dict(state), is_coordinator=dist.get_rank() == 0)
        if earlier is not None and collect(lambda: earlier.form == form, all_as_before):
            agreed = earlier
        else:
            plan = planner.finish_plan(collect(planner.create_local_plan, all_plans))
            agreed = Agreement(form, plan.items, index, total)
        tensors = [cast(Tensor, planner.resolve_data(item)).detach() for item in agreed.items]
    parts = list(zip(agreed.items, tensors, strict=True))
    return PlannedSave(path, partial, progress, config, parts, agreed)


def write_and_commit(save: PlannedSave, group: dist.ProcessGroup | None = None) -> None:
    """Writes this rank's parts, then commits the checkpoint on rank 0. Collective.

    To commit, rank 0 writes the manifest, renames the folder and deletes the older checkpoints that
    `save.keep` does not keep. If a rank cannot write or the commit fails, the incomplete folder is
    removed and SaveError is raised.
    """

    def own_shard() -> WrittenShard:
        rank = dist.get_rank(group)
        with writing(save.partial / f"__{rank}_0.distcp"):
            return write_shard(save.partial, rank, save.parts)

    def commit(shards: list[WrittenShard]) -> None:
        with writing(save.path):
            _manifest(save, shards).write(save.partial)
            store.sync_folder(save.partial)
            store.commit(save.partial, save.path)
            if save.keep is not None:
                store.retain(save.path.parent, save.keep, save.path)

    try:
        collect(own_shard, commit, group)
    except SaveError:
        if dist.get_rank(group) == 0:
            with suppress(OSError):  # An error of the clean-up would hide the first one.
                store.tidy(save.path.parent)
        raise


def _manifest(save: PlannedSave, shards: list[WrittenShard]) -> Manifest:
    """Writes DCP's index and the recipe, and returns the manifest of all ranks' files."""
    assert save.agreed.index is not None
    files: dict[str, SavedFile] = {}
    places: dict[MetadataIndex, DcpPlace] = {}
    pieces: dict[str, list[SavedPiece]] = {}
    for shard in shards:
        files |= shard.files
        for place, piece in shard.pieces:
            places[place] = DcpPlace(piece.file, piece.at, piece.bytes)
            pieces.setdefault(place.fqn, []).append(piece)
    tensors = {}
    for name, own in pieces.items():
        saved = cast(TensorStorageMetadata, save.agreed.index.state_dict_metadata[name])
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        tensors[name] = SavedTensor(dtype, tuple(saved.size), tuple(own))
    index = dcp_index(save.agreed.index, places)
    files[INDEX_FILE] = save_file(save.partial / INDEX_FILE, index)
    files[CONFIG_FILE] = save_file(save.partial / CONFIG_FILE, save.config.encode())
    versions = parallel3d.__version__, torch.__version__
    return Manifest(FORMAT, *versions, save.progress, files, tensors)


def load_tensors(choose: Callable[[Progress], dict[str, Tensor]], path: Path) -> Progress:
    """Loads a checkpoint, saved in any layout, into tensors. Collective.

    Args:
        choose: Takes the saved progress and returns the tensors to load, keyed by name. May raise
            CheckpointError if the run cannot resume from it.
        path: Folder of the checkpoint.

    Returns:
        Saved progress.

    Raises:
        DamagedCheckpointError: A file is damaged. All files are verified before a tensor changes.
        CheckpointError: The checkpoint is from a different model or in an unknown format.
    """
    manifest: Manifest
    wanted: dict[str, Tensor]

    def check() -> dict[str, tuple[int, ...]]:
        nonlocal manifest, wanted
        manifest = read_manifest(path)
        for damage in missing_files(path, manifest):
            raise damage.error(path)
        wanted = choose(manifest.progress)
        return {name: tuple(tensor.shape) for name, tensor in wanted.items()}

    def compare(everyone: list[dict[str, tuple[int, ...]]]) -> None:
        here = ChainMap(*everyone)
        saved = manifest.tensors.items()
        there = {name: each.shape for name, each in saved if name in here or name.startswith(MODEL)}
        if lines := differences(there, here):
            raise CheckpointError("\n  ".join([f"{path}: is from another model:", *lines]))

    def check_bytes() -> None:
        share = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        for damage in damaged_files(path, manifest, share):
            raise damage.error(path)

    def read() -> None:
        for name, tensor in wanted.items():
            read_own_part(path, manifest.tensors[name], tensor)

    collect(check, compare)
    collect(check_bytes)
    collect(read)
    return manifest.progress
