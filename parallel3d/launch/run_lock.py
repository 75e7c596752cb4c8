"""The lock of a run's folder, so that one run at a time writes there.

Two things make the lock. Processes of one machine exclude each other by flock on the folder itself: the kernel frees
it in the moment in which the process that holds it ends, however it ends, and nobody can remove it. `run.lock` in the
folder says who that process is, and its modification time is a heartbeat, by which other hosts, to which a network file
system may not show the flock, see that it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from parallel3d.errors import RunLockedError
from parallel3d.launch.failure import end_process, print_error

LOCK_FILE = "run.lock"
_BEAT_S = 10.0
_STALE_S = 60.0  # a heartbeat this old is of a process, or a host, that has gone
_LARGEST_BYTES = 10_000  # of a lock file that is read


def _this_machine() -> str:
    """Returns what names the running kernel, which the containers of a host share and a restart changes."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _this_job(environ: Mapping[str, str] = os.environ) -> str:
    """Returns what stays the same when a launcher starts its job again, perhaps on another host; "" where none says."""
    torchrun_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if torchrun_id not in ("", "none"):  # `none` is that of every job that was given no other
        return f"torchrun {torchrun_id}"
    if "SLURM_JOB_ID" in environ:
        return f"SLURM {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return ""


@dataclass(frozen=True, kw_only=True)
class LockHolder:
    """The process that holds a folder, as `run.lock` says it."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))
    machine: str = field(default_factory=_this_machine)
    job: str = field(default_factory=_this_job)

    @classmethod
    def read(cls, fd: int) -> LockHolder | None:
        """Returns the holder that an open lock file names, or None where it holds no such thing."""
        try:
            told = json.loads(os.read(fd, _LARGEST_BYTES))
            holder = cls(**told)
        except (ValueError, TypeError, RecursionError):
            return None
        is_right = {key: type(each) for key, each in told.items()} == _TYPES and str(holder).isprintable()
        return holder if is_right else None

    def text(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    def __str__(self) -> str:
        return f"run {self.run_id} (host {self.host}, pid {self.pid}, since {self.since})"


_TYPES = {key: type(each) for key, each in asdict(LockHolder(machine="", job="")).items()}


class RunLock:
    """Holds the folder of a run for a block. Raises RunLockedError where another run holds it, and OSError where the
    folder cannot be written. `notice` is a line for the user where a run that has gone had left its lock. `is_restart`
    says that a launcher has started its job again, which takes over its own lock at once. The id of the job alone does
    not say so: two jobs may have the same."""

    def __init__(self, folder: Path, *, is_restart: bool = False) -> None:
        self._folder, self._own, self._is_restart = folder, LockHolder(), is_restart
        self.notice = ""
        self._is_free, self._changes = threading.Event(), threading.Lock()
        self._is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = self._take()

    def __enter__(self) -> RunLock:
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changes:
            self._is_free.set()
            self._release(self._fd)
        if self._is_new:
            with suppress(OSError):  # it holds something by now
                self._folder.rmdir()

    def _take(self) -> int:
        """Returns a descriptor of the folder, which is locked, and says in `run.lock` who holds it."""
        while True:
            self._folder.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # another run has just ended, and removed the empty folder
                fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    has_flock = _flock(fd)
                    if has_flock is False:
                        raise self._refused(*_look(fd))
                    if os.path.samestat(os.fstat(fd), os.stat(self._folder)):
                        self._write(fd, has_flock is not None)
                        return fd
                except BaseException:
                    os.close(fd)
                    raise
                os.close(fd)

    def _write(self, folder: int, has_flock: bool) -> None:
        """Puts this run's name into `run.lock` of an open folder, unless another host's run holds it."""
        text, own = self._own.text(), f".{LOCK_FILE}.{self._own.run_id}"
        try:
            _create(folder, LOCK_FILE, text)
            return
        except FileExistsError:
            _create(folder, own, text)
        try:
            # Both times are of the file system's own clock, so the clocks of two hosts may differ.
            earlier, beat = _look(folder)
            silent_s = os.stat(own, dir_fd=folder).st_mtime - beat
            is_known = earlier is not None and earlier.run_id != self._own.run_id
            ended_here = earlier is not None and has_flock and earlier.machine == self._own.machine
            same_job = self._is_restart and earlier is not None and earlier.job == self._own.job != ""
            if silent_s < _STALE_S and not (ended_here or same_job):
                raise self._refused(earlier, beat)
            os.rename(own, LOCK_FILE, src_dir_fd=folder, dst_dir_fd=folder)
            if is_known:
                how = "its process has gone" if ended_here else f"its heartbeat is {silent_s:.0f} s old"
                self.notice = f"{self._folder}: {earlier} did not close it, and {how}: taken over"
        finally:
            with suppress(FileNotFoundError):
                os.unlink(own, dir_fd=folder)

    def _refused(self, holder: LockHolder | None, beat: float) -> RunLockedError:
        if holder is None:
            return RunLockedError(f"{self._folder}: another run writes there; try another run_dir, or wait for its end")
        here = f"kill {holder.pid}" if holder.machine == self._own.machine else f"kill {holder.pid} on {holder.host}"
        silent_s = max(0.0, time.time() - beat)
        return RunLockedError(
            f"{self._folder}: {holder} writes there, with a heartbeat {silent_s:.0f} s ago; wait for its end, stop it "
            f"({here}; one that has gone is taken over after {_STALE_S:.0f} s), or try another run_dir"
        )

    def _beat(self) -> None:
        while not self._is_free.wait(_BEAT_S):
            with self._changes, suppress(OSError):  # a folder that has gone is told where the run next writes there
                if self._is_free.is_set():
                    return
                holder, _ = _look(self._fd)
                if holder is None:  # somebody has removed the file, or written something else there
                    with suppress(FileNotFoundError):
                        os.unlink(LOCK_FILE, dir_fd=self._fd)
                    _create(self._fd, LOCK_FILE, self._own.text())
                elif holder.run_id == self._own.run_id:
                    os.utime(LOCK_FILE, dir_fd=self._fd)
                else:  # this process, or its host, has slept
                    print_error(f"{self._folder}: {holder} has taken it over, so this run ends")
                    end_process(RunLockedError.exit_status)

    def _release(self, fd: int) -> None:
        with suppress(OSError):
            holder, _ = _look(fd)
            if holder is not None and holder.run_id == self._own.run_id:
                os.unlink(LOCK_FILE, dir_fd=fd)
        os.close(fd)

    def _forget(self) -> None:
        """Closes the copy of the descriptor in a forked process, which may outlive this one."""
        if not self._is_free.is_set():
            os.close(self._fd)


def _flock(fd: int) -> bool | None:
    """Locks an open folder; False where another process has, None on a file system that cannot."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _create(folder: int, name: str, text: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _look(folder: int) -> tuple[LockHolder | None, float]:
    """Returns who holds an open folder, as far as its lock file says, and the time of the last heartbeat. Opening the
    file makes a network file system ask its server."""
    holder, beat = None, time.time()
    with suppress(OSError):
        beat = os.stat(LOCK_FILE, dir_fd=folder, follow_symlinks=False).st_mtime
        fd = os.open(LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            beat = os.fstat(fd).st_mtime
            holder = LockHolder.read(fd)
        finally:
            os.close(fd)
    return holder, beat
