"""Writes the model of a checkpoint as a folder that transformers opens: safetensors, config.json,
tokenizer. One process does it, a tensor at a time, whatever the layout that saved the checkpoint.

A file of safetensors is the length of its header (8 bytes, little-endian), the header as JSON, and
the tensors' bytes in the header's order. The library's own writer needs all tensors of a file at
once, so the file is written here.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parallel3d.checkpoint.hugging_face import HfTensor, hf_tensors
from parallel3d.checkpoint.manifest import ITEM_BYTES, Manifest, read_manifest, save_file
from parallel3d.checkpoint.reader import read_box
from parallel3d.checkpoint.start import CONFIG_JSON
from parallel3d.checkpoint.store import check_room, commit, sync_folder
from parallel3d.config.hugging_face import to_hugging_face
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.data.corpus import find_tokenizer
from parallel3d.data.tokenizers import TOKENIZER_FILES
from parallel3d.errors import CheckpointError, ConfigError, DataError, writing

_SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SPARE_BYTES = 16 << 20  # for what is not a tensor: headers, the index, a tokenizer
# The files of an export, by which an earlier one is known. A config.json of transformers has one of
# the two keys.
_INDEX_JSON = "model.safetensors.index.json"
_FILES = (CONFIG_JSON, "generation_config.json", _INDEX_JSON, *TOKENIZER_FILES)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_IN_OUR_CONFIG = ('"dtype"', '"torch_dtype"')


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """How a model is written: its config, the longest sequence that it was trained on, torch's name
    of the weights' type (None: as they were saved), the largest file, and what its tokenizer adds:
    files by their names, and the id that ends a text. `notes` are for the user."""

    model: ModelConfig
    seq_len: int
    dtype: str | None = None
    largest_file_bytes: int = 5 * 10**9
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    end_of_text: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> ExportForm:
        """Returns the form of a run's model. Where the tokenizer of its first corpus is not there
        any more, or was never known, the model is exported without one."""
        form = cls(model=recipe.model, seq_len=recipe.train.seq_len)
        try:
            tokenizer = find_tokenizer(recipe.data.corpora[0])
            files = tokenizer.files_for_transformers()
        except (ConfigError, DataError) as error:
            return replace(form, notes=(f"exported without a tokenizer: {error}",))
        return replace(form, tokenizer_files=files, end_of_text=tokenizer.end_of_text)


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor that is to be written: what it is made of, its shape, and torch's name of its
    type."""

    source: HfTensor
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def export(checkpoint: Path, to: Path, form: ExportForm, *, overwrite: bool) -> Iterator[str]:
    """Writes the folder beside `to` and renames it there, and yields each tensor's name when it is
    written. Of replicas that trained apart the outer parameters are the model. `overwrite` lets an
    earlier export at `to` be replaced.

    Raises ConfigError where no family of transformers has the model or `to` is not free,
    CheckpointError for a checkpoint that cannot be read or is of another model, and SaveError where
    the folder cannot be written."""
    _check_free(checkpoint, to, overwrite)
    to = to.resolve()
    manifest = read_manifest(checkpoint)
    tensors = _planned(checkpoint, manifest, form)
    files = _files(tensors, form.largest_file_bytes)
    partial = _beside(to)[0]
    try:
        with writing(to):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            check_room(to.parent, "an export", sum(each.bytes for each in tensors) + _SPARE_BYTES)
            for name, written in files.items():
                with (partial / name).open("wb") as file:
                    _write_header(file, written)
                    for tensor in written:
                        values = _read(checkpoint, manifest, tensor)
                        file.write(values.view(-1).view(torch.uint8).numpy().data)
                        yield tensor.source.name
                    file.flush()
                    os.fsync(file.fileno())
            _write_others(partial, files, form)
            sync_folder(partial)
            commit(partial, to)
    finally:
        # which is not there any more where all went well
        shutil.rmtree(partial, ignore_errors=True)


def _check_free(checkpoint: Path, to: Path, overwrite: bool) -> None:
    """Raises ConfigError unless an export to `to` is possible and deletes nothing except an earlier
    export."""
    place = to.resolve()
    if place.is_relative_to(checkpoint.resolve()):
        raise ConfigError(
            f"DIR = {to}: lies in the checkpoint, which would then count as damaged; try another "
            "folder"
        )
    if Path.cwd().is_relative_to(place):
        raise ConfigError(
            f"DIR = {to}: the current folder is in it and cannot be replaced; try a new folder"
        )
    if place.is_dir() and any(place.iterdir()) and not overwrite:
        raise ConfigError(f"DIR = {to}: is there already; try another folder, or --overwrite")
    for folder in (place, *_beside(place)):
        for foreign in _foreign_files(folder):
            raise ConfigError(
                f"DIR = {to}: {foreign} is not of an exported model, and is kept; try another "
                "folder"
            )


