"""Calls a command in this process and judges its answer, for the fuzzers of folders and of files."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STATUSES = (0, 2, 3, 65, 69, 70, 71, 73)  # the exit statuses in --help, except those of signals
_PATIENCE_S = 300  # a command that takes longer hangs
_LONGEST_LINE, _LONGEST_ANSWER = 2_000, 20_000  # characters that a refusal may have

Main = Callable[[Sequence[str]], int]


@dataclass
class Answer:
    """The answer of a command. `faults` says what is bad about it."""

    words: tuple[str, ...]
    status: int
    out: str
    err: str
    faults: list[str] = field(default_factory=list)


def call(main: Main, words: Sequence[str], *, encoding: str = "utf-8", shows_text: bool = False) -> Answer:
    """Calls a command with standard streams of an encoding. `shows_text`: it may print every character of what it has
    read, such as a generated sample."""
    path, environ, folder, before = list(sys.path), dict(os.environ), Path.cwd(), (sys.stdout, sys.stderr)
    out, err = _stream(encoding, "strict"), _stream(encoding, "backslashreplace")
    status, crash = 1, ""
    heard = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(_PATIENCE_S)
    sys.stdout, sys.stderr = out, err
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
