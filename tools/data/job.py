"""The job of `tokenize`: all cores encode pieces of the inputs into a folder next to the goal; then
they are joined, checked by the writer, and renamed into place.

Whatever the number of processes, and however often the job was killed, the files are the same:
pieces depend on the inputs only, each is encoded on its own, and they are joined in their order.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from parallel3d.data.token_files import (
    TOKENIZER_JSON,
    FolderWriter,
    MegatronWriter,
    ShardTokenizer,
)
from parallel3d.data.tokenizers import JsonTokenizer, train_bpe
from parallel3d.errors import ConfigError, DataError, printable
from parallel3d.launch.local import start_fork_server
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.data import inputs
from parallel3d.tools.data.chunks import Chunk, ChunkSummary, TokenizerChoice, encode_piece
from parallel3d.tools.data.display import show_progress
from parallel3d.tools.data.folders import inspect
from parallel3d.tools.data.inputs import (
    InputError,
    InputFile,
    NotTextError,
    Reading,
    find_inputs,
    pieces,
)
from parallel3d.tools.data.split import ValidationSplit

_BYTE_LEVEL_IDS = 257  # a byte-level BPE without merges has the bytes and an end of text
_SETTINGS = "command.json"  # the settings of the job that an unfinished folder belongs to
_NOT_OF_THE_RESULT = ("inputs", "out", "workers", "json", "verbose")


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """What the command line asks for."""

    files: list[InputFile]
    out: Path  # a folder, or Megatron's PREFIX
    reading: Reading
    tokenizer: TokenizerChoice
    train_bpe: int | None  # the size of the vocabulary of a BPE that is trained on the inputs first
    validation_fraction: float
    megatron: bool
    workers: int
    settings: dict[str, Any]  # all that the result depends on, by the option that decides it

    @property
    def partial(self) -> Path:
        """The job's own folder."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def input_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def goal(self, ending: str) -> Path:
        return self.out.with_name(f"{self.out.name}{ending}")

    @property
    def goals(self) -> list[Path]:
        """What the job makes, the last step last."""
        endings = ("", ".idx", f".{TOKENIZER_JSON}", ".bin") if self.megatron else ("",)
        return [self.goal(ending) for ending in endings]

    def chunk_path(self, index: int) -> Path:
        return self.partial / "chunks" / f"{index:08}.npz"


def answer(options: Namespace) -> Reply:
    """Makes a folder of tokens, and describes it. Raises ConfigError for what cannot be done,
    InputError for an input that has a fault."""
    if options.validation_fraction == 1:
        raise ConfigError("--validation-fraction 1: leaves nothing to train on; try 0.05")
    if options.train_bpe is not None and options.tokenizer is not None:
        raise ConfigError("--train-bpe: makes a tokenizer; leave out --tokenizer")
    if options.train_bpe is not None and options.train_bpe < _BYTE_LEVEL_IDS:
        raise ConfigError(
            f"--train-bpe {options.train_bpe}: must be at least {_BYTE_LEVEL_IDS}, the bytes; try "
            "8000"
        )
    reading = Reading(
        format=options.input_format,
        pattern=options.pattern,
        field=options.field,
        separator=options.separator,
        split=options.split,
        errors=options.errors,
    )
    files = find_inputs(options.inputs, reading)
    choice = TokenizerChoice(options.tokenizer or "bytes", options.end_of_text)
    settings = {
        f"--{name.replace('_', '-')}": value
        for name, value in vars(options).items()
        if name not in _NOT_OF_THE_RESULT
    }
    settings["INPUT"] = [[str(file.path), file.size, file.modified_ns] for file in files]
    settings["bytes of a piece"] = inputs.PIECE_BYTES
    if options.train_bpe is None:
        settings["--tokenizer"] = getattr(choice.build(), "sha256", choice.name)
    job = TokenizeJob(
        files=files,
        out=options.out,
        reading=reading,
        tokenizer=choice,
        train_bpe=options.train_bpe,
        validation_fraction=options.validation_fraction,
        megatron=options.format == "megatron",
        workers=options.workers or len(os.sched_getaffinity(0)),
        settings=settings,
    )
    tokenize(job)
    return inspect(options.out)


