"""Reads torch.distributed.checkpoint folders without running what is in them: an index that names other classes than an
index is made of, which DCP's own reader would unpickle, is refused before it is run."""

from __future__ import annotations

import pickle
from enum import EnumType
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from parallel3d.errors import CheckpointError, DamagedCheckpointError

INDEX = ".metadata"
_ALLOWED = {  # by module; the names are those that torch writes
    "collections": "OrderedDict",
    "pathlib": "Path PosixPath PurePosixPath",
    "torch": "Size device float32 float64 bfloat16 float16 int64 strided",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    "torch.serialization": "_get_layout",
}


def _enum_member(enum: Any, name: str) -> Any:
    """Stands for `getattr`, by which early releases of Python 3.11, such as 3.11.2, pickle the members of an enum."""
    if not isinstance(enum, EnumType):
        raise pickle.UnpicklingError(f"it asks for {enum}.{name}, which no index needs")
    return enum[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _ALLOWED.get(module, "").split():
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return super().find_class(module, name)


class IndexReader(dcp.FileSystemReader):
    """DCP's reader of a folder, which refuses an index that names foreign classes, or files that are missing or too
    short."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # DCP's signature; it passes no argument
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as index:
                metadata = _IndexUnpickler(index).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, LookupError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as the index of a checkpoint: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: holds a {type(metadata).__name__}, not the index of a checkpoint")
        needed: dict[str, int] = {}  # the bytes of each file that the index names
        for info in metadata.storage_data.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, length in needed.items():
            file = Path(self.path) / name
            if file.parent != Path(self.path):
                raise CheckpointError(f"{self.path}: the index names {name}, outside of the checkpoint")
            if not file.is_file():
                raise DamagedCheckpointError(f"{file}: is missing, and the index names it")
            if file.stat().st_size < length:
                raise DamagedCheckpointError(f"{file}: has {file.stat().st_size} bytes of {length}; it was cut short")
        return metadata
