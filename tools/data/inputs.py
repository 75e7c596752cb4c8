"""What `tokenize` reads: files of text, of JSON lines and of Parquet, and data sets of Hugging Face's `datasets`, cut
into pieces that worker processes read on their own.

The order of the pieces follows from the inputs alone: the arguments in their order, the files of a folder by name.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, Protocol

from parallel3d.data.tokenizers import import_extra
from parallel3d.errors import ConfigError, DataError

InputFormat = Literal["auto", "text", "jsonl", "parquet", "datasets"]
Errors = Literal["strict", "skip", "replace"]
PIECE_BYTES = 8 << 20  # one worker encodes so much text at a time: a few seconds, which a kill loses at most
_BLOCK_BYTES = 1 << 20
_PACKED_BYTES = 256  # zstd unpacks these to 8 MiB at most
_MOST_BYTES = 256 << 20  # of a document in a file that is read block by block
_OF_SUFFIX: dict[str, InputFormat] = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"},
    **{".txt": "text", ".md": "text"},
}
_PACKED = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are found in the inputs."""

    format: InputFormat = "auto"  # auto: by each file's name
    pattern: str | None = None  # the names of a folder's files; None: those whose format is known by their name
    field: str = "text"  # of a JSON line, a Parquet file or a data set
    separator: str | None = None  # between the documents of a text file; None: a file is one document
    split: str = "train"  # of a data set
    errors: Errors = "strict"  # what becomes of text that is not UTF-8


class InputError(DataError):
    """The inputs have a fault: they or the options have to change."""


class NotTextError(InputError):
    """A document is not text in UTF-8."""


class InputPiece(Protocol):
    """A part of the inputs that one worker reads: some whole documents."""

    def documents(self, faulty: Counter[str]) -> Iterator[str]:
        """Yields the texts of the documents in their order. Counts those in `faulty`, by file, that are not UTF-8 and
        are skipped or repaired. Raises InputError if the input has a fault."""


class SizedPiece(NamedTuple):
    """A piece, and the bytes of the inputs that have been read for it."""

    piece: InputPiece
    input_bytes: int


@dataclass(frozen=True)
class InputFile:
    """A file, or the folder of a data set, with what shows that it has changed."""

    path: Path
    format: InputFormat
    size: int
    modified_ns: int


def find_inputs(inputs: tuple[str, ...], reading: Reading) -> list[InputFile]:
    """Returns the files that `inputs` name, and the folders that `datasets` opens. Raises ConfigError for a path that
    is not there, or a folder without a file that matches, InputError for a folder that cannot be listed."""
    found = []
    for name in inputs:
        path = Path(name).expanduser().absolute()
        if not path.exists():
            raise ConfigError(f"{name}: no such file or folder{_where(name)}; try a file or a folder of texts")
        if path.is_file():
            found.append(_input_file(path, reading))
        elif not path.is_dir():
            raise ConfigError(f"{name}: is neither a file nor a folder; save its content to a file, and give that")
        elif reading.format == "datasets" or (reading.format == "auto" and _is_saved_data_set(path)):
            parts = [each.stat() for each in sorted(path.rglob("*")) if each.is_file()]
            newest = max((part.st_mtime_ns for part in parts), default=0)
            found.append(InputFile(path, "datasets", sum(part.st_size for part in parts), newest))
        else:
            files = sorted(_below(path), key=lambda file: file.relative_to(path).as_posix())
            if reading.pattern is not None:
                matching = [file for file in files if file.match(reading.pattern.removeprefix("**/"))]
            elif reading.format in ("auto", "text"):
                kinds = {"text"} if reading.format == "text" else set(_OF_SUFFIX.values())
                matching = [file for file in files if _format_of_name(file) in kinds]
            else:
                matching = [file for file in files if _format_of_name(file) == reading.format]
            if not matching:
                wanted = f"matches --pattern {reading.pattern}" if reading.pattern else "says its format by its name"
                suffix = next((file.suffix for file in files if file.suffix), "")
                tries = f"--pattern '*{suffix}'" if suffix else "a folder with files in it"
                raise ConfigError(f"{name}: none of its {len(files)} files {wanted}; try {tries}")
            found += [_input_file(file, reading) for file in matching]
    return found


def pieces(files: list[InputFile], reading: Reading) -> Iterator[SizedPiece]:
    """Yields the pieces of all `files` in their order. Small text files share a piece."""
    together: list[InputFile] = []

    def text_files() -> Iterator[SizedPiece]:
        if together:
            paths = tuple(file.path for file in together)
            yield SizedPiece(TextFiles(paths, reading.errors), sum(file.size for file in together))
            together.clear()

    for file in files:
        if file.format == "text" and reading.separator is None and not _packing(file.path):
            if sum(each.size for each in (*together, file)) > PIECE_BYTES:
                yield from text_files()
            together.append(file)
            continue
        yield from text_files()
        if file.format == "text":
            yield from _pieces_of_stream(file.path, (reading.separator or "").encode(), reading)
        elif file.format == "jsonl":
            yield from _pieces_of_stream(file.path, b"\n", reading)
        elif file.format == "parquet":
            yield from _row_groups(file, reading.field)
        else:
            yield from _rows(file, reading)
    yield from text_files()


