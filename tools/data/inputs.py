"""What `tokenize` reads: files of text, of JSON lines and of Parquet, and data sets of Hugging
Face's `datasets`, cut into pieces that worker processes read on their own.

The order of the pieces follows from the inputs: the arguments in their order, the files of a folder
by name.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from parallel3d.data.source import walk_files
from parallel3d.data.tokenizers import import_extra
from parallel3d.errors import ConfigError, DataError

InputFormat = Literal["auto", "text", "jsonl", "parquet", "datasets"]
Errors = Literal["strict", "skip", "replace"]
# Yields the texts of some documents in their order, and counts by file those that are not UTF-8 and
# are skipped or repaired. Raises InputError if the input has a fault.
InputPiece = Callable[[Counter[str]], Iterator[str]]
PIECE_BYTES = 8 << 20  # a worker encodes them in a few seconds, which a kill loses at most
_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 256 << 20  # of a document in a file that is read block by block
_FORMATS: dict[str, InputFormat] = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"},
    **{".txt": "text", ".md": "text"},
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are found in the inputs."""

    format: InputFormat = "auto"  # auto: by each file's name
    # the names of a folder's files; None: those with a known format
    pattern: str | None = None
    field: str = "text"  # of a JSON line, a Parquet file or a data set
    # between the documents of a text file; None: a file is one document
    separator: str | None = None
    split: str = "train"  # of a data set
    errors: Errors = "strict"  # what becomes of text that is not UTF-8


class InputError(DataError):
    """The inputs have a fault: they or the options have to change."""


class NotTextError(InputError):
    """A document is not text in UTF-8."""


class SizedPiece(NamedTuple):
    """A piece, and the bytes of the inputs that have been read for it."""

    documents: InputPiece
    input_bytes: int


@dataclass(frozen=True)
class InputFile:
    """A file, or the folder of a data set, with what shows that it has changed."""

    path: Path
    format: InputFormat
    size: int
    modified_ns: int


def find_inputs(inputs: Sequence[str], reading: Reading) -> list[InputFile]:
    """Returns the files that `inputs` name, and the folders that `datasets` opens. Raises
    ConfigError for a path that does not exist, or a folder without a file that matches, InputError
    for a folder that cannot be listed."""
    found = []
    for name in inputs:
        path = Path(name).expanduser().absolute()
        if path.is_file():
            found.append(_input_file(path, reading.format))
        elif not path.is_dir():
            words = "is neither a file nor a folder"
            if not path.exists():
                words = f"no such file or folder at {path}"
            raise ConfigError(f"{name}: {words}; try a file or a folder of texts")
        elif reading.format == "datasets" or (
            reading.format == "auto" and _is_saved_data_set(path)
        ):
            parts = [part.stat() for part in path.rglob("*") if part.is_file()]
            newest = max((part.st_mtime_ns for part in parts), default=0)
            size = sum(part.st_size for part in parts)
            found.append(InputFile(path, "datasets", size, newest))
        else:
            files = _matching_files(path, name, reading)
            found += [_input_file(file, reading.format) for file in files]
    return found


def _matching_files(folder: Path, name: str, reading: Reading) -> list[Path]:
    """Returns the files below a folder that the pattern selects, or whose name has the format."""
    names = sorted(walk_files(folder, lambda name: name.startswith(".")))
    files = [folder / name for name in names if (folder / name).is_file()]
    if reading.pattern is not None:
        pattern = reading.pattern.removeprefix("**/")
        matching = [file for file in files if file.match(pattern)]
        wanted = f"matches --pattern {reading.pattern}"
    else:
        formats = set(_FORMATS.values()) if reading.format == "auto" else {reading.format}
        matching = [file for file in files if _format_of(file) in formats]
        wanted = "says its format by its name"
    if not matching:
        suffix = next((file.suffix for file in files if file.suffix), "")
        tries = f"--pattern '*{suffix}'" if suffix else "a folder with files in it"
        raise ConfigError(f"{name}: none of its {len(files)} files {wanted}; try {tries}")
    return matching


def pieces(files: list[InputFile], reading: Reading) -> Iterator[SizedPiece]:
    """Yields the pieces of all `files` in their order. Small text files share a piece."""
    together: list[Path] = []
    size = 0
    for file in files:
        is_packed = _compression(file.path) is not None
        is_document = file.format == "text" and reading.separator is None and not is_packed
        if together and (not is_document or size + file.size > PIECE_BYTES):
            yield SizedPiece(partial(_read_texts, together, reading.errors), size)
            together, size = [], 0
        if is_document:
            together.append(file.path)
            size += file.size
        elif file.format == "parquet":
            yield from _row_groups(file, reading.field)
        elif file.format == "datasets":
            yield from _rows(file, reading)
        else:
            yield from _pieces_of_stream(file, reading)
    if together:
        yield SizedPiece(partial(_read_texts, together, reading.errors), size)


