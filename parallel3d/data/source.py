"""The documents of a corpus: the non-empty files that `data` names, in the same order on every file system."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from parallel3d.config.recipe import DataConfig
from parallel3d.errors import ConfigError, DataError

NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


_HEAD_BYTES = 4096  # by these a binary file is told before all of it is read


@dataclass(frozen=True, kw_only=True)
class Document:
    """The bytes `start` to `stop` of a file: the whole file, except where a single file is split in two."""

    name: str  # path below the corpus's folder, with slashes: the same on every machine
    path: Path
    start: int = 0
    stop: int

    def read(self) -> bytes:
        """Reads the document's bytes. Raises DataError where the file cannot be read, has shrunk, or is no text."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                content = file.read(min(_HEAD_BYTES, self.stop - self.start))
                if 0 not in content:
                    file.seek(self.start)
                    content = file.read(self.stop - self.start)
        except OSError as error:
            _refuse(error)
        if (zero := content.find(0)) >= 0:  # text has no such byte; what is compressed, or made of numbers, has many
            raise DataError(
                f"{self.path}: is a binary file, not text: byte {self.start + zero:,} is zero; name a file of text, or "
                "leave this one out by data.pattern"
            )
        if len(content) < self.stop - self.start:
            raise DataError(f"{self.path}: shrank below {self.stop} bytes while it was read; start the run again")
        return content


def find_documents(config: DataConfig) -> list[Document]:
    """Returns the non-empty files of the corpus, sorted by name. Links to files are followed, links to folders are not
    (they may loop). Only folders and sizes are read. Raises ConfigError where `config` names no file with text in it,
    DataError for a file or folder that cannot be read."""
    if config.source == "stdlib":
        if config.path is not None:  # a forgotten data.source=text would train on other text than the user's
            raise ConfigError(
                f"data.path = {config.path}: must be null where data.source = stdlib; try data.source=text"
            )
        root = Path(sysconfig.get_path("stdlib"))
        names = _walk(root, prune=NOT_STDLIB) if root.is_dir() else ()
        documents = _non_empty(root, (name for name in names if name.endswith(".py")))
        if not documents:
            raise ConfigError(
                f"data.source = stdlib: this Python has no source files in {root}; "
                "try data.source=text data.path=corpus.txt"
            )
        return documents
    if not config.path:
        raise ConfigError(
            "data.path = null: data.source = text needs a file or a folder; try data.path=corpus.txt, "
            "or data.source=stdlib"
        )
    root = Path(os.path.expanduser(config.path))
    try:
        root.stat()
    except (FileNotFoundError, NotADirectoryError):
        where = "" if root.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            f"data.path = {config.path}: no such file or folder{where}; "
            "try the path of a text file or of a folder of them, or data.source=stdlib"
        ) from None
    except OSError as error:
        _refuse(error)
    if not root.is_dir():
        document = _document(root, root.name)
        if document is None:
            raise ConfigError(f"data.path = {config.path}: must be a file or a folder; try a text file")
        if not document.stop:
            raise ConfigError(f"data.path = {config.path}: the file is empty; try a file with text in it")
        return [document]
    pattern = config.pattern.removeprefix("**/")  # the search is recursive as it is
    if not pattern:
        raise ConfigError(f"data.pattern = {config.pattern}: must match names of files; try *.txt")
    found = [PurePosixPath(name) for name in _walk(root, prune=())]
    matching = [str(name) for name in found if name.match(pattern)]
    if not matching:
        suffixes = Counter(name.suffix for name in found)
        would_do = f"data.pattern=*{suffixes.most_common(1)[0][0]}" if suffixes else "a folder with text files in it"
        raise ConfigError(
            f"data.pattern = {config.pattern}: must match a file, and matches none of the {len(found)} "
            f"below data.path = {config.path}; try {would_do}"
        )
    documents = _non_empty(root, matching)
    if not documents:
        raise ConfigError(
            f"data.path = {config.path}: holds no text, every file that matches data.pattern = {config.pattern} "
            f"is empty ({len(matching)} of them); try a folder with text in it"
        )
    return documents


def _walk(root: Path, *, prune: Container[str]) -> Iterator[str]:
    """Yields the names of all files below `root`, outside folders named in `prune`."""
    for folder, folders, files in os.walk(root, onerror=_refuse):  # without onerror, what cannot be listed is left out
        folders[:] = [name for name in folders if name not in prune]
        for file in files:
            yield Path(folder, file).relative_to(root).as_posix()


def _non_empty(root: Path, names: Iterable[str]) -> list[Document]:
    documents = (_document(root / name, name) for name in sorted(names))
    return [document for document in documents if document is not None and document.stop]


def _document(path: Path, name: str) -> Document | None:
    """Returns None for anything but a regular file, because opening a pipe would wait for ever."""
    try:
        status = path.stat()
    except OSError as error:
        _refuse(error)
    if not stat.S_ISREG(status.st_mode):
        return None
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: cannot be read (Permission denied); make it readable or take it out of the corpus")
    return Document(name=name, path=path, stop=status.st_size)


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename}: cannot be read ({error.strerror}); make it readable or take it out of the corpus"
    ) from error
