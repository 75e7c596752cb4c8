"""The job of `tokenize`: worker processes encode pieces of the inputs, which are then joined,
checked and renamed into place.

The result does not depend on the number of processes, or on how often the job was killed. Pieces
depend only on the inputs, each is encoded separately, and they are joined in order."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from parallel3d.data.token_files import PARTS, TOKENIZER_JSON, FolderWriter, ShardTokenizer
from parallel3d.data.tokenizers import JsonTokenizer
from parallel3d.errors import ConfigError, DataError
from parallel3d.launch.files import write_atomically
from parallel3d.launch.local import start_fork_server
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.data.encode import TokenizerChoice, encode_piece, train_bpe
from parallel3d.tools.data.folders import inspect
from parallel3d.tools.data.inputs import InputError, InputFile, Reading, find_inputs, pieces

# Size of a byte-level BPE without merges: 256 bytes and the end-of-text token.
_BYTE_LEVEL_IDS = 257
_SETTINGS = "command.json"
_CHUNKS = "chunks"
# Options that determine the result. A job continues only if they, the inputs and the tokenizer are
# the same.
_DECIDING = ("pattern", "field", "errors", "end_of_text", "train_bpe", "validation_fraction")


def answer(options: Namespace) -> Reply:
    """Creates a folder of tokens and describes it. Raises ConfigError for invalid options, and
    DataError for an error in the inputs or a killed worker.
    """
    out = options.out
    vocab_size = options.train_bpe
    if options.validation_fraction == 1:
        raise ConfigError("--validation-fraction 1: leaves no training data; try 0.05")
    if vocab_size is not None and (options.tokenizer or vocab_size < _BYTE_LEVEL_IDS):
        raise ConfigError(
            f"--train-bpe {vocab_size}: must be at least {_BYTE_LEVEL_IDS} and cannot be combined "
            "with --tokenizer; try 8000"
        )
    reading = Reading(pattern=options.pattern, field=options.field, errors=options.errors)
    files = find_inputs(options.inputs, reading)
    choice = TokenizerChoice(options.tokenizer or "bytes", options.end_of_text)
    settings = {name: getattr(options, name) for name in _DECIDING}
    settings["inputs"] = [[str(file.path), file.size, file.modified_ns] for file in files]
    if vocab_size is None:
        settings["tokenizer"] = getattr(choice.build(), "sha256", choice.name)
    try:
        with _claimed(out, settings) as partial:
            # If a run was killed between the last two steps, the result exists already.
            if not out.exists():
                choice = _prepare_tokenizer(choice, vocab_size, files, reading, partial)
                workers = options.workers or len(os.sched_getaffinity(0))
                chunks = _encode(files, reading, choice, partial / _CHUNKS, workers)
                _join(chunks, choice, options.validation_fraction, partial / "result")
                (partial / "result").replace(out)
            _clear(partial)
    except BrokenProcessPool:
        raise DataError(
            "a worker was killed, perhaps for lack of memory; to continue, run the command again "
            "with fewer --workers"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written ({error.strerror}); try another folder"
        ) from error
    return inspect(out)


@contextmanager
def _claimed(out: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """Context manager that locks the job's folder and yields its path.

    Raises ConfigError if another process or command uses the folder, if it contains other files, or
    if `out` exists and was not created by this command. InputError or ConfigError in the `with`
    block deletes the folder.
    """
    partial = out.with_name(f"{out.name}.partial")
    path = partial / _SETTINGS
    begun = json.loads(path.read_text()) if path.exists() else None
    if out.exists() and begun != settings:
        raise ConfigError(f"--out {out}: exists already; try another name, or delete it")
    partial.mkdir(parents=True, exist_ok=True)
    folder = os.open(partial, os.O_RDONLY)
    try:
        # The lock is released when the process ends.
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if begun != settings and any(partial.iterdir()):
            raise ConfigError(
                f"--out: {partial} contains other files, or the unfinished work of another "
                "command or of inputs that have changed; run that command again, try another "
                f"--out, or delete {partial}"
            )
        write_atomically(path, json.dumps(settings))
        try:
            yield partial
        except (InputError, ConfigError):
            _clear(partial)
            raise
    except BlockingIOError:
        raise ConfigError(
            f"--out: another process is using {partial}; wait for it or end it"
        ) from None
    finally:
        os.close(folder)


def _clear(partial: Path) -> None:
    """Deletes the job's folder, the chunks first. If the deletion is interrupted, the same command
    can continue the job.
    """
    shutil.rmtree(partial / _CHUNKS, ignore_errors=True)
    shutil.rmtree(partial)


def _prepare_tokenizer(
    choice: TokenizerChoice,
    train: int | None,
    files: list[InputFile],
    reading: Reading,
    partial: Path,
) -> TokenizerChoice:
    """Returns the tokenizer of the job. Copies its tokenizer.json to the job's folder, or trains a
    BPE there unless an earlier run has.
    """
    copy = partial / TOKENIZER_JSON
    if train is None and choice.name == "bytes":
        return choice
    if train is None:
        write_atomically(copy, Path(choice.name).expanduser().read_text())
    elif not copy.exists():
        print(f"training a BPE of {train:,} tokens", file=sys.stderr, flush=True)
        texts = (text for piece in pieces(files, reading) for text in piece.texts)
        write_atomically(copy, train_bpe(texts, train))
    return TokenizerChoice(str(copy), choice.mark)


def _encode(
    files: list[InputFile], reading: Reading, choice: TokenizerChoice, folder: Path, workers: int
) -> list[Path]:
    """Encodes all pieces that have no file yet, and returns the files of all pieces."""
    folder.mkdir(exist_ok=True)
    chunks: list[Path] = []
    under_way = deque[Future[None]]()
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        _workers(workers) as pool,
    ):
        task = progress.add_task("encoding", total=sum(file.size for file in files))
        for texts, read_bytes in pieces(files, reading):
            chunks.append(folder / f"{len(chunks):08}.npz")
            if not chunks[-1].exists():
                under_way.append(pool.submit(encode_piece, texts, choice, chunks[-1]))
            # Keep only as many pieces in memory as the workers need.
            if len(under_way) > 2 * workers:
                under_way.popleft().result()
            progress.update(task, completed=read_bytes)
        for future in under_way:
            future.result()
    return chunks


@contextmanager
def _workers(count: int) -> Iterator[Executor]:
    """Context manager that starts the processes that encode. If `count` is 1, a thread of this
    process encodes.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool: Executor = ThreadPoolExecutor(1)
    if count > 1:
        # Do not fork this process: threads of the library, which may have trained a BPE, do not
        # survive a fork.
        start_fork_server()
        context = get_context("forkserver")
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Initializes a pool worker. It encodes on one thread, and dies on Ctrl-C, which the parent
    reports, or with its parent.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _join(chunks: list[Path], choice: TokenizerChoice, fraction: float, result: Path) -> None:
    """Writes the documents of all chunks to the folder `result`, split into training and
    validation.
    """
    tokenizer = choice.build()
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    own = ShardTokenizer(kind="bytes")
    if isinstance(tokenizer, JsonTokenizer):
        own = ShardTokenizer(
            kind="json", file=TOKENIZER_JSON, sha256=tokenizer.sha256, end_of_text=choice.mark
        )
        shutil.copyfile(tokenizer.path, result / TOKENIZER_JSON)
    end = tokenizer.end_of_text
    below = _validation_border(chunks, fraction)
    with FolderWriter(
        result, vocab_size=tokenizer.vocab_size, end_of_text=end, tokenizer=own
    ) as writer:
        for path in chunks:
            with np.load(path) as chunk:
                ids = chunk["ids"]
                lengths = chunk["lengths"]
                hashes = chunk["hashes"]
            if below is None:  # There is only one document, so it is split.
                held_out = min(max(round((len(ids) - 1) * fraction), 1), len(ids) - 1)
                writer.add("train", np.append(ids[: -1 - held_out], ids[-1:]))
                writer.add("validation", ids[-1 - held_out :])
                continue
            held = hashes < below
            for part, chosen in zip(PARTS, (~held, held), strict=True):
                if chosen.any():
                    writer.add(part, ids[np.repeat(chosen, lengths)], int(chosen.sum()))


def _validation_border(chunks: list[Path], fraction: float) -> int | None:
    """Returns the hash below which a document is for validation, or None to split the only
    document.

    Equal texts go to the same part. Adding a document does not move others, with one exception: if
    a part would be empty, the document whose hash is nearest to the threshold goes there.
    """
    found = []
    for path in chunks:
        with np.load(path) as chunk:
            found.append(chunk["hashes"])
    if not found:
        raise InputError("the inputs contain no text: every document is empty; try other files")
    hashes = np.concatenate(found)
    least = int(hashes.min())
    greatest = int(hashes.max())
    if fraction == 0:
        return 0
    if len(hashes) == 1:
        return None
    if least == greatest:
        raise ConfigError(
            f"--validation-fraction {fraction}: all {len(hashes)} documents have the same text; "
            "try --validation-fraction 0"
        )
    return min(max(int(fraction * 2**64), least + 1), greatest)