def _read_texts(paths: list[Path], errors: Errors, faulty: Counter[str]) -> Iterator[str]:
    """Yields files that are one document each."""
    for path in paths:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from None
        yield from _as_text(raw.removeprefix(codecs.BOM_UTF8), path, errors, faulty)


def _read_separated(
    path: Path, data: bytes, separator: bytes, errors: Errors, faulty: Counter[str]
) -> Iterator[str]:
    """Yields the documents of a part of a text file."""
    if not separator:
        yield from _as_text(data, path, errors, faulty)
        return
    for part in data.split(separator):
        yield from _as_text(part.strip(b"\r\n"), path, errors, faulty)


def _read_json_lines(
    path: Path, data: bytes, first_line: int, reading: Reading, faulty: Counter[str]
) -> Iterator[str]:
    """Yields the field of each line, which is a JSON object."""
    remedy = "correct or delete that line, or select other files by --pattern"
    for number, line in enumerate(data.split(b"\n"), first_line):
        where = f"{path}, line {number}"
        for text in _as_text(line, path, reading.errors, faulty, number):
            if not text.strip():
                continue
            try:
                found = json.loads(text.removeprefix("\ufeff"))
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: is not JSON ({error}); {remedy}") from None
            if not isinstance(found, dict):
                raise InputError(f"{where}: must be a JSON object; {remedy}")
            _check_field(reading.field, list(found), where)
            yield _checked_text(found[reading.field], reading.field, where)


def _read_row_group(
    path: Path, group: int, first_row: int, field: str, faulty: Counter[str]
) -> Iterator[str]:
    """Yields the texts of a row group of a Parquet file, whose rows are counted from 0."""
    row = first_row
    try:
        batches = _open_parquet(path).iter_batches(1024, row_groups=[group], columns=[field])
        for batch in batches:
            for value in batch.column(0).to_pylist():
                yield _checked_text(value, field, f"{path}, row {row}")
                row += 1
    except (OSError, UnicodeDecodeError) as error:  # also pyarrow's, for a damaged page
        raise InputError(
            f"{path}, row {row}: cannot be read ({error}); make the file again"
        ) from None


def _read_rows(
    path: Path, split: str, rows: range, field: str, faulty: Counter[str]
) -> Iterator[str]:
    """Yields the texts of some rows of a data set."""
    texts = _open_data_set(path, split)[rows.start : rows.stop][field]
    for row, value in zip(rows, texts, strict=True):
        yield _checked_text(value, field, f"{path}, row {row}")


def _format_of(path: Path) -> InputFormat | None:
    """Returns the format that a file's name says, compressed or not, or None."""
    name = path.with_suffix("") if _compression(path) else path
    return _FORMATS.get(name.suffix.lower())


def _compression(path: Path) -> str | None:
    return _COMPRESSIONS.get(path.suffix.lower())


def _input_file(path: Path, kind: InputFormat) -> InputFile:
    if kind == "auto":
        kind = _format_of(path) or "text"
    status = path.stat()
    return InputFile(path, kind, status.st_size, status.st_mtime_ns)


