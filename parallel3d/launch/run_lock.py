"""Locks the run folder, so that only one run writes there.

A process of the run holds a flock on `run.lock`. The kernel, or the server of a network file
system, releases it when that process ends for any reason. The file contains its host and PID."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError, RunLockedError, printable

LOCK_FILE = "run.lock"
# Seconds that a file server may need to notice that the host of an earlier attempt is lost.
RESTART_S = 120.0
_POLL_S = 0.5
_MARK = "a run ("  # First characters of every lock file.


@contextmanager
def locked(run_dir: str | Path, *, is_restart: bool = False) -> Iterator[str]:
    """Context manager that locks a run folder, and creates it if necessary. Yields a message for
    the user if an earlier run ended without releasing the lock, else "".

    If a launcher has restarted this job (`is_restart`), it waits up to RESTART_S for the lock.
    Raises RunLockedError if another run holds the lock, and ConfigError if the folder cannot be
    written."""
    folder = Path(run_dir)
    path = folder / LOCK_FILE
    deadline = time.monotonic() + (RESTART_S if is_restart else 0.0)
    try:
        while (fd := _try_to_lock(path)) is None:
            if time.monotonic() >= deadline:
                raise RunLockedError(
                    f"{folder}: in use by {_holder(path)}; wait for its end, stop it, or try "
                    "another run_dir"
                )
            time.sleep(_POLL_S)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"run_dir = {shown(str(run_dir))}: cannot be written ({cause}); try another, such as "
            "run_dir=/tmp/run"
        ) from error
    notice = ""
    if os.fstat(fd).st_size:
        notice = f"{folder}: {_holder(path)} ended without releasing it; this run takes over"
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    os.ftruncate(fd, 0)
    os.write(fd, f"{_MARK}host {socket.gethostname()}, pid {os.getpid()}, since {since})".encode())
    try:
        yield notice
    finally:
        with suppress(OSError):  # It may already be removed.
            path.unlink()
        os.close(fd)


def is_locked(run_dir: Path) -> bool:
    """Returns True if a run on this host or file system holds the lock of a folder."""
    with suppress(OSError), (run_dir / LOCK_FILE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _try_to_lock(path: Path) -> int | None:
    """Returns the descriptor of the locked file, or None if another process holds the lock. Does
    not lock on file systems without locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    is_locked = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_locked = not isinstance(error, BlockingIOError)
    # The previous holder may have removed the file in the meantime.
    with suppress(FileNotFoundError):
        if is_locked and os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    os.close(fd)
    return None


def _holder(path: Path) -> str:
    """Describes the process that wrote the lock file."""
    with suppress(OSError), path.open(errors="replace") as file:
        words = file.read(1_000)
        if words.startswith(_MARK):
            return printable(words)
    return "another run"