def tokenize(job: TokenizeJob) -> None:
    """Runs the job to its end, from where an earlier run of the same job was stopped."""
    try:
        with _claimed(job):
            # A kill between the last two steps leaves the goal and the folder of the job.
            if not job.goals[-1].exists():
                choice = _prepare_tokenizer(job)
                _join(job, choice, _encode(job, choice))
            _clear(job.partial)
    except NotTextError as error:
        if len(job.files) == 1:
            raise
        _say(f"{error}; looking for all such files")
        raise NotTextError(_all_faulty(job)) from None
    except BrokenProcessPool:
        raise DataError(
            "a worker was killed, perhaps for lack of memory; to continue, run the command again "
            "with fewer --workers"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--out {job.out}: cannot be written ({error.strerror}); try another folder"
        ) from error


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _all_faulty(job: TokenizeJob) -> str:
    """Returns an error that names all files with text that is not UTF-8."""
    faulty = Counter[str]()
    with suppress(InputError):
        deque(_texts(job, replace(job.reading, errors="skip"), faulty), maxlen=0)
    words = "text is not UTF-8; try --errors skip or --errors replace, or convert or remove:"
    return "\n".join([words, *faulty])


def _texts(job: TokenizeJob, reading: Reading, faulty: Counter[str]) -> Iterator[str]:
    """Yields all documents of the inputs."""
    with show_progress("read", job.input_bytes) as advance:
        for documents, input_bytes in pieces(job.files, reading):
            yield from documents(faulty)
            advance(input_bytes, 0)


@contextmanager
def _claimed(job: TokenizeJob) -> Iterator[None]:
    """Holds the job's own folder. Raises ConfigError if another process or command works in it, if
    it has files of others, or if the goal exists. If an input or an option has to change, the
    folder is deleted."""
    partial, settings = job.partial, job.settings
    begun = None
    if (partial / _SETTINGS).exists():
        begun = json.loads((partial / _SETTINGS).read_text())
    for goal in job.goals:
        if goal.exists() and begun != settings:
            raise ConfigError(
                f"--out {job.out}: {goal} is there already; try another name, or delete it"
            )
    partial.mkdir(parents=True, exist_ok=True)
    folder = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        if begun is None:
            for foreign in partial.iterdir():
                raise ConfigError(
                    f"--out: {partial} holds {foreign.name}, which is not of this command; try "
                    "another --out"
                )
            _write_whole(partial / _SETTINGS, json.dumps(settings))
        elif begun != settings:
            raise ConfigError(
                f"--out: {partial} holds the unfinished work of another command, with "
                f"{_others(begun, settings)}; give that command again to go on with it, or delete "
                f"{partial}"
            )
        try:
            yield
        except (InputError, ConfigError):
            _clear(partial)
            raise
    except BlockingIOError:
        raise ConfigError(
            f"--out: another process is at work in {partial}; wait for it or end it"
        ) from None
    finally:
        os.close(folder)


def _others(begun: dict[str, Any], settings: dict[str, Any]) -> str:
    """Returns in words which settings of a job that was begun differ from `settings`."""
    words = []
    for key, value in settings.items():
        if key == "INPUT" and begun.get(key) != value:
            words.append("INPUT files that were others, or have changed since")
        elif begun.get(key) != value:
            words.append(f"{key} {json.dumps(begun.get(key))}")
    return ", ".join(words)


def _clear(partial: Path) -> None:
    """Deletes the job's own folder, its settings last: until then the same command may be given
    again."""
    for entry in partial.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _SETTINGS:
            entry.unlink()
    shutil.rmtree(partial)


