"""What `tokenize` reads: files of text, of JSON lines and of Parquet, and data sets of Hugging Face's `datasets`, cut
into pieces that worker processes read on their own.

The order of the pieces follows from the inputs alone: the arguments in their order, the files of a folder by name.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, Protocol

from parallel3d.data.tokenizers import import_extra
from parallel3d.errors import ConfigError, DataError

InputFormat = Literal["auto", "text", "jsonl", "parquet", "datasets"]
PIECE_BYTES = 8 << 20  # one worker encodes so much text at a time: a few seconds, which a kill loses at most
_BLOCK_BYTES = 1 << 20
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


class InputPiece(Protocol):
    """A part of the inputs that one worker reads: some whole documents."""

    def documents(self) -> Iterator[str]:
        """Yields the texts of the documents in their order. Raises DataError where the input is not what it should
        be."""


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
    is not there, or a folder without a file that matches, DataError for a folder that cannot be listed."""
    found = []
    for name in inputs:
        path = Path(name).expanduser().absolute()
        if not path.exists():
            raise ConfigError(f"{name}: no such file or folder{_where(name)}; try a file or a folder of texts")
        if path.is_file():
            found.append(_input_file(path, reading))
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
            yield SizedPiece(TextFiles(tuple(file.path for file in together)), sum(file.size for file in together))
            together.clear()

    for file in files:
        if file.format == "text" and reading.separator is None and file.path.suffix not in _PACKED:
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

    def documents(self) -> Iterator[str]:
        for path in self.paths:
            try:
                raw = path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error) from None
            yield _as_text(raw, str(path))


@dataclass(frozen=True)
class SeparatedText:
    """The part of a text file that begins and ends where documents do."""

    path: Path
    data: bytes
    separator: bytes

    def documents(self) -> Iterator[str]:
        text = _as_text(self.data, str(self.path))
        yield from (part.strip("\n") for part in text.split(self.separator.decode())) if self.separator else [text]


@dataclass(frozen=True)
class JsonLines:
    """Some lines of a file that has a JSON object in each."""

    path: Path
    data: bytes
    first_line: int  # counted from 1
    field: str

    def documents(self) -> Iterator[str]:
        for number, line in enumerate(self.data.split(b"\n"), self.first_line):
            if not line.strip():
                continue
            where = f"{self.path}, line {number}"
            try:
                found = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # that of an encoding among them
                raise DataError(f"{where}: is no JSON ({error}); mend or delete that line") from None
            if not isinstance(found, dict):
                raise DataError(f'{where}: must be a JSON object, such as {{"text": ...}}, one in each line')
            yield _field_of(found, self.field, where)


@dataclass(frozen=True)
class RowGroup:
    """A row group of a Parquet file."""

    path: Path
    group: int
    first_row: int  # the file's rows are counted from 0
    field: str

    def documents(self) -> Iterator[str]:
        row = self.first_row
        try:
            for batch in _open_parquet(self.path).iter_batches(1024, row_groups=[self.group], columns=[self.field]):
                for value in batch.column(0).to_pylist():
                    yield _field_of({self.field: value}, self.field, f"{self.path}, row {row}")
                    row += 1
        except OSError as error:  # that of pyarrow for a damaged page among them
            raise DataError(f"{self.path}, row {row}: cannot be read ({error}); make the file again") from None


@dataclass(frozen=True)
class DataSetRows:
    """Some rows of a data set of Hugging Face's `datasets`."""

    path: Path
    split: str
    rows: range
    field: str

    def documents(self) -> Iterator[str]:
        texts = _open_data_set(self.path, self.split)[self.rows.start : self.rows.stop][self.field]
        for row, value in zip(self.rows, texts, strict=True):
            yield _field_of({self.field: value}, self.field, f"{self.path}, row {row}")


def _format_of_name(path: PurePath) -> InputFormat | None:
    """Returns the format that a file's name says, packed or not; None where it says nothing."""
    suffix = PurePath(path.stem).suffix if path.suffix in _PACKED else path.suffix
    return _OF_SUFFIX.get(suffix.lower())


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
            return JsonLines(path, data, line, reading.field)
        return SeparatedText(path, data, border)

    position = 0
    for block, position in _blocks(path):
        left += block
        if len(left) >= PIECE_BYTES and border:
            cut = left.rfind(border) + len(border)
            if cut >= len(border):
                data = bytes(left[:cut])
                yield SizedPiece(piece(data), position - done)
                del left[:cut]
                done, line = position, line + data.count(b"\n")
    if left:
        yield SizedPiece(piece(bytes(left)), position - done)


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields the unpacked content of a file block by block, each with the bytes that the file itself was read to.
    Raises DataError for a file that cannot be read, or is damaged or cut off."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                with gzip.open(raw) as unpacked:
                    while block := unpacked.read(_BLOCK_BYTES):
                        yield block, raw.tell()
            elif path.suffix == ".zst":
                yield from ((block, raw.tell()) for block in _unpacked_zst(path, raw))
            else:
                while block := raw.read(_BLOCK_BYTES):
                    yield block, raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}); fetch or make it again") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unpacked_zst(path: Path, raw: Any) -> Iterator[bytes]:
    """Yields the content of a file of zstd frames. The library's own reader takes a file that is cut off for whole."""
    zstandard = import_extra("zstandard", str(path))
    frame, packed = zstandard.ZstdDecompressor().decompressobj(), b""
    begun = False
    try:
        while packed := packed or raw.read(_BLOCK_BYTES):
            begun = True
            if block := frame.decompress(packed):
                yield block
            packed = b""
            if frame.eof:
                packed, begun = frame.unused_data, False
                frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: cannot be unpacked ({error}); fetch or make it again") from None
    if begun:
        raise DataError(f"{path}: cannot be unpacked (it ends within a frame); fetch or make it again")


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
        raise DataError(f"{path}: cannot be read as Parquet ({error}); fetch or make it again") from None


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
    datasets = import_extra("datasets", str(path))
    datasets.disable_progress_bars()
    try:
        found = datasets.load_from_disk(path) if _is_saved_data_set(path) else datasets.load_dataset(str(path))
    except Exception as error:  # the library raises errors of many kinds
        raise DataError(f"{path}: cannot be opened by the library datasets ({error}); save it again") from None
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(f"--split {split}: {path} has none of that name; try --split {' or '.join(found)}")
        found = found[split]
    return found


def _as_text(raw: bytes, where: str) -> str:
    """Decodes UTF-8. Raises DataError for what is no text, such as a picture or an archive."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is no text in UTF-8 (byte {error.start:,}); convert it or leave it out") from None
    if (at := text.find("\0")) >= 0:
        raise DataError(f"{where}: is no text (character {at:,} is NUL); leave it out")
    return text


def _field_of(found: dict[str, Any], field: str, where: str) -> str:
    if field not in found:
        raise _no_field(field, list(found), where)
    text = found[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: {field} must be a text, and is {json.dumps(text, default=str)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: {field} holds half of a surrogate pair, which is no character; mend it") from None
    return text


def _no_field(field: str, names: list[str], where: str) -> DataError:
    known = ", ".join(names[:8])
    tries = f"; try --field {names[0]}" if names else ""
    return DataError(f"{where}: has no field {field}, but {known or 'none at all'}{tries}")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror or error}); make it readable or leave it out")


def _where(name: str) -> str:
    return "" if Path(name).is_absolute() else f" in {Path.cwd()}"
