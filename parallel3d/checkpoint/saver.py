"""Saves checkpoints during a run, optionally in the background.

With `checkpoint.in_background`, the training thread only plans with the other ranks which of them
writes which tensor, and copies this rank's parts into host memory. Another thread writes the
copies, waits for all ranks, commits the checkpoint and deletes older ones. That thread uses a
separate gloo group, so that it does not interfere with the collectives of training. Only one save
runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.checkpoint.files import Agreement, PlannedSave, plan_save, write_and_commit
from parallel3d.checkpoint.manifest import Progress
from parallel3d.config.recipe import CheckpointConfig
from parallel3d.errors import NotSavedInTimeError, Parallel3dError, RankError, SaveError
from parallel3d.torch_private import timeout_of


@dataclass
class _SaveUnderWay:
    """Save in progress, and its outcome."""

    path: Path
    is_last: bool  # True for the last save of a run. No later save can make up for its failure.
    then: Callable[[dist.ProcessGroup | None], str] | None  # Called after the commit.
    is_in_place: bool = False  # True once the checkpoint is committed.
    line: str | None = None  # Line for the user that `then` returned.
    error: BaseException | None = None
    end: threading.Event = field(default_factory=threading.Event)


class Saver(AbstractContextManager["Saver"]):
    """Saves the checkpoints of a run.

    All ranks must call its methods in the same order, after the same steps. `saved` is called with
    the path of each completed checkpoint, and `say` prints a line.
    """

    def __init__(
        self, rule: CheckpointConfig, *, saved: Callable[[Path], None], say: Callable[[str], None]
    ) -> None:
        self._rule = rule
        self._saved = saved
        self._say = say
        self._group: dist.ProcessGroup | None = None
        if rule.in_background:
            assert dist.group.WORLD is not None
            # Otherwise the group would use torch's default timeout.
            wait = timeout_of(dist.group.WORLD, torch.device("cpu"))
            self._group = dist.new_group(backend="gloo", group_desc="saves", timeout=wait)
        # Host memory for this rank's parts, pinned if the parts are on a GPU.
        self._buffers: list[Tensor] = []
        self._under_way: _SaveUnderWay | None = None
        # Which rank wrote what in the previous save. Reused while the state has the same form.
        self._agreed: Agreement | None = None

    def save(
        self,
        state: dict[str, Tensor],
        progress: Progress,
        path: Path,
        config: str,
        *,
        is_last: bool,
        then: Callable[[dist.ProcessGroup | None], str] | None = None,
    ) -> None:
        """Saves a checkpoint, after waiting for the previous save. Collective.

        With `checkpoint.in_background`, it returns once the tensors are copied, except for the last
        save, which is awaited. `then` is called on all ranks after the commit, with the process
        group to use, and returns a line to print. Raises the error of this or the previous save.
        With `checkpoint.on_error` "warn", a SaveError is only printed, unless it is from the last
        save or because `grace_s` has passed.
        """
        before = self._under_way
        if before is not None and not before.end.is_set():
            words = f"waits until {before.path.name} is written"
            self._say(f"{path.name} {words}, which takes longer than checkpoint.every")
        self.finish()
        self._under_way = begun = _SaveUnderWay(path, is_last, then)
        try:
            save = plan_save(state, progress, path, config, self._agreed)
        except SaveError as error:
            begun.error = error
            begun.end.set()
            self.finish()
            return
        save.keep = self._rule
        if self._rule.in_background:
            self._copy(save)
            threading.Thread(target=self._write, args=(begun, save), daemon=True).start()
        else:
            self._write(begun, save)
        self._agreed = save.agreed
        if is_last or not self._rule.in_background:
            self.finish()

    @property
    def has_failed(self) -> bool:
        """True if the current save has failed on this rank with an error that must end the run."""
        save = self._under_way
        return save is not None and save.end.is_set() and self._ends_the_run(save)

    def step_done(self) -> None:
        """Reports the current save if it has ended, unless its error must end the run.

        `finish` raises such an error on all ranks after the same step. Here, ranks could notice it
        after different steps.
        """
        save = self._under_way
        if save is not None and save.end.is_set() and not self._ends_the_run(save):
            self.finish()

    def finish(self) -> None:
        """Waits for the current save, if any. Reports or raises its error as `save` does."""
        done = self._under_way
        self._under_way = None
        if done is None:
            return
        done.end.wait()
        if done.is_in_place:
            self._saved(done.path)
        if done.line is not None:
            self._say(done.line)
        if done.error is not None:
            if self._ends_the_run(done):
                raise done.error
            self._say(f"not saved: {done.error}; the run continues (checkpoint.on_error = warn)")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Waits for the current save, even after a Parallel3dError.

        It does not wait if a peer is lost, if `grace_s` has passed, or after other exceptions.
        """
        cannot_wait = isinstance(error, RankError | NotSavedInTimeError)
        if error is None:
            self.finish()
        elif self._under_way is not None and isinstance(error, Parallel3dError) and not cannot_wait:
            self._under_way.end.wait()

    def _ends_the_run(self, done: _SaveUnderWay) -> bool:
        if isinstance(done.error, SaveError) and not isinstance(done.error, NotSavedInTimeError):
            return done.is_last or self._rule.on_error == "stop"
        return done.error is not None

    def _copy(self, save: PlannedSave) -> None:
        """Replaces the parts of a save with copies in host memory, so that training can continue.

        The previous save must be complete because its copies use the same memory.
        """
        if save.agreed is not self._agreed:
            self._buffers.clear()
            for _, part in save.parts:
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                self._buffers.append(buffer)
        copies = []
        for (item, part), buffer in zip(save.parts, self._buffers, strict=True):
            copies.append((item, buffer.copy_(part, non_blocking=True)))
        for device in {part.device for _, part in save.parts if part.is_cuda}:
            # Copies into pinned memory are asynchronous.
            torch.cuda.current_stream(device).synchronize()
        save.parts = copies

    def _write(self, begun: _SaveUnderWay, save: PlannedSave) -> None:
        """Writes and commits a planned save and records the outcome. Collective."""
        try:
            write_and_commit(save, self._group)
            begun.is_in_place = True
            if begun.then is not None:
                begun.line = begun.then(self._group)
        except BaseException as error:  # An exception in a thread would otherwise be lost.
            begun.error = error
        finally:
            begun.end.set()