def _is_saved_data_set(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _pieces_of_stream(file: InputFile, reading: Reading) -> Iterator[SizedPiece]:
    """Cuts a file, compressed or not, after a border of documents; without a border it is one
    piece."""
    path, border = file.path, (reading.separator or "").encode()
    if file.format == "jsonl":
        border = b"\n"
    left, done, line, position = bytearray(), 0, 1, 0

    def piece(data: bytes) -> SizedPiece:
        documents = partial(_read_json_lines, path, data, line, reading)
        if file.format != "jsonl":
            text = data if done else data.removeprefix(codecs.BOM_UTF8)
            documents = partial(_read_separated, path, text, border, reading.errors)
        return SizedPiece(documents, position - done)

    for block, position in _blocks(path):
        left += block
        if len(left) >= PIECE_BYTES and border and border in left:
            # A separator such as "--" may overlap itself: only splitting finds the last one.
            rest = left.rpartition(border)[2] if len(border) == 1 else left.split(border)[-1]
            data = bytes(left[: len(left) - len(rest)])
            yield piece(data)
            left = rest
            done, line = position, line + data.count(b"\n")
        if len(left) > _MOST_BYTES:
            raise InputError(
                f"{path}, line {line}: the document that begins there is longer than "
                f"{_MOST_BYTES >> 20} MiB; cut it, or leave the file out"
            )
    if left:
        yield piece(bytes(left))


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields the uncompressed content of a file block by block, each with the bytes that the file
    itself was read to. Raises InputError for a file that cannot be read, is damaged or cut off."""
    compression = _compression(path)
    try:
        with path.open("rb") as raw:
            file: Any = raw
            if compression == "gzip":
                file = gzip.GzipFile(fileobj=raw)
            elif compression is not None:
                pyarrow = import_extra("pyarrow", str(path))
                file = pyarrow.CompressedInputStream(raw, compression)
            while block := file.read(_BLOCK_BYTES):
                yield block, raw.tell()
    except (OSError, ValueError, EOFError, zlib.error) as error:
        if compression is None or getattr(error, "errno", None):
            raise _unreadable(path, error) from None
        raise InputError(f"{path}: cannot be unpacked ({error}); fetch or make it again") from None


def _row_groups(file: InputFile, field: str) -> Iterator[SizedPiece]:
    parquet = _open_parquet(file.path)
    _check_field(field, parquet.schema_arrow.names, str(file.path))
    row, groups = 0, parquet.metadata.num_row_groups
    for group in range(groups):
        piece = partial(_read_row_group, file.path, group, row, field)
        yield SizedPiece(piece, file.size // groups)
        row += parquet.metadata.row_group(group).num_rows


@cache
def _open_parquet(path: Path) -> Any:
    library = import_extra("pyarrow.parquet", str(path))
    try:
        return library.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise InputError(
            f"{path}: cannot be read as Parquet ({error}); fetch or make it again"
        ) from None


def _rows(file: InputFile, reading: Reading) -> Iterator[SizedPiece]:
    found = _open_data_set(file.path, reading.split)
    _check_field(reading.field, found.column_names, str(file.path))
    count = len(found)
    texts = found.select_columns([reading.field])
    step = max(1, PIECE_BYTES * count // max(texts.data.nbytes, 1))
    for first in range(0, count, step):
        rows = range(first, min(first + step, count))
        piece = partial(_read_rows, file.path, reading.split, rows, reading.field)
        yield SizedPiece(piece, file.size * len(rows) // count)


@cache
def _open_data_set(path: Path, split: str) -> Any:
    """Opens a data set that was saved by `datasets`, or a folder of files that it opens. Nothing is
    downloaded."""
    datasets = import_extra("datasets", str(path))
    datasets.disable_progress_bars()
    try:
        if _is_saved_data_set(path):
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(str(path))
    except Exception as error:  # the library raises errors of many kinds
        raise InputError(
            f"{path}: cannot be opened by the library datasets ({error}); save it again"
        ) from None
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise ConfigError(
            f"--split {split}: {path} has none of that name; try --split {' or '.join(found)}"
        )
    return found[split]


def _as_text(
    raw: bytes, path: Path, errors: Errors, faulty: Counter[str], line: int | None = None
) -> Iterator[str]:
    """Yields the text of `raw`. Text that is not UTF-8, or holds NUL as a picture does, is skipped
    or repaired as `errors` says, or raises NotTextError."""
    try:
        text = raw.decode()
        if "\0" not in text:
            yield text
            return
        fault = f"character {text.index(chr(0)):,} is NUL"
    except UnicodeDecodeError as error:
        fault = f"byte {error.start:,} is not UTF-8"
    if errors == "strict":
        where = path if line is None else f"{path}, line {line}"
        remedy = "convert it or leave it out, or try --errors skip or --errors replace"
        raise NotTextError(f"{where}: is not text ({fault}); {remedy}")
    faulty[str(path)] += 1
    if errors == "replace":
        yield raw.decode(errors="replace").replace("\0", "\ufffd")


def _checked_text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{where}: {field} must be a text, and is {json.dumps(value, default=str)[:40]}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: {field} holds half of a surrogate pair; fix it") from None
    return value


def _check_field(field: str, names: list[str], where: str) -> None:
    if field not in names:
        known = ", ".join(names[:8])
        tries = f", but {known}; try --field {names[0]}" if names else ""
        raise InputError(f"{where}: has no field {field}{tries}")


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{path}: cannot be read ({reason}); make it readable or leave it out")
