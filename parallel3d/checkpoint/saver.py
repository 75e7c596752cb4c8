"""What a run does about its saves: when it waits for them, whom it tells, what it keeps, and what
it makes of errors.

With `checkpoint.in_background` the training's thread only agrees with the other ranks on who writes
what, and copies this rank's parts into memory of the host. Another thread writes the copies, waits
until all ranks have written, gives the checkpoint its name and deletes older ones. It talks to the
other ranks over a gloo group of its own, so that nothing of it comes between the collectives of
training. One save is under way at a time.
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
    """A save that has begun, and its outcome."""

    path: Path
    is_last: bool  # the run ends with it, so no later save can make up for its failure
    then: Callable[[dist.ProcessGroup | None], str] | None
    is_in_place: bool = False
    line: str | None = None  # returned by `then`
    error: BaseException | None = None
    end: threading.Event = field(default_factory=threading.Event)


class Saver(AbstractContextManager["Saver"]):
    """Saves a run's checkpoints as the section `checkpoint` of its recipe says. Every rank has one,
    and calls its methods after the same steps. `saved` is told of each checkpoint that is in place,
    and `say` shows a line."""

    def __init__(
        self, rule: CheckpointConfig, *, saved: Callable[[Path], None], say: Callable[[str], None]
    ) -> None:
        self._rule = rule
        self._saved = saved
        self._say = say
        self._group: dist.ProcessGroup | None = None
        if rule.in_background:
            assert dist.group.WORLD is not None
            # not torch's default
            wait = timeout_of(dist.group.WORLD, torch.device("cpu"))
            self._group = dist.new_group(backend="gloo", group_desc="saves", timeout=wait)
        # memory of the host for this rank's parts, pinned if they are on a GPU
        self._buffers: list[Tensor] = []
        self._under_way: _SaveUnderWay | None = None
        self._agreed: Agreement | None = None  # of the save before

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
        """Saves, or with `in_background` begins to, when the save before is done; waits for the
        run's last. `then` is called on all ranks when the checkpoint is in place, with the group
        over which they may agree, and returns a line to show. Raises SaveError, on all ranks,
        unless `on_error` says to go on."""
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
        """True if the save under way has ended on this rank with an error that ends the run."""
        save = self._under_way
        return save is not None and save.end.is_set() and self._ends_the_run(save)

    def step_done(self) -> None:
        """Reports a save that is in place. An error that ends the run waits for `finish`, because
        the ranks do not see it after the same step."""
        save = self._under_way
        if save is not None and save.end.is_set() and not self._ends_the_run(save):
            self.finish()

    def finish(self) -> None:
        """Waits for the save under way, and reports its outcome. Every rank calls it; raises as
        `save` does."""
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
            self._say(f"not saved: {done.error}; the run goes on (checkpoint.on_error = warn)")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Waits for the save under way at the end of a run, also after an error that all ranks
        have. It does not wait after the loss of a peer, or if the run is out of time."""
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
        """Has the save write copies of its parts, made before this returns, so that the parts
        may change. The save before must have been written, because its copies are in the same
        memory."""
        if save.agreed is not self._agreed:
            self._buffers.clear()
            for _, part in save.parts:
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                self._buffers.append(buffer)
        copies = []
        for (item, part), buffer in zip(save.parts, self._buffers, strict=True):
            copies.append((item, buffer.copy_(part, non_blocking=True)))
        for device in {part.device for _, part in save.parts if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the copies into pinned memory
        save.parts = copies

    def _write(self, begun: _SaveUnderWay, save: PlannedSave) -> None:
        """Writes a planned save and deletes what it makes superfluous, with all other ranks; notes
        what came of it."""
        try:
            write_and_commit(save, self._group)
            begun.is_in_place = True
            if begun.then is not None:
                begun.line = begun.then(self._group)
        except BaseException as error:  # in a thread nobody else would see it
            begun.error = error
        finally:
            begun.end.set()
