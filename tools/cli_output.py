"""What a subcommand of parallel3d-plan or parallel3d-data gives back, how it is printed and how the
command ends, and the one place where subcommands write files."""

from __future__ import annotations

import errno
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from parallel3d.errors import ConfigError, Parallel3dError, SaveError, printable
from parallel3d.launch.failure import print_error, writing_output
from parallel3d.tools.arguments import VERBOSE

NOTHING_FITS = 3  # the exit status of a question without an answer
_INTERRUPTED = 130
_SIGPIPE = 141  # the status that a shell reports if the reader of the output has exited


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a subcommand answers: the lines of its page, the same as one JSON object (None where
    the page is all), and the exit status. Only the one of `page` and `tree` that is printed is
    called."""

    page: Callable[[], Iterable[str]]
    tree: Callable[[], object] | None = None
    status: int = 0

    def print(self, *, as_json: bool) -> int:
        """Prints the page, or the JSON object where there is one and it is asked for. Returns the
        exit status."""
        for line in [json.dumps(self.tree())] if as_json and self.tree else self.page():
            print(printable(line))
        return self.status


def exit_status(arguments: Sequence[str] | None, run: Callable[[list[str]], int]) -> int:
    """Runs a command on `arguments` (default: the command line), and writes what it has printed.
    Every command ends here. With -v, an error shows its traceback. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    if isinstance(sys.stdout, TextIOWrapper):
        # an ASCII terminal shows other letters as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with writing_output():
            return run(words)
    except Parallel3dError as error:
        if isinstance(error, SaveError) and isinstance(error.__cause__, BrokenPipeError):
            return _SIGPIPE  # silent, as other commands before `| head`
        print_error(str(error))
        if {*VERBOSE} & {*words}:
            traceback.print_exc()
        return error.exit_status
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print_error(f"{error.filename}: the name is too long for a file; see --help")
        return ConfigError.exit_status
    except KeyboardInterrupt:
        return _INTERRUPTED


def check_free(option: str, path: Path | None) -> None:
    """Raises ConfigError if the path that `option` gave is not free for a new file. Devices and
    pipes are allowed."""
    if path is None:
        return
    if path.is_file():
        raise ConfigError(f"{option} {path}: is there already; delete it, or try another path")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written (Is a directory); try another path")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{option} {path}: cannot be written (No such file or directory); try another path"
        )


def write_output(option: str, path: Path, text: str) -> None:
    """Writes `text` to a new file at the path that `option` gave. Raises ConfigError if it cannot
    be written."""
    check_free(option, path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written ({error.strerror}); try another path"
        ) from error
