"""What a subcommand of parallel3d-plan or parallel3d-data gives back, how it is printed and how the command ends, and
the one place where subcommands write files."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from parallel3d.errors import ConfigError, Parallel3dError, printable
from parallel3d.launch.failure import print_error

NOTHING_FITS = 3  # the exit status of a question without an answer
_INTERRUPTED = 130
_VERBOSE = ("-v", "--verbose")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a subcommand answers: the lines of its page, the same as one JSON object (None where the page is all), and
    the exit status. Only the one of `page` and `tree` that is printed is called."""

    page: Callable[[], Iterable[str]]
    tree: Callable[[], object] | None = None
    status: int = 0

    def print(self, *, as_json: bool) -> int:
        """Prints the page, or the JSON object where there is one and it is asked for. Returns the exit status."""
        for line in [json.dumps(self.tree())] if as_json and self.tree else self.page():
            print(printable(line))
        sys.stdout.flush()
        return self.status


def exit_status(arguments: list[str], run: Callable[[list[str]], int]) -> int:
    """Runs a command on its arguments but for -v, which shows the traceback of an error beside its line. Returns the
    exit status."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal shows other letters as escapes
    try:
        return run([word for word in arguments if word not in _VERBOSE])
    except Parallel3dError as error:
        print_error(str(error))
        if {*_VERBOSE} & {*arguments}:
            traceback.print_exc()
        return error.exit_status
    except BrokenPipeError:  # the reader of a pipe has gone, such as `| head`; nothing is to be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return status_of(error)
    except KeyboardInterrupt:
        return _INTERRUPTED


def status_of(error: OSError) -> int:
    """Tells of an argument that is too long for the name of a file, and returns the exit status. Raises any other error
    again."""
    if error.errno != errno.ENAMETOOLONG:
        raise error
    print_error(f"{error.filename}: no file has a name so long; see --help")
    return ConfigError.exit_status


def write_output(option: str, path: Path, text: str) -> None:
    """Writes `text` to the path that `option` gave. Raises ConfigError where the path cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}); try another path") from error