@dataclass(frozen=True)
class TextFiles:
    """Files that are one document each."""

    paths: tuple[Path, ...]
    errors: Errors

    def documents(self, faulty: Counter[str]) -> Iterator[str]:
        for path in self.paths:
            try:
                raw = path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error) from None
            yield from _as_text(raw.removeprefix(codecs.BOM_UTF8), path, self.errors, faulty)


@dataclass(frozen=True)
class SeparatedText:
    """The part of a text file that begins and ends where documents do."""

    path: Path
    data: bytes
    separator: bytes
    errors: Errors

    def documents(self, faulty: Counter[str]) -> Iterator[str]:
        parts = [self.data]
        if self.separator:
            parts = [part.strip(b"\r\n") for part in self.data.split(self.separator)]
        for part in parts:
            yield from _as_text(part, self.path, self.errors, faulty)


@dataclass(frozen=True)
class JsonLines:
    """Some lines of a file that has a JSON object in each."""

    path: Path
    data: bytes
    first_line: int  # counted from 1
    field: str
    errors: Errors

    def documents(self, faulty: Counter[str]) -> Iterator[str]:
        for number, line in enumerate(self.data.split(b"\n"), self.first_line):
            if line.strip():
                for text in _as_text(line, self.path, self.errors, faulty, number):
                    yield self._text_of(text, f"{self.path}, line {number}")

    def _text_of(self, line: str, where: str) -> str:
        remedy = "correct or delete that line, or select other files by --pattern"
        try:
            found = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: is not JSON ({error}); {remedy}") from None
        if not isinstance(found, dict):
            raise InputError(f'{where}: must be a JSON object, such as {{"text": "..."}}; {remedy}')
        return _field_of(found, self.field, where)


@dataclass(frozen=True)
class RowGroup:
    """A row group of a Parquet file."""

    path: Path
    group: int
    first_row: int  # the file's rows are counted from 0
    field: str

    def documents(self, faulty: Counter[str]) -> Iterator[str]:
        row = self.first_row
        try:
            for batch in _open_parquet(self.path).iter_batches(1024, row_groups=[self.group], columns=[self.field]):
                for value in batch.column(0).to_pylist():
                    yield _field_of({self.field: value}, self.field, f"{self.path}, row {row}")
                    row += 1
        except (OSError, UnicodeDecodeError) as error:  # that of pyarrow for a damaged page among them
            raise InputError(f"{self.path}, row {row}: cannot be read ({error}); make the file again") from None


@dataclass(frozen=True)
class DataSetRows:
    """Some rows of a data set of Hugging Face's `datasets`."""

    path: Path
    split: str
    rows: range
    field: str

    def documents(self, faulty: Counter[str]) -> Iterator[str]:
        texts = _open_data_set(self.path, self.split)[self.rows.start : self.rows.stop][self.field]
        for row, value in zip(self.rows, texts, strict=True):
            yield _field_of({self.field: value}, self.field, f"{self.path}, row {row}")


def _format_of_name(path: PurePath) -> InputFormat | None:
    """Returns the format that a file's name says, packed or not; None where it says nothing."""
    suffix = PurePath(path.stem).suffix if _packing(path) else path.suffix
    return _OF_SUFFIX.get(suffix.lower())


def _packing(path: PurePath) -> str | None:
    """Returns `.gz` or `.zst` for a file that is packed so by its name, else None."""
    suffix = path.suffix.lower()
    return suffix if suffix in _PACKED else None


def _input_file(path: Path, reading: Reading) -> InputFile:
    status = path.stat()
    kind = reading.format if reading.format != "auto" else _format_of_name(path) or "text"
    return InputFile(path, kind, status.st_size, status.st_mtime_ns)


