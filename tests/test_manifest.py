"""The manifest of a checkpoint: any damage is found and reported by file and tensors, and a newer
version is recognized. A checkpoint of a few small tensors in two files is enough, and needs no
process group."""

from __future__ import annotations

import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel3d.checkpoint.manifest import (
    CONFIG_FILE,
    FORMAT,
    MANIFEST_FILE,
    Manifest,
    SavedTensor,
    find_damage,
    read_manifest,
    save_file,
)
from parallel3d.checkpoint.pieces import read_box, read_own_part, write_shard
from parallel3d.errors import CheckpointError, DamagedCheckpointError
from tests.report_runs import PROGRESS

ROWS = torch.arange(35, dtype=torch.float32).view(7, 5)
TENSORS = {
    "rows": ROWS,  # is cut into rows 0 to 3 and 4 to 6
    "number": torch.tensor(3.5),
    "bf16": torch.linspace(-1, 1, 24, dtype=torch.bfloat16).view(4, 6).t(),
    "empty": torch.empty(0, 3),
}


def item(name: str, whole: Tensor, offsets: list[int], sizes: list[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=whole.dtype), whole.size())
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    whole = [
        (item(name, t, [0] * t.ndim, list(t.shape)), t)
        for name, t in TENSORS.items()
        if name != "rows"
    ]
    shards = [
        write_shard(folder, 0, [(item("rows", ROWS, [0, 0], [4, 5]), ROWS[:4]), *whole]),
        write_shard(folder, 1, [(item("rows", ROWS, [4, 0], [3, 5]), ROWS[4:])]),
    ]
    pieces: dict[str, SavedTensor] = {}
    for place, piece in (*shards[0].pieces, *shards[1].pieces):
        tensor = TENSORS[place.fqn]
        dtype = str(tensor.dtype).removeprefix("torch.")
        earlier = pieces[place.fqn].pieces if place.fqn in pieces else ()
        pieces[place.fqn] = SavedTensor(dtype, tuple(tensor.shape), (*earlier, piece))
    files = {name: file for shard in shards for name, file in shard.files.items()}
    files[CONFIG_FILE] = save_file(folder / CONFIG_FILE, b"model: {}\n")
    Manifest(FORMAT, "0", "0", PROGRESS, files, pieces).write(folder)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "step_00000001"))


def test_a_checkpoint_comes_back_as_it_was_written(original: Path) -> None:
    manifest = read_manifest(original)
    assert manifest.progress == PROGRESS
    assert list(find_damage(original)) == []
    for name, tensor in TENSORS.items():
        read = torch.empty_like(tensor)
        read_own_part(original, manifest.tensors[name], read)
        assert torch.equal(read, tensor)
    # the checksum of a file is the one that every tool computes
    for name, file in manifest.files.items():
        assert f"{zlib.crc32((original / name).read_bytes()):08x}" == file.crc32


@pytest.mark.parametrize("first", range(7))
def test_any_box_of_a_tensor_is_read_from_the_pieces_that_have_it(
    original: Path, first: int
) -> None:
    saved = read_manifest(original).tensors["rows"]
    for last in range(first + 1, 8):
        for left, right in ((0, 5), (1, 4)):
            box = torch.full((last - first, right - left), torch.nan)
            read_box(original, saved, [first, left], box)
            assert torch.equal(box, ROWS[first:last, left:right])
            # strided, of another dtype
            doubles = torch.zeros(right - left, last - first, dtype=torch.float64).t()
            read_box(original, saved, [first, left], doubles)
            assert torch.equal(doubles, ROWS[first:last, left:right].double())


def test_each_of_200_flipped_bits_is_told_by_its_file_and_its_tensor(saved: Path) -> None:
    manifest = read_manifest(saved)
    draw = random.Random(0)
    told = 0
    for trial in range(200):
        file = sorted(saved.iterdir())[trial % len(manifest.files) - 1]
        whole = file.read_bytes()
        at = draw.randrange(len(whole))
        bit = draw.randrange(8)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        held = manifest.pieces.get(file.name, [])
        tensors = tuple(name for each, name in held if each.at <= at < each.at + each.bytes)
        (damage,) = find_damage(saved)
        told += (damage.file, damage.tensors) == (file.name, tensors)
        assert not tensors or f"(in ['{tensors[0]}'])" in str(damage.error(saved))
        file.write_bytes(whole)
    assert told == 200


def test_each_file_that_is_cut_deleted_or_longer_is_told(saved: Path) -> None:
    for name in sorted(file.name for file in saved.iterdir()):
        for change in (-1, 0, 1):
            copy = Path(shutil.copytree(saved, saved.parent / name / str(change)))
            content = (saved / name).read_bytes()
            (copy / name).write_bytes(content + b"x" if change > 0 else content[:-1])
            if change == 0:
                (copy / name).unlink()
            (told,) = find_damage(copy)
            assert told.file == name
            assert name == MANIFEST_FILE or "were saved" in told.reason


def forged(folder: Path, old: str, new: str) -> None:
    """Changes the manifest's text and gives it the checksum of the new text."""
    text = (folder / MANIFEST_FILE).read_text()
    assert old in text
    body = text.replace(old, new).rpartition(',\n"crc32"')[0].encode()
    (folder / MANIFEST_FILE).write_bytes(
        body + f',\n"crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()
    )


@pytest.mark.parametrize(
    "old, new, refusal",
    [
        (f'"format": {FORMAT}', '"format": 999', "format: Input should be 1"),
        ('"step": 1', '"step": 1, "stop": 1', "progress.stop: Unexpected keyword argument"),
        ('"step": 1, ', '"step": "1", ', "progress.step: Input should be a valid integer"),
    ],
)
def test_a_manifest_of_another_version_is_refused_and_is_no_damage(
    saved: Path, old: str, new: str, refusal: str
) -> None:
    forged(saved, old, new)
    with pytest.raises(CheckpointError) as told:
        read_manifest(saved)
    assert str(told.value).startswith(f"{saved / MANIFEST_FILE}: {refusal}; parallel3d ")
    assert not isinstance(told.value, DamagedCheckpointError)
