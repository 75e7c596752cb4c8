"""The job of `tokenize`: all cores encode pieces of the inputs into a folder beside the goal; when all are there they
are joined, checked by the writer, and renamed into place.

Whatever the number of processes, and however often the job was killed, the files are the same: pieces depend on the
inputs alone, each is encoded on its own, and they are joined in their order.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from parallel3d.data.megatron import MegatronWriter
from parallel3d.data.token_files import TOKENIZER_JSON, FolderWriter, ShardTokenizer
from parallel3d.data.tokenizers import JsonTokenizer, Tokenizer, train_bpe
from parallel3d.errors import ConfigError, DataError
from parallel3d.launch.local import start_fork_server
from parallel3d.tools.data import inputs
from parallel3d.tools.data.chunks import Chunk, ChunkCounts, TokenizerChoice, encode_piece
from parallel3d.tools.data.display import TokenizeDisplay
from parallel3d.tools.data.inputs import InputError, InputFile, NotTextError, Reading, find_inputs, pieces
from parallel3d.tools.data.split import ValidationSplit

_SETTINGS = "command.json"  # the settings of the job that an unfinished folder belongs to


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """What the command line asks for."""

    inputs: tuple[str, ...]
    out: Path  # a folder, or Megatron's PREFIX
    reading: Reading
    tokenizer: TokenizerChoice
    train_bpe: int | None  # the size of the vocabulary of a BPE that is trained on the inputs first
    validation_fraction: float
    megatron: bool
    workers: int


def tokenize(job: TokenizeJob, say: Callable[[str], None]) -> None:
    """Runs the job to its end, from where an earlier run of the same job was stopped. Raises ConfigError for what
    cannot be done, InputError for an input that has a fault."""
    files = find_inputs(job.inputs, job.reading)
    partial = job.out.with_name(f"{job.out.name}.partial")
    goals = [job.out]
    if job.megatron:
        goals += [job.out.with_name(f"{job.out.name}.{suffix}") for suffix in ("idx", TOKENIZER_JSON, "bin")]
    settings = _settings(job, files)
    try:
        for goal in goals:
            if goal.exists() and _read_settings(partial) != settings:
                raise ConfigError(f"--out {job.out}: {goal} is there already; try another name, or delete it")
        _refuse_foreign_files(partial)
        chunks = partial / "chunks"
        chunks.mkdir(parents=True, exist_ok=True)
        with _alone(partial):
            _claim(partial, settings)
            if not goals[-1].exists():  # a kill between the last two steps leaves the goal and the folder of the job
                try:
                    choice = _tokenizer(job, files, partial, say)
                    count = _encode(job, files, choice, chunks, say)
                    _join([chunks / f"{index:08}.npz" for index in range(count)], choice.build(), job, partial)
                except (InputError, ConfigError):  # an input or an option has to change
                    _clear(partial)
                    raise
        _clear(partial)
    except NotTextError as error:
        if len(files) > 1:
            say(f"{error}; looking for all such files")
            error = NotTextError(_all_faulty(files, job.reading))
        raise error from None
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps for want of memory; the same command goes on, try fewer --workers"
        ) from None
    except OSError as error:
        raise ConfigError(f"--out {job.out}: cannot be written ({error.strerror}); try another folder") from error


def _all_faulty(files: list[InputFile], reading: Reading) -> str:
    """Returns an error that names all files with text that is not UTF-8."""
    faulty = Counter[str]()
    with suppress(InputError), TokenizeDisplay("read", sum(file.size for file in files)) as display:
        for piece, input_bytes in pieces(files, replace(reading, errors="skip")):
            deque(piece.documents(faulty), maxlen=0)
            display.advance(input_bytes)
    return "\n".join(["text is not UTF-8; try --errors skip or --errors replace, or convert or remove:", *faulty])


def _settings(job: TokenizeJob, files: list[InputFile]) -> dict[str, Any]:
    """Returns all that the result depends on, by the option that decides it, as JSON gives it back."""
    tokenizer = None if job.train_bpe else job.tokenizer.build()
    found = {
        "INPUT": [(str(file.path), file.size, file.modified_ns) for file in files],
        **{f"--{name}": value for name, value in asdict(job.reading).items()},
        "--tokenizer": tokenizer.sha256 if isinstance(tokenizer, JsonTokenizer) else job.tokenizer.name,
        "--end-of-text": job.tokenizer.mark,
        "--train-bpe": job.train_bpe,
        "--validation-fraction": job.validation_fraction,
        "--format": "megatron" if job.megatron else "flat",
        "bytes of a piece": inputs.PIECE_BYTES,
    }
    return json.loads(json.dumps(found))


def _clear(partial: Path) -> None:
    """Deletes the job's own folder, its settings last: until then the same command may be given again."""
    for entry in partial.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _SETTINGS:
            entry.unlink()
    shutil.rmtree(partial)


