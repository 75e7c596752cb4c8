"""The pool of worker processes that the distributed tests share: torch is imported once, the
workers stay."""

from __future__ import annotations

import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

_LONGEST_JOB_S = 240.0


@dataclass(frozen=True)
class World:
    """`size` resident processes. `run` calls a module-level function on each, in a new process
    group."""

    size: int
    _folder: Path
    _workers: Sequence[tuple[BaseProcess, Connection]]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns the result of `function(*args)` on each rank. If a rank raises, the test fails
        with its traceback, even if another rank hangs."""
        store = tempfile.mktemp(dir=self._folder)
        for _, pipe in self._workers:
            pipe.send((function, args, store))
        answers = []
        patience_s = _LONGEST_JOB_S
        for _, pipe in self._workers:
            if pipe.poll(patience_s):
                answers.append(pipe.recv())
            else:
                answers.append((f"did not answer within {_LONGEST_JOB_S:.0f} s", None))
                patience_s = 0.0  # the error that made it hang may already be in a later pipe
        if not patience_s:
            self.close()  # a late answer would be taken for that of the next job
        failed = [
            f"rank {rank} of {self.size}:\n{text}" for rank, (text, _) in enumerate(answers) if text
        ]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        return [value for _, value in answers]

    @classmethod
    def start(cls, context: ForkServerContext, size: int, folder: Path) -> World:
        """Starts the processes. `folder` holds one file for each rendezvous."""
        workers: list[tuple[BaseProcess, Connection]] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            workers.append((process, ours))
        return cls(size, folder, workers)

    @property
    def is_open(self) -> bool:
        return all(process.is_alive() for process, _ in self._workers)

    def close(self, patience_s: float = 0.0) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(timeout=patience_s)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, size: int, pipe: Connection) -> None:
    """Runs jobs in a worker until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        # The collections below need not look at what stays between jobs, mostly modules.
        gc.freeze()
        try:
            function, args, store = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
            )
            torch.manual_seed(0)  # equal on all ranks, whatever earlier jobs drew
            value = function(*args)
            text = ""
            dist.barrier()  # no rank leaves while another still needs it
        except BaseException:
            value = None
            text = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _forget_meshes()
        pipe.send((text, value))
        value = None  # the traceback of an error in it keeps trainers and their groups alive
        gc.collect()


def _forget_meshes() -> None:
    """Empties torch's caches that hold meshes: one gives DTensors the mesh of the first job that
    had an equal one, and all keep process groups, whose threads wake a hundred times a second: left
    alone, idle pools have hundreds of them.
    """
    import torch
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor._redistribute import (
        _gen_transform_infos,
        clear_redistribute_planner_cache,
    )

    # torch's own tests use it likewise
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