def _write_whole(path: Path, text: str) -> None:
    """Writes a file, complete or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _prepare_tokenizer(job: TokenizeJob) -> TokenizerChoice:
    """Returns the tokenizer of the job: of a tokenizer.json, the copy in the job's own folder. A
    BPE that an earlier run has trained is there already."""
    copy = job.partial / TOKENIZER_JSON
    choice = TokenizerChoice(str(copy), job.tokenizer.mark)
    if job.train_bpe is None:
        tokenizer = job.tokenizer.build()
        if not isinstance(tokenizer, JsonTokenizer):
            return job.tokenizer
        _write_whole(copy, tokenizer.path.read_text())
        return choice
    if not copy.exists():
        _say(f"training a BPE of {job.train_bpe:,} ids")
        _write_whole(copy, train_bpe(_texts(job, job.reading, Counter()), job.train_bpe))
    found = choice.build().vocab_size
    if found < job.train_bpe:
        _say(f"the text has enough for {found:,} ids, not for {job.train_bpe:,}")
    return choice


def _encode(job: TokenizeJob, choice: TokenizerChoice) -> list[ChunkSummary]:
    """Encodes every piece that is not there yet, and describes all."""
    chunks = job.chunk_path(0).parent
    chunks.mkdir(exist_ok=True)
    for left in chunks.glob("*.npz.*"):  # by a process that was killed
        left.unlink()
    summaries: list[ChunkSummary] = []
    under_way: deque[tuple[Future[ChunkSummary], int]] = deque()
    with show_progress("encoded", job.input_bytes) as advance, _workers(job.workers) as pool:

        def collect(most: int) -> None:
            """Waits until at most so many pieces are under way."""
            while len(under_way) > most:
                future, input_bytes = under_way.popleft()
                summaries.append(future.result())
                advance(input_bytes, summaries[-1].tokens)

        for index, (documents, input_bytes) in enumerate(pieces(job.files, job.reading)):
            path = job.chunk_path(index)
            if path.exists():
                summaries.append(Chunk.read(path).summary)
                advance(input_bytes, 0)
                continue
            under_way.append((pool.submit(encode_piece, documents, choice, path), input_bytes))
            # no more of the inputs is in memory than keeps the workers busy
            collect(2 * job.workers)
        collect(0)
    if empty := sum(summary.empty for summary in summaries):
        _say(f"documents without text, left out: {empty:,}")
    faulty = sum((summary.faulty for summary in summaries), Counter[str]())
    if faulty:
        deed = "skipped" if job.reading.errors == "skip" else "repaired"
        _say(f"documents that are not UTF-8, {deed}: {faulty.total():,}, in")
        for file, count in sorted(faulty.items()):
            _say(f"  {file}: {count:,}")
    return summaries


@contextmanager
def _workers(count: int) -> Iterator[Executor]:
    """Starts the processes that encode; a single one is this process."""
    pool: Executor
    if count == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        pool = ThreadPoolExecutor(1)
    else:
        # No forks of this process: the library's threads, which may have trained a BPE, survive
        # no fork.
        start_fork_server()
        context = get_context("forkserver")
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Makes this process a worker: one thread, gone at once with Ctrl-C, which the parent answers,
    or its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _join(job: TokenizeJob, choice: TokenizerChoice, summaries: list[ChunkSummary]) -> None:
    """Writes the documents of all chunks as one folder or one pair of Megatron's files, and renames
    it into place."""
    tokenizer = choice.build()
    result = job.partial / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    split = ValidationSplit.choose(summaries, 0.0 if job.megatron else job.validation_fraction)
    chunks = (Chunk.read(job.chunk_path(index)) for index in range(len(summaries)))
    vocab_size = tokenizer.vocab_size
    if job.megatron:
        dtype = "uint16" if vocab_size <= 2**16 else "int32"
        with MegatronWriter(result / "tokens.bin", dtype=dtype, vocab_size=vocab_size) as writer:
            for chunk in chunks:
                if len(chunk.ids):
                    writer.add(chunk.ids, chunk.lengths)
        if job.train_bpe is not None:
            (job.partial / TOKENIZER_JSON).replace(job.goal(f".{TOKENIZER_JSON}"))
        for suffix in (".idx", ".bin"):  # a reader asks for the .bin first
            (result / f"tokens{suffix}").replace(job.goal(suffix))
        return
    own = ShardTokenizer(kind="bytes")
    if isinstance(tokenizer, JsonTokenizer):
        own = ShardTokenizer(
            kind="json",
            file=TOKENIZER_JSON,
            sha256=tokenizer.sha256,
            end_of_text=job.tokenizer.mark,
        )
        shutil.copyfile(job.partial / TOKENIZER_JSON, result / TOKENIZER_JSON)
    end = tokenizer.end_of_text
    with FolderWriter(result, vocab_size=vocab_size, end_of_text=end, tokenizer=own) as folder:
        for chunk in chunks:
            for part, ids, lengths in split.parts(chunk):
                folder.add(part, ids, lengths)
    result.replace(job.out)