def _read_settings(partial: Path) -> dict[str, Any] | None:
    try:
        return json.loads((partial / _SETTINGS).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _refuse_foreign_files(partial: Path) -> None:
    """Raises ConfigError if a folder with the name of the job's own is someone else's, because it would be deleted."""
    own = ("chunks", "lock", f"{_SETTINGS}.unfinished")
    foreign = [path.name for path in partial.rglob("*") if path.name not in own]
    if foreign and not (partial / _SETTINGS).exists():
        raise ConfigError(f"--out: {partial} holds {foreign[0]}, which is not of this command; try another --out")


def _claim(partial: Path, settings: dict[str, Any]) -> None:
    """Makes the unfinished folder this job's own. Raises ConfigError where it is another's."""
    begun = _read_settings(partial)
    if begun is None:
        _write_whole(partial / _SETTINGS, json.dumps(settings))
        return
    others = [f"{key} {shown}" for key, shown in _differences(begun, settings)]
    if others:
        raise ConfigError(
            f"--out: {partial} holds the unfinished work of another command, with {', '.join(others)}; give that "
            f"command again to go on with it, or delete {partial}"
        )


def _differences(begun: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in begun.items():
        if settings.get(key) != value:
            yield key, "files that were others, or have changed since" if key == "INPUT" else json.dumps(value)


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that is whole whenever it is there."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Raises ConfigError where another process works on the same folder. The lock ends with the process."""
    with (partial / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out: another process is at work in {partial}; wait for it or end it") from None
        yield


def _tokenizer(job: TokenizeJob, files: list[InputFile], partial: Path, say: Callable[[str], None]) -> TokenizerChoice:
    """Returns the tokenizer of the job: where it is a tokenizer.json, the copy in the job's own folder. A BPE that an
    earlier run has trained is there already."""
    copy = partial / TOKENIZER_JSON
    if job.train_bpe is None:
        tokenizer = job.tokenizer.build()
        if not isinstance(tokenizer, JsonTokenizer):
            return job.tokenizer
        _write_whole(copy, tokenizer.path.read_text())
    elif not copy.exists():
        say(f"training a BPE of {job.train_bpe:,} ids")
        with TokenizeDisplay("read", sum(file.size for file in files)) as display:

            def texts() -> Iterator[str]:
                for piece, input_bytes in pieces(files, job.reading):
                    yield from piece.documents(Counter())
                    display.advance(input_bytes)

            _write_whole(copy, train_bpe(texts(), job.train_bpe))
    choice = TokenizerChoice(str(copy), job.tokenizer.mark)
    if job.train_bpe is not None and (found := choice.build().vocab_size) < job.train_bpe:
        say(f"the text has enough for {found:,} ids, not for {job.train_bpe:,}")
    return choice


def _encode(
    job: TokenizeJob, files: list[InputFile], choice: TokenizerChoice, chunks: Path, say: Callable[[str], None]
) -> int:
    """Encodes every piece that is not there yet, and returns the number of all."""
    for left in chunks.glob("*.npz.*"):  # by a process that was killed
        left.unlink()
    count = empty = 0
    faulty = Counter[str]()
    under_way: dict[Future[ChunkCounts], int] = {}
    with TokenizeDisplay("encoded", sum(file.size for file in files)) as display, _workers(job.workers) as pool:

        def collect(most: int) -> None:
            """Waits until at most so many pieces are under way."""
            nonlocal empty
            while len(under_way) > most:
                finished, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in finished:
                    counts, input_bytes = future.result(), under_way.pop(future)
                    display.advance(input_bytes, counts.tokens)
                    empty += counts.empty
                    faulty.update(counts.faulty)

        for piece, input_bytes in pieces(files, job.reading):
            path = chunks / f"{count:08}.npz"
            count += 1
            if (done := ChunkCounts.read(path)) is not None:
                display.advance(input_bytes)
                empty += done.empty
                faulty.update(done.faulty)
                continue
            under_way[pool.submit(encode_piece, piece, choice, path)] = input_bytes
            collect(2 * job.workers)  # no more of the inputs is in memory than keeps the workers busy
        collect(0)
    if empty:
        say(f"documents without text, left out: {empty:,}")
    if faulty:
        deed = "skipped" if job.reading.errors == "skip" else "repaired"
        say(f"documents that are not UTF-8, {deed}: {faulty.total():,}, in")
        for file, documents in sorted(faulty.items()):
            say(f"  {file}: {documents:,}")
    return count


class _ThisProcess(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def _workers(count: int) -> Iterator[Executor]:
    """Starts the processes that encode; a single one is this process."""
    if count == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        yield _ThisProcess()
        return
    # The processes are no forks of this one: the library's threads, which may have trained a BPE, survive no fork.
    start_fork_server()
    pool = ProcessPoolExecutor(count, mp_context=get_context("forkserver"), initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Makes this process a worker: one thread, gone at once with Ctrl-C, which the parent answers, or its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _join(chunks: list[Path], tokenizer: Tokenizer, job: TokenizeJob, partial: Path) -> None:
    """Writes the documents of all chunks as one folder or one pair of Megatron's files, and renames it into place."""
    result = partial / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    whose = ShardTokenizer(kind="bytes")
    if isinstance(tokenizer, JsonTokenizer):
        whose = ShardTokenizer(
            kind="json", file=TOKENIZER_JSON, sha256=tokenizer.sha256, end_of_text=job.tokenizer.mark
        )
    if job.megatron:
        small = tokenizer.vocab_size <= 2**16
        with MegatronWriter(
            result / "tokens.bin",
            dtype="uint16" if small else "int32",
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
        ) as writer:
            for path in chunks:
                chunk = Chunk.read(path)
                writer.add_ended(chunk.ids, chunk.lengths)
        if job.train_bpe is not None:
            (partial / TOKENIZER_JSON).replace(job.out.with_name(f"{job.out.name}.{TOKENIZER_JSON}"))
        for suffix in ("idx", "bin"):  # a reader asks for the .bin first
            (result / f"tokens.{suffix}").replace(job.out.with_name(f"{job.out.name}.{suffix}"))
        return
    split = ValidationSplit.of(chunks, job.validation_fraction)
    with FolderWriter(
        result, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text, tokenizer=whose
    ) as folder:
        for path in chunks:
            for part, chunk in split.parts(Chunk.read(path)):
                folder.add_ended(part, chunk.ids, chunk.lengths)
    if whose.file is not None:
        shutil.copyfile(partial / TOKENIZER_JSON, result / whose.file)
    result.replace(job.out)
