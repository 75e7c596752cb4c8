"""Finds and reads the documents of a text corpus: its non-empty files, in the same order on every
file system."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from parallel3d.config.recipe import DataConfig
from parallel3d.errors import ConfigError, DataError

NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document: the bytes `start` to `stop` of a file. It is the entire file, unless a corpus of
    one file was split for validation."""

    name: str  # Path relative to the corpus folder, with forward slashes.
    path: Path
    start: int = 0
    stop: int

    def read(self) -> bytes:
        """Reads the document. Raises DataError if the file cannot be read, has shrunk, or contains
        a zero byte."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                content = file.read(self.stop - self.start)
        except OSError as error:
            _refuse(error)
        # UTF-8 text has no zero bytes, but compressed and numeric files have many.
        if (zero := content.find(0)) >= 0:
            raise DataError(
                f"{self.path}: binary file, not text: byte {self.start + zero:,} is zero; use a "
                "text file, or exclude this one with data.pattern"
            )
        if len(content) < self.stop - self.start:
            raise DataError(
                f"{self.path}: shrank below {self.stop} bytes while it was read; start the run "
                "again"
            )
        return content


def find_documents(config: DataConfig) -> list[Document]:
    """Returns the non-empty files of the corpus, sorted by name.

    Symbolic links to files are followed, but not those to folders, which may form a loop. Files are
    not opened. Raises ConfigError if no non-empty file is found, and DataError for a file or folder
    that cannot be read."""
    if config.source == "stdlib":
        if config.path is not None:
            raise ConfigError(
                f"data.path = {config.path}: not for data.source = stdlib; try data.source=text"
            )
        root = Path(sysconfig.get_path("stdlib"))
        files = walk_files(root, NOT_STDLIB.__contains__)
        names = [name for name in files if name.endswith(".py")]
    else:
        root = Path(os.path.expanduser(config.path or ""))
        if not os.path.exists(root):
            raise ConfigError(
                f"data.path = {config.path}: no such file or folder at {root.absolute()}; "
                "try the path of a text file or of a folder of them, or data.source=stdlib"
            )
        if root.is_dir():
            pattern = config.pattern.removeprefix("**/") or "*"  # The search is recursive anyway.
            names = [name for name in walk_files(root) if PurePosixPath(name).match(pattern)]
        else:
            names = [root.name]
            root = root.parent
    documents = []
    for name in sorted(names):
        path = root / name
        try:
            size = path.stat().st_size
        except OSError as error:
            _refuse(error)
        if size and path.is_file():
            documents.append(Document(name=name, path=path, stop=size))
    if not documents:
        raise ConfigError(
            f"data.path = {config.path}: contains no text in files that match data.pattern = "
            f"{config.pattern}; try a folder with text files, or data.pattern=*"
        )
    return documents


def walk_files(
    root: Path, is_ignored: Callable[[str], bool] = lambda folder: False
) -> Iterator[str]:
    """Yields the relative paths of all files below `root`, except in folders whose name
    `is_ignored` accepts. Raises DataError for a folder that cannot be listed."""
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not is_ignored(name)]
        for file in files:
            yield Path(folder, file).relative_to(root).as_posix()


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename}: cannot be read ({error.strerror}); make it readable or remove it from "
        "the corpus"
    ) from error
