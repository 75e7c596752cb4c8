"""Settings of all tests: the profiles of hypothesis, the order of the modules, and the fixture
`world`. Two runners take one file after the other, each with pools of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version

import pytest
from hypothesis import settings

from tests.distributed.world import World

# A property has no deadline: the time of one example says nothing on a busy machine. `make
# test-long` asks for "long".
settings.register_profile("project", deadline=None)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))

# A second thread takes over nothing of tensors as small as a test's, and spins while it waits: on a
# busy machine a reference of 1 s of processor time took 65 s. The setting is for the tests' own
# process and all that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch.compile compiles in the worker itself: each process that it starts for that would import
# torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# These modules are imported once, before the workers are forked: in each worker that would take
# seconds. A module of tests whose jobs import more names it in PRELOAD.
_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.debug",
    "parallel3d.training.worker",
    "parallel3d.models.llama",
    "tests.distributed.world",
    "tests.distributed.training_cases",
]


# It keeps the process groups of earlier jobs, whose threads wake all the time. There a pool serves
# four tests.
_IS_TORCH_2_11 = version("torch").startswith("2.11.")

# A runner that begins one of these last keeps the other one waiting.
_LONGEST_FIRST = [
    "distributed.test_experts",
    "test_plan_verify",
    "test_run_record",
    "test_fake_cuda",
    "distributed.test_existing_models",
    "test_run",
    "test_faults",
    "distributed.test_check_layout",
    "distributed.test_convert",
    "distributed.test_context",
    "distributed.test_parallel_model",
    "distributed.test_parity",
    "test_hf_memory",
    "distributed.test_optimizers",
    "test_plan_recommend",
    "distributed.test_precision",
    "distributed.test_context_layer",
    "test_launch",
    "distributed.test_spikes",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        module = item.nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
        name = module.replace("/", ".")
        return _LONGEST_FIRST.index(name) if name in _LONGEST_FIRST else len(_LONGEST_FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], World]]:
    """`world(n)` is the pool of n processes, which are started when a test first asks for them."""
    context = multiprocessing.get_context("forkserver")
    modules = {
        item.module
        for item in request.session.items
        if "world" in getattr(item, "fixturenames", ())
    }
    more = {name for module in modules for name in getattr(module, "PRELOAD", ())}
    context.set_forkserver_preload([*_PRELOAD, *sorted(more)])
    pools: dict[int, World] = {}
    asked = Counter[int]()

    def pool(size: int) -> World:
        asked[size] += 1
        if size in pools and _IS_TORCH_2_11 and asked[size] % 4 == 0:
            pools.pop(size).close(patience_s=5)
        if size not in pools or not pools[size].is_open:
            pools[size] = World.start(context, size, tmp_path_factory.mktemp(f"world{size}"))
        return pools[size]

    yield pool
    for each in pools.values():
        each.close(patience_s=5)
