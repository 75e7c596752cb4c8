"""What each rank tells of itself and its host, before anything is measured: versions, free memory, the disk below the
folder of the run, and the data."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch

import parallel3d
from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import open_token_files
from parallel3d.data.source import find_documents
from parallel3d.data.token_files import TOKENS_JSON
from parallel3d.errors import ConfigError, DataError
from parallel3d.recipes.host_fit import free_memory

_MOST_FILES = 64  # whose blocks are compared, spread over all files; the names and sizes of all are
_BLOCKS, _BLOCK_BYTES = 4, 1 << 16
_DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions of what a rank computes and talks with; empty for what it does not have."""

    python: str
    torch: str
    parallel3d: str
    cuda: str = ""
    nccl: str = ""
    driver: str = ""

    @classmethod
    def here(cls, *, has_gpu: bool) -> Versions:
        cuda = nccl = driver = ""
        if has_gpu:
            cuda = torch.version.cuda or torch.version.hip or ""
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            with suppress(OSError):
                driver = _DRIVER.read_text().strip()
        return cls(
            python=platform.python_version(),
            torch=str(torch.__version__),
            parallel3d=parallel3d.__version__,
            cuda=cuda,
            nccl=nccl,
            driver=driver,
        )


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The files of the run's data as a host sees them. `digests` has those whose blocks were read, by name; `all_names`
    stands for the names and sizes of all. `problem` says why they cannot be read."""

    files: int = 0
    bytes_: int = 0
    all_names: str = ""
    digests: tuple[tuple[str, str], ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank. What belongs to a host is told by the first of its ranks, and None on the others."""

    rank: int
    host: str
    device: str  # a GPU as CUDA calls it, or CPU
    versions: Versions
    free_bytes: int | None  # what the rank's GPU has, or what processes of the host can still take; None: nobody says
    disk_free_bytes: int | None = None  # where the folder of the run is, or will be
    disk_problem: str = ""
    data: DataFacts | None = None


def rank_facts(rank: int, device: torch.device) -> RankFacts:
    """Returns what every rank tells."""
    of_host = free_memory()
    free = of_host.bytes_ if of_host is not None else None
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        versions=Versions.here(has_gpu=device.type == "cuda"),
        free_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free,
    )


def folder_above(run_dir: str) -> Path:
    """Returns the folder of a run, or the nearest one above it that is there already."""
    path = Path(run_dir).absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def leave_mark(run_dir: str | None) -> Path | None:
    """Writes a file by which other hosts see whether they share the folder of the run. Returns None where there is no
    folder, or it cannot be written, which `disk_facts` tells."""
    if run_dir is None:
        return None
    mark = folder_above(run_dir) / f".parallel3d-check-{uuid4().hex}"
    try:
        mark.touch(exist_ok=False)
    except OSError:
        return None
    return mark


def disk_facts(run_dir: str, mark: str | None) -> tuple[int | None, str]:
    """Returns the bytes that are free where the folder of the run is, and what is wrong with it on this host. `mark` is
    the name of the file that rank 0 has left there."""
    folder = folder_above(run_dir)
    if mark is not None and not (folder / mark).exists():
        return None, f"run_dir = {run_dir}: is not the folder that rank 0 writes into; put it on storage that all share"
    if not os.access(folder, os.W_OK):
        return None, f"run_dir = {run_dir}: {folder} cannot be written; try a run_dir that can"
    return shutil.disk_usage(folder).free, ""


def data_facts(data: DataConfig) -> DataFacts:
    """Reads the names and sizes of all files of the data, and a few blocks of some."""
    try:
        files = [pair for corpus in data.corpora for pair in _files(corpus)]
        sizes = [path.stat().st_size for _, path in files]
        every = max(1, -(-len(files) // _MOST_FILES))
        some = list(zip(files, sizes, strict=True))[::every]
        digests = tuple((name, _digest(path, size)) for (name, path), size in some)
    except (ConfigError, DataError, OSError) as error:
        return DataFacts(problem=str(error))
    names = "\n".join(f"{name} {size}" for (name, _), size in zip(files, sizes, strict=True))
    return DataFacts(files=len(files), bytes_=sum(sizes), all_names=_hex(names.encode()), digests=digests)


def _files(config: DataConfig) -> Iterator[tuple[str, Path]]:
    """Yields the name and the path of each file of a corpus, in an order that all hosts have."""
    if config.source != "tokens":
        yield from ((document.name, document.path) for document in find_documents(config))
        return
    root, header = Path(os.path.expanduser(config.path or "")), open_token_files(config).header
    names = [TOKENS_JSON, *(shard.file for shard in (*header.train, *header.validation))] if header else []
    yield from ((name, root / name) for name in names)
    if header is None:
        yield from ((f"{root.name}{end}", root.with_name(f"{root.name}{end}")) for end in (".idx", ".bin"))


def _digest(path: Path, size: int) -> str:
    """Returns a hash of a file's size and of blocks at its beginning, its end and between them."""
    checksum = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        for at in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * at // (_BLOCKS - 1))
            checksum.update(file.read(_BLOCK_BYTES))
    return checksum.hexdigest()


def _hex(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
