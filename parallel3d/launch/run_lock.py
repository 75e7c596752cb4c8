"""The lock of a run's folder, so that one run at a time writes there.

The run holds a flock on `run.lock`. The kernel, or the server of a network file system, frees it
when the process ends, however it ends. The file says which process that is.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from parallel3d.errors import RunLockedError, printable

LOCK_FILE = "run.lock"
RESTART_S = 120.0  # a server may take so long to notice that the host of an earlier attempt is gone
_POLL_S = 0.5
_MOST_CHARACTERS = 1_000  # of a lock file that is read
_MARK = "a run ("  # a lock file begins with it


class RunLock:
    """Holds the folder of a run for a block.

    `is_restart` says that a launcher has started this job again; it then waits up to RESTART_S for
    the lock. `notice` is a line for the user if an earlier run ended without closing the folder.
    Raises RunLockedError if another run holds it, and OSError if it cannot be written."""

    def __init__(self, folder: Path, *, is_restart: bool = False) -> None:
        self._folder, self._path = folder, folder / LOCK_FILE
        self.notice = ""
        self._is_new = not folder.exists()
        deadline = time.monotonic() + (RESTART_S if is_restart else 0.0)
        while (fd := self._try_to_lock()) is None:
            if time.monotonic() >= deadline:
                raise RunLockedError(
                    f"{folder}: {self._holder()} writes there; wait for its end, stop it, or try "
                    "another run_dir"
                )
            time.sleep(_POLL_S)
        self._fd = fd
        if os.fstat(fd).st_size:
            self.notice = f"{folder}: {self._holder()} did not close it and is gone: taken over"
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = f"{_MARK}host {socket.gethostname()}, pid {os.getpid()}, since {since})"
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)

    def __enter__(self) -> RunLock:
        os.register_at_fork(after_in_child=self._close_copy)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # somebody has removed it
            if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                self._path.unlink()
        os.close(self._fd)
        self._fd = -1
        if self._is_new:
            with suppress(OSError):  # the run has written into it
                self._folder.rmdir()

    def _try_to_lock(self) -> int | None:
        """Returns the locked file, or None if another process holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed the file in the meantime.
            if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            reason = f"cannot be locked ({error.strerror})"
            self.notice = f"{self._folder}: {reason}; let no other run write there"
            return fd
        os.close(fd)
        return None

    def _holder(self) -> str:
        """Returns words on the process that wrote the lock file."""
        with suppress(OSError), self._path.open(errors="replace") as file:
            words = file.read(_MOST_CHARACTERS)
            if words.startswith(_MARK):
                return printable(words)
        return "another run"

    def _close_copy(self) -> None:
        """Closes the copy of the descriptor in a forked process, which may outlive this one."""
        if self._fd >= 0:
            os.close(self._fd)
