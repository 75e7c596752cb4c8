"""Memory ledger of a dry run: tracks every storage from its first tensor to its last reference,
with its purpose.

A `TorchDispatchMode` sees the outputs of each operator, and a weak reference reports the end of a
storage. `fully_shard` allocates and frees unsharded parameters by resizing their storages, which
bypasses the dispatcher. An active ledger therefore patches `UntypedStorage.resize_`, as torch's
MemTracker does.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d.tools.verify.fakes import READ_THE_DEVICE, storage_id
from parallel3d.torch_private import TorchDispatchMode, local_of, tree_iter

# Purpose of a storage, or the phase that allocated it. "gathered": unsharded parameters. "host": in
# CPU memory (parallel.offload), which is not counted.
Made = Literal["parameters", "optimizer", "gathered", "forward", "backward", "between", "host"]


@dataclass
class _Piece:
    """A live storage."""

    nbytes: int
    made: Made
    action: int  # Index of the action that allocated it. -1: before the step, or resized.
    watch: Any  # Weak reference, kept so that its callback runs.


@dataclass(frozen=True)
class Snapshot:
    """Live bytes at one time, by purpose.

    `at_work` counts only bytes allocated since the current action began. `action` counts the calls
    of `Ledger.begin` in the step: it is odd during an action and even after one.
    """

    made: dict[Made, int]
    at_work: dict[Made, int]
    action: int

    @property
    def total(self) -> int:
        return sum(self.made.values())

    def waiting(self, made: Made) -> int:
        """Returns the live bytes of this purpose that were allocated before the current action
        began.
        """
        return self.made.get(made, 0) - self.at_work.get(made, 0)


class Ledger(TorchDispatchMode):
    """Tracks live bytes and their peak since `forget_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: dict[int, _Piece] = {}
        self._made: Counter[Made] = Counter()
        self._at_work: Counter[Made] = Counter()
        self._total = 0
        self._action = 0
        self._phase: Made = "between"
        self.peak = Snapshot({}, {}, 0)

    def begin(self, phase: Made) -> None:
        """Begins an action, or the time after one. New storages get the purpose `phase`."""
        self._action += 1
        self._phase = phase
        self._at_work.clear()

    def forget_peak(self) -> None:
        """Begins a step: resets the peak and the action count."""
        self._action = 0
        self._at_work.clear()
        for piece in self._pieces.values():
            piece.action = -1
        self.peak = self._snapshot()

    def mark(self, tensors: Iterable[Tensor], made: Made) -> None:
        """Sets the purpose of the tensors' storages."""
        for tensor in tensors:
            piece = self._pieces[storage_id(tensor.untyped_storage())]
            nbytes = piece.nbytes
            self._grow(piece, 0)
            piece.made = made
            self._grow(piece, nbytes)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Context manager that counts storages allocated in the `with` block as host memory."""
        phase = self._phase
        self._phase = "host"
        yield
        self._phase = phase

    def __enter__(self) -> Ledger:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            self._resized(storage)
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_THE_DEVICE:
            return args[0].fake_device
        # Operators inside a DTensor operator are intentionally not seen. On first use, DTensor runs
        # an operator at its global shape to learn the shape of the result.
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, list | tuple):
            for each in tree_iter(result):
                if isinstance(each, Tensor):
                    self._see(each)
        return result

    def _see(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = local_of(tensor)
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._pieces or tensor.is_meta:
            return  # Unlike other fake tensors, a meta tensor has no memory in a real run.
        watch = weakref.ref(storage, lambda _: self._grow(self._pieces.pop(key), 0))
        self._pieces[key] = _Piece(0, self._phase, self._action, watch)
        self._grow(self._pieces[key], storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        piece = self._pieces.get(storage_id(storage))
        if piece is None:
            return
        if storage.nbytes() > piece.nbytes and piece.made != "gathered":
            self._made[piece.made] -= piece.nbytes
            self._made["gathered"] += piece.nbytes
            piece.made = "gathered"
        piece.action = -1  # A resized storage does not count as allocated by the action.
        self._grow(piece, storage.nbytes())

    def _grow(self, piece: _Piece, nbytes: int) -> None:
        more = nbytes - piece.nbytes
        piece.nbytes = nbytes
        if piece.made == "host":
            return
        self._total += more
        self._made[piece.made] += more
        if piece.action == self._action:
            self._at_work[piece.made] += more
        if self._total > self.peak.total:
            self.peak = self._snapshot()

    def _snapshot(self) -> Snapshot:
        return Snapshot(dict(self._made), dict(self._at_work), self._action)
