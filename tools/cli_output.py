"""Replies of subcommands, exit statuses of commands, and output files."""

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

NOTHING_FITS = 3  # Exit status if no layout fits.
_INTERRUPTED = 130
_SIGPIPE = 141  # Exit status that a shell gives if the reader of the output has exited.


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Reply of a subcommand. `page` yields the lines of its report, and `tree` returns the same as
    a JSON object (None: not available). Only the one to print is used. `status` is the exit status.
    """

    page: Iterable[str]
    tree: Callable[[], object] | None = None
    status: int = 0

    def print(self, *, as_json: bool) -> int:
        """Prints the report, or the JSON object if requested and available. Returns the exit
        status."""
        for line in [json.dumps(self.tree())] if as_json and self.tree else self.page:
            print(printable(line))
        return self.status


def exit_status(arguments: Sequence[str] | None, run: Callable[[list[str]], int]) -> int:
    """Runs a command on `arguments` (default: those of the process) and returns the exit status.

    Prints a Parallel3dError, and with -v its traceback. Ctrl-C and a closed output pipe end the
    command silently. Other errors are raised, except for a file name that is too long.
    """
    words = sys.argv[1:] if arguments is None else [*arguments]
    if isinstance(sys.stdout, TextIOWrapper):
        # Print characters that the terminal's encoding lacks as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with writing_output():
            return run(words)
    except Parallel3dError as error:
        if isinstance(error, SaveError) and isinstance(error.__cause__, BrokenPipeError):
            return _SIGPIPE  # Silent, because the reader, such as `| head`, has exited.
        print_error(str(error))
        if {*VERBOSE} & {*words}:
            traceback.print_exc()
        return error.exit_status
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print_error(f"{error.filename}: file name too long; see --help")
        return ConfigError.exit_status
    except KeyboardInterrupt:
        return _INTERRUPTED


def check_free(option: str, path: Path | None) -> None:
    """Raises ConfigError if a new file cannot be created at the path that `option` gave. Devices
    and pipes are allowed."""
    if path is None:
        return
    if path.is_file():
        raise ConfigError(f"{option} {path}: exists already; delete it, or try another path")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written (Is a directory); try another path")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{option} {path}: cannot be written (No such file or directory); try another path"
        )


def write_output(option: str, path: Path, text: str) -> None:
    """Writes `text` to a new file at the path that `option` gave. Raises ConfigError if that
    fails."""
    check_free(option, path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written ({error.strerror}); try another path"
        ) from error