def _is_saved_data_set(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _below(folder: Path) -> Iterator[Path]:
    """Yields the regular files below `folder`, outside hidden folders."""
    try:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                yield from _below(path)
            elif path.is_file():
                yield path
    except OSError as error:
        raise _unreadable(folder, error) from None


def _pieces_of_stream(path: Path, border: bytes, reading: Reading) -> Iterator[SizedPiece]:
    """Cuts a file, packed or not, behind a `border` of documents; without a border it is one piece."""
    left, done, line = bytearray(), 0, 1

    def piece(data: bytes) -> InputPiece:
        if border == b"\n":
            return JsonLines(path, data, line, reading.field, reading.errors)
        text = data if done else data.removeprefix(codecs.BOM_UTF8)
        return SeparatedText(path, text, border, reading.errors)

    position = 0
    for block, position in _blocks(path):
        left += block
        if len(left) >= PIECE_BYTES and border and border in left:
            # A separator such as "--" may overlap itself; then the last one is found only by splitting.
            rest = left.rpartition(border)[2] if len(border) == 1 else left.split(border)[-1]
            data = bytes(left[: len(left) - len(rest)])
            yield SizedPiece(piece(data), position - done)
            left = rest
            done, line = position, line + data.count(b"\n")
        if len(left) > _MOST_BYTES:
            raise InputError(
                f"{path}, line {line}: the document that begins there is longer than {_MOST_BYTES >> 20} MiB; "
                f"cut it, or leave the file out"
            )
    if left:
        yield SizedPiece(piece(bytes(left)), position - done)


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields the unpacked content of a file block by block, each with the bytes that the file itself was read to.
    Raises InputError for a file that cannot be read, or is damaged or cut off."""
    try:
        with path.open("rb") as raw:
            if _packing(path) == ".gz":
                with gzip.open(raw) as unpacked:
                    while block := unpacked.read(_BLOCK_BYTES):
                        yield block, raw.tell()
            elif _packing(path) == ".zst":
                yield from ((block, raw.tell()) for block in _unpacked_zst(path, raw))
            else:
                while block := raw.read(_BLOCK_BYTES):
                    yield block, raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: cannot be unpacked ({error}); fetch or make it again") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unpacked_zst(path: Path, raw: Any) -> Iterator[bytes]:
    """Yields the content of a file of zstd frames, in blocks of some 8 MiB at most. The library's own reader takes a
    file that is cut off for whole."""
    zstandard = import_extra("zstandard", str(path))
    frame, packed = zstandard.ZstdDecompressor().decompressobj(), b""
    begun, block = False, bytearray()
    try:
        while packed := packed or raw.read(_PACKED_BYTES):
            begun = True
            block += frame.decompress(packed)
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
            packed = b""
            if frame.eof:
                packed, begun = frame.unused_data, False
                frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise InputError(f"{path}: cannot be unpacked ({error}); fetch or make it again") from None
    if begun:
        raise InputError(f"{path}: cannot be unpacked (it ends within a frame); fetch or make it again")
    yield bytes(block)


def _row_groups(file: InputFile, field: str) -> Iterator[SizedPiece]:
    parquet = _open_parquet(file.path)
    names = parquet.schema_arrow.names
    if field not in names:
        raise _no_field(field, names, str(file.path))
    groups, row = parquet.metadata.num_row_groups, 0
    for group in range(groups):
        share = file.size * (group + 1) // groups - file.size * group // groups
        yield SizedPiece(RowGroup(file.path, group, row, field), share)
        row += parquet.metadata.row_group(group).num_rows


@cache
def _open_parquet(path: Path) -> Any:
    library = import_extra("pyarrow.parquet", str(path))
    try:
        return library.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise InputError(f"{path}: cannot be read as Parquet ({error}); fetch or make it again") from None


def _rows(file: InputFile, reading: Reading) -> Iterator[SizedPiece]:
    found = _open_data_set(file.path, reading.split)
    if reading.field not in found.column_names:
        raise _no_field(reading.field, found.column_names, str(file.path))
    count = len(found)
    texts = found.select_columns([reading.field])
    step = max(1, PIECE_BYTES * count // max(texts.data.nbytes, 1))
    for first in range(0, count, step):
        rows = range(first, min(first + step, count))
        share = file.size * rows.stop // count - file.size * rows.start // count
        yield SizedPiece(DataSetRows(file.path, reading.split, rows, reading.field), share)


@cache
def _open_data_set(path: Path, split: str) -> Any:
    """Opens a data set that was saved by `datasets`, or a folder of files that it opens. Nothing is downloaded."""
    if path.suffix == ".py" or (path / f"{path.name}.py").exists():  # which releases before 4 would run
        raise InputError(f"{path}: has a loading script, and no code of a data set is run; save it as Parquet")
    datasets = import_extra("datasets", str(path))
    datasets.disable_progress_bars()
    try:
        found = datasets.load_from_disk(path) if _is_saved_data_set(path) else datasets.load_dataset(str(path))
    except Exception as error:  # the library raises errors of many kinds
        raise InputError(f"{path}: cannot be opened by the library datasets ({error}); save it again") from None
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(f"--split {split}: {path} has none of that name; try --split {' or '.join(found)}")
        found = found[split]
    return found


def _as_text(raw: bytes, path: Path, errors: Errors, faulty: Counter[str], line: int | None = None) -> Iterator[str]:
    """Yields the text of `raw`. Text that is not UTF-8, or holds NUL as a picture does, is skipped or repaired as
    `errors` says, or raises NotTextError."""
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


def _field_of(found: dict[str, Any], field: str, where: str) -> str:
    if field not in found:
        raise _no_field(field, list(found), where)
    text = found[field]
    if not isinstance(text, str):
        raise InputError(f"{where}: {field} must be a text, and is {json.dumps(text, default=str)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: {field} holds half of a surrogate pair, which is no character; mend it") from None
    return text


def _no_field(field: str, names: list[str], where: str) -> InputError:
    known = ", ".join(names[:8])
    tries = f"; try --field {names[0]}" if names else ""
    return InputError(f"{where}: has no field {field}, but {known or 'none at all'}{tries}")


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read ({error.strerror or error}); make it readable or leave it out")


def _where(name: str) -> str:
    return "" if Path(name).is_absolute() else f" in {Path.cwd()}"
