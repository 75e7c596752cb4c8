"""Calls a command in this process and judges its answer, for the fuzzers of folders and of
files."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch.distributed as dist

from parallel3d.recipes import pretrain
from parallel3d.tools.checkpoint import command as checkpoint_command
from parallel3d.tools.data import command as data_command

STATUSES = (0, 2, 3, 65, 69, 70, 71, 73)  # the exit statuses in --help, except those of signals
_PATIENCE_S = 300  # a command that takes longer hangs
# characters that a refusal may have
_LONGEST_LINE = 2_000
_LONGEST_ANSWER = 20_000

Main = Callable[[Sequence[str]], int]
RECIPE = """\
model: {layers: 1, hidden: 16, heads: 2, ffn_hidden: 32, vocab: 264}
train: {steps: 2, global_batch_size: 2, seq_len: 16, device: cpu}
optimizer: {warmup_steps: 1}
data: {source: text, path: text.txt}
checkpoint: {every: 1, keep: 9}
logging: {every: 1}
"""


@dataclass
class Answer:
    """The answer of a command. `faults` says what is bad about it."""

    words: tuple[str, ...]
    status: int
    out: str
    err: str
    faults: list[str] = field(default_factory=list)


def call(
    main: Main, words: Sequence[str], *, encoding: str = "utf-8", shows_text: bool = False
) -> Answer:
    """Calls a command with standard streams of an encoding. `shows_text`: it may print every
    character of what it has read, such as a generated sample."""
    path = list(sys.path)
    environ = dict(os.environ)
    folder = Path.cwd()
    before = (sys.stdout, sys.stderr)
    out = _stream(encoding, "strict")
    err = _stream(encoding, "backslashreplace")
    status = 1
    crash = ""
    heard = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(_PATIENCE_S)
    sys.stdout = out
    sys.stderr = err
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main(list(words))
            out.flush()
    except (Exception, SystemExit) as error:
        crash = "".join(traceback.format_exception(error)[-3:])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, heard)
        added = [each for each in sys.path if each not in path]
        sys.stdout, sys.stderr = before
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
    answer = Answer(tuple(words), status, _read(out), _read(err))
    answer.faults += _faults(answer, crash, added, shows_text)
    return answer


def _hang(signum: int, frame: object) -> None:
    raise TimeoutError(f"no answer within {_PATIENCE_S} s")


def _faults(answer: Answer, crash: str, added: list[str], shows_text: bool) -> Iterator[str]:
    if crash:
        yield f"raises {crash}"
    elif answer.status not in STATUSES:
        yield f"ends with status {answer.status}"
    elif answer.status and not (answer.out + answer.err).strip():
        yield f"ends with status {answer.status} and says nothing"
    if added:
        yield f"leaves {added} on sys.path"
    if "Traceback" in answer.err and answer.status != 70:  # that of a rank that failed is wanted
        yield f"prints {answer.err[-1500:]}"
    lines = answer.err.split("\n")
    if len(answer.err) > _LONGEST_ANSWER or max(map(len, lines)) > _LONGEST_LINE:
        yield f"says {len(answer.err)} characters: {answer.err[:100]!r}"
    lines += [] if shows_text else answer.out.split("\n")
    for line in lines:
        if not line.replace("\t", " ").isprintable():
            yield f"prints {line[:200]!r}"
            return


def _stream(encoding: str, errors: str) -> io.TextIOWrapper:
    file = os.fdopen(os.memfd_create("stream"), "w+b")
    return io.TextIOWrapper(file, encoding=encoding, errors=errors)


def _read(stream: io.TextIOWrapper) -> str:
    with suppress(ValueError):
        stream.flush()
    text = os.pread(stream.fileno(), 1 << 24, 0).decode(errors="replace")
    with suppress(ValueError):
        stream.close()
    return text


@cache
def templates() -> Path:
    """Returns a folder with what the commands make: a run, an export, folders of tokens."""
    made = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (made / "text.txt").write_text("some words of a text\n" * 60)
    (made / "tiny.yaml").write_text(RECIPE)
    tokenize = ("tokenize", "text.txt", "--workers", "1", "--out")
    with chdir(made):
        for main, words in (
            (train, ("tiny.yaml", "run_dir=run")),
            (checkpoint_command.main, ("export", "run", "export", "--max-shard-size", "0.01MB")),
            (data_command.main, (*tokenize, "tokens", "--train-bpe", "270")),
        ):
            answer = call(main, words)
            assert answer.status == 0, answer
    return made


def train(words: Sequence[str]) -> int:
    """Runs `parallel3d-train` as the single worker of a launcher, in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    os.environ.update({**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    hook = sys.excepthook
    try:
        return pretrain.main(words)
    finally:
        sys.excepthook = hook  # a process group puts its own there
        if dist.is_initialized():
            dist.destroy_process_group()
