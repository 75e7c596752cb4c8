"""Finds and reads the inputs of `tokenize`: text files, JSON lines, Parquet files, and data sets
saved with Hugging Face `datasets`.

Documents are in the order of the arguments, and within a folder in that of the file names.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from parallel3d.data.source import walk_files
from parallel3d.data.tokenizers import import_extra
from parallel3d.errors import ConfigError, DataError

# Minimum number of characters of a piece, except the last: a few seconds of encoding.
PIECE_CHARACTERS = 8 << 20
_MOST_BYTES = 256 << 20  # Maximum bytes of a document, or the size of its file if that is larger.
_LINES = (".jsonl", ".ndjson", ".json")
_ROWS = (".parquet", ".arrow")
_TEXTS = (".txt", ".md")
_PACKED = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options that define the documents in the inputs."""

    pattern: str | None  # Glob of the files to read in a folder; None: all files of known formats.
    field: str  # Name of the text field of a JSON line or a row.
    errors: Literal["strict", "replace"]  # Handling of text that is not UTF-8.


class InputError(DataError):
    """An error in the inputs. To continue, the inputs or the options must change."""


@dataclass(frozen=True)
class InputFile:
    """An input file, with the size and modification time that reveal a change."""

    path: Path
    size: int
    modified_ns: int


class Piece(NamedTuple):
    """Documents that one process encodes, and the number of input bytes read up to their end."""

    texts: list[str]
    read_bytes: int


def find_inputs(inputs: Sequence[str], reading: Reading) -> list[InputFile]:
    """Returns the files that `inputs` name. Raises ConfigError for a path that does not exist or a
    folder without matching files, and DataError for a folder that cannot be listed."""
    found = []
    for name in inputs:
        path = Path(name).expanduser().absolute()
        if not path.is_file() and not path.is_dir():
            raise ConfigError(f"{name}: no such file or folder; try a text file")
        for file in [path] if path.is_file() else _files_of(path, reading.pattern):
            status = file.stat()
            found.append(InputFile(file, status.st_size, status.st_mtime_ns))
    return found


def _files_of(folder: Path, pattern: str | None) -> list[Path]:
    """Returns the files below a folder that match the pattern, or that have a known format if it is
    None. Of a saved data set, returns only the Arrow files.
    """
    if (folder / "dataset_dict.json").is_file():
        raise ConfigError(f"{folder}: contains one data set per split; try {folder / 'train'}")
    names = sorted(walk_files(folder, lambda name: name.startswith(".")))
    files = [folder / name for name in names if (folder / name).is_file()]
    if (folder / "state.json").is_file():  # The folder is a data set that `datasets` saved.
        pattern = "*.arrow"
    if pattern is None:
        matching = [file for file in files if _suffix(file) in (*_LINES, *_ROWS, *_TEXTS)]
    else:
        matching = [file for file in files if file.match(pattern.removeprefix("**/"))]
    if not matching:
        raise ConfigError(
            f"{folder}: none of its {len(files)} files has a known format or matches --pattern "
            f"{pattern}; try --pattern '*'"
        )
    return matching


def _suffix(path: Path) -> str:
    """Returns the suffix that names the format of a file, for example `.jsonl` for `a.jsonl.gz`."""
    is_packed = path.suffix.lower() in _PACKED
    return (path.with_suffix("") if is_packed else path).suffix.lower()


def pieces(files: list[InputFile], reading: Reading) -> Iterator[Piece]:
    """Yields all non-empty documents, grouped into pieces. Raises InputError for a file that cannot
    be read.
    """
    texts: list[str] = []
    characters = before = 0
    for file in files:
        for text, position in _documents(file, reading):
            if text:
                texts.append(text)
                characters += len(text)
            if characters >= PIECE_CHARACTERS:
                yield Piece(texts, before + position)
                texts = []
                characters = 0
        before += file.size
    if texts:
        yield Piece(texts, before)


def _documents(file: InputFile, reading: Reading) -> Iterator[tuple[str, int]]:
    """Yields the documents of a file, each with the number of bytes read up to its end."""
    path = file.path
    try:
        if _suffix(path) in _ROWS:
            yield from _rows(file, reading.field)
            return
        with path.open("rb") as raw:
            unpacked = _unpacked(path, raw)
            most = max(file.size, _MOST_BYTES)
            if _suffix(path) not in _LINES:
                text = _decode(_limited(unpacked.read(most + 1), most, path), path, reading)
                yield text.removeprefix("\ufeff"), raw.tell()
                return
            number = 0
            while line := unpacked.readline(most + 1):
                number += 1
                where = f"{path}, line {number}"
                text = _decode(_limited(line, most, where), where, reading).removeprefix("\ufeff")
                if text.strip():
                    yield _field_of(text, reading.field, where), raw.tell()
    # pyarrow's errors are subclasses of these.
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); make it readable, download it again or leave it out"
        ) from None


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        pyarrow = import_extra("pyarrow", str(path))
        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    return raw


def _limited(data: bytes, most: int, where: object) -> bytes:
    if len(data) > most:
        raise InputError(f"{where}: longer than {most >> 20} MiB; split it, or leave the file out")
    return data


def _decode(data: bytes, where: object, reading: Reading) -> str:
    """Decodes UTF-8 text. Invalid bytes and NUL characters, which binary files contain, raise
    InputError or are replaced, depending on `reading.errors`.
    """
    try:
        text = data.decode(errors=reading.errors)
    except UnicodeDecodeError as error:
        raise _not_text(where, f"byte {error.start:,} is not UTF-8") from None
    if "\0" in text and reading.errors == "strict":
        raise _not_text(where, f"character {text.index(chr(0)):,} is NUL")
    return text.replace("\0", "\ufffd")


def _not_text(where: object, fault: str) -> InputError:
    return InputError(
        f"{where}: not text ({fault}); convert it or leave it out, or try --errors replace"
    )


def _field_of(text: str, field: str, where: str) -> str:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: not valid JSON ({error}); correct or delete that line"
        ) from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: must be a JSON object; correct or delete that line")
    _check_field(field, list(found), where)
    return _checked_text(found[field], field, where)


def _rows(file: InputFile, field: str) -> Iterator[tuple[str, int]]:
    """Yields the documents of a Parquet file or of an Arrow stream written by `datasets`, each with
    an estimate of the number of bytes read.
    """
    path = file.path
    row = 0
    if path.suffix.lower() == ".arrow":
        pyarrow = import_extra("pyarrow", str(path))
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
        names = table.column_names
        rows = table.num_rows
        batches = table.to_batches(1024)
    else:
        parquet = import_extra("pyarrow.parquet", str(path)).ParquetFile(path)
        names = parquet.schema_arrow.names
        rows = parquet.metadata.num_rows
        columns = [field] if field in names else None
        batches = parquet.iter_batches(1024, columns=columns)
    _check_field(field, names, str(path))
    for batch in batches:
        values: list[Any] = batch.column(batch.schema.get_field_index(field)).to_pylist()
        for value in values:
            yield _checked_text(value, field, f"{path}, row {row}"), file.size * row // rows
            row += 1


def _checked_text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        shown = json.dumps(value, default=str)[:40]
        raise InputError(f"{where}: {field} must be text, but is {shown}")
    if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        raise InputError(f"{where}: {field} contains an unpaired surrogate; remove it")
    return value


def _check_field(field: str, names: list[str], where: str) -> None:
    if field not in names:
        tries = f", but {', '.join(names[:8])}; try --field {names[0]}" if names else ""
        raise InputError(f"{where}: has no field {field}{tries}")
