"""What a subcommand of parallel3d-plan gives back, and the one place where subcommands write files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from parallel3d.errors import ConfigError

NOTHING_FITS = 3  # the exit status of a question without an answer


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a subcommand answers: the lines of its page, the same as one JSON object (None where the page is all), and
    the exit status. Only the one of `page` and `tree` that is printed is called."""

    page: Callable[[], Iterable[str]]
    tree: Callable[[], object] | None = None
    status: int = 0


def write_output(option: str, path: Path, text: str) -> None:
    """Writes `text` to the path that `option` gave. Raises ConfigError where the path cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}); try another path") from error
