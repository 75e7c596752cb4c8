"""The pool of worker processes that the distributed tests share: torch is imported once, the workers stay."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A property has no deadline: the time of one example says nothing on a busy machine. `make test-long` asks for "long".
settings.register_profile("project", deadline=None)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))

# Of tensors as small as a test's a second thread takes nothing over, and spins while it waits: on a busy machine that
# made a reference of 1 s of processor time one of 65 s. For the tests' own process and all that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch.compile in a worker: other processes of its own to compile in would each import torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Imported once, before the workers are forked: in each of them it would take seconds. A module of tests whose jobs
# import more names it in PRELOAD.
_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.debug",
    "parallel3d.training.worker",
    "parallel3d.models.llama",
    "tests.conftest",
    "tests.distributed.layouts",
]
_LONGEST_JOB_S = 240.0


@dataclass(frozen=True)
class World:
    """`size` resident processes. `run` calls a module-level function on each, in a process group of its own."""

    size: int
    _folder: Path
    _workers: list[tuple[BaseProcess, Connection]]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` returns on each rank. A rank that raises fails the test with its own traceback."""
        store = tempfile.mktemp(dir=self._folder)
        for _, pipe in self._workers:
            pipe.send((function, args, store))
        answers = []
        for rank, (_, pipe) in enumerate(self._workers):
            if not pipe.poll(_LONGEST_JOB_S):
                self.close()  # what still runs there would answer in the place of the next job
                raise TimeoutError(f"rank {rank} of {self.size} did not answer within {_LONGEST_JOB_S:.0f} s")
            answers.append(pipe.recv())
        failed = [f"rank {rank} of {self.size}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        return [value for _, value in answers]

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
    """A worker: job after job until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        gc.freeze()  # what is there between jobs stays, modules mostly: the collections below need not look at it
        try:
            function, args, store = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
            value, text = function(*args), ""
            dist.barrier()  # nobody leaves while another still needs it
        except BaseException:
            value, text = None, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _forget_meshes()
        gc.collect()
        pipe.send((text, value))


def _forget_meshes() -> None:
    """Empties torch's caches that hold meshes: one gives DTensors the mesh of the first job that had an equal one, and
    all keep process groups, whose threads wake a hundred times a second: left alone, idle pools have hundreds of them.
    """
    import torch
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # torch's own tests use it likewise

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `pytest -n 2` one runner has all of tests/distributed, so that there is one pool of each size, and the other
    the rest, a file at a time. pytest-xdist's own groups (--dist loadgroup) do nothing under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class OnePoolOfEachSize(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "distributed" if "distributed/" in file else file

    return OnePoolOfEachSize(config, log)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    """`world(n)`: the pool of n processes, started when first asked for."""
    context = multiprocessing.get_context("forkserver")
    modules = {item.module for item in request.session.items if "world" in getattr(item, "fixturenames", ())}
    more = {name for module in modules for name in getattr(module, "PRELOAD", ())}
    context.set_forkserver_preload([*_PRELOAD, *sorted(more)])
    pools: dict[int, World] = {}

    def pool(size: int) -> World:
        if size not in pools or not pools[size].is_open:
            workers = []
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
                process.start()
                theirs.close()
                workers.append((process, ours))
            pools[size] = World(size, tmp_path_factory.mktemp(f"world{size}"), workers)
        return pools[size]

    yield pool
    for each in pools.values():
        each.close(patience_s=5)