def _beside(to: Path) -> list[Path]:
    """Returns the folder that a new export is written to, and those that `commit` moves an earlier
    export to before it is deleted."""
    return [
        to.with_name(f"{to.name}.{each}") for each in ("partial", "replaced", "replaced.dropped")
    ]


def _foreign_files(folder: Path) -> Iterator[Path]:
    """Yields the paths, `folder` or those in it, that an export did not write."""
    if folder.exists() and not folder.is_dir():
        yield folder
    for path in folder.glob("*"):
        is_ours = path.name in _FILES or _WEIGHTS.fullmatch(path.name) is not None
        if path.name == CONFIG_JSON and path.is_file():
            is_ours = all(key in path.read_text(errors="replace") for key in _IN_OUR_CONFIG)
        if not is_ours or not path.is_file() or path.is_symlink():
            yield path


def _planned(checkpoint: Path, manifest: Manifest, form: ExportForm) -> list[ExportedTensor]:
    """Returns all tensors of the model, in the order of the table. Raises CheckpointError if the
    checkpoint has others than the config says."""
    sources = list(hf_tensors(form.model))
    needed = [f"model.{name}" for source in sources for name in source.parameters]
    saved = {name for name in manifest.tensors if name.startswith("model.")}
    missing = [name for name in needed if name not in saved]
    for name in [*missing, *sorted(saved.difference(needed))]:
        words = f"has no {name}; it is of another model than its config.yaml"
        if name in saved:
            words = f"has {name}, which its config.yaml says nothing of"
        raise CheckpointError(f"{checkpoint}: {words}")
    tensors = []
    for source in sources:
        first = manifest.tensors[f"model.{source.parameters[0]}"]
        dtype = form.dtype or first.dtype
        tensors.append(ExportedTensor(source, source.shape(first.shape), dtype))
    rows = tensors[0].shape[0]
    if rows != form.model.vocab:
        raise CheckpointError(
            f"{checkpoint}: has an embedding of {rows} ids, its config.yaml says {form.model.vocab}"
        )
    return tensors


def _files(tensors: list[ExportedTensor], largest_bytes: int) -> dict[str, list[ExportedTensor]]:
    """Returns the tensors of each file. A file is as large as allowed, unless a single tensor is
    larger."""
    files: list[list[ExportedTensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(each.bytes for each in files[-1]) + tensor.bytes > largest_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{at:05}-of-{len(files):05}.safetensors": each for at, each in enumerate(files, 1)
    }


def _write_header(file: BinaryIO, tensors: list[ExportedTensor]) -> None:
    """Writes what stands before the bytes of the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.bytes
        header[tensor.source.name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    file.write(len(text).to_bytes(8, "little") + text)


def _read(checkpoint: Path, manifest: Manifest, tensor: ExportedTensor) -> Tensor:
    """Returns a tensor as it is written. Raises CheckpointError where a weight is too large for
    float16."""
    made = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    parts = (made.t() if tensor.source.transposed else made).chunk(len(tensor.source.parameters))
    for name, part in zip(tensor.source.parameters, parts, strict=True):
        saved = manifest.tensors[f"model.{name}"]
        read_box(checkpoint, saved, [0] * part.ndim, part)
    if tensor.dtype == "float16" and not all(end.isfinite() for end in made.aminmax()):
        raise CheckpointError(
            f"{checkpoint}: {tensor.source.name} has numbers beyond float16's; try --dtype bf16"
        )
    return made


def _write_others(folder: Path, files: dict[str, list[ExportedTensor]], form: ExportForm) -> None:
    """Writes config.json, generation_config.json, the index of several files, and the tokenizer's
    files."""
    tensors = [tensor for written in files.values() for tensor in written]
    dtype, eos = tensors[0].dtype, form.end_of_text
    trees: dict[str, Any] = {
        CONFIG_JSON: to_hugging_face(
            form.model, seq_len=form.seq_len, dtype=dtype, end_of_text=eos
        ),
        "generation_config.json": {} if eos is None else {"eos_token_id": eos},
    }
    if len(files) > 1:
        weights: dict[str, str] = {}
        for name, written in files.items():
            weights |= dict.fromkeys((tensor.source.name for tensor in written), name)
        total = sum(tensor.bytes for tensor in tensors)
        trees[_INDEX_JSON] = {"metadata": {"total_size": total}, "weight_map": weights}
    for name, tree in trees.items():
        save_file(folder / name, (json.dumps(tree, indent=2) + "\n").encode())
    for name, content in form.tokenizer_files.items():
        save_file(folder / name, content)
