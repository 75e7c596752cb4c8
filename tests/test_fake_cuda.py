"""What a step does on a GPU, asked of a machine without one: the trainer runs on fake tensors of `cuda:0`.

A fake tensor has a shape, a dtype and a device, and no numbers. So the whole step can be followed, rank by rank: which
tensors lie where, when the host would wait for the device or copy to it, and what every rank sends to whom. What cannot
be seen: what a kernel computes, how streams race, how long anything takes, and blocks that are compiled, because the
compiler needs Triton, which needs a GPU. `tests/fake_cuda/` holds the layouts, the census and the planted faults.

[Note: waits and copies] Where the host waits for the device, no kernel is queued meanwhile, and the device idles until
the next one is. So each place that waits, or copies to the device, is in a list here, with the reason and how often a
step may do it. A place that is not in the list fails, and so does one in the list that no layout comes to.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import get_args

import pytest
import torch

from parallel3d.config.recipe import OptimizerName, Precision, Recipe, Transport
from parallel3d.config.rules import validate
from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.schedules.registry import SCHEDULES
from tests.fake_cuda.facts import Program, Sent
from tests.fake_cuda.layouts import BLOCKS, FAULTY, LAYOUTS, LONG, USUAL

ROOT = Path(__file__).parents[1]
CHILDREN = 2  # processes that share the programs


@dataclass(frozen=True)
class Allowed:
    """A place that may wait or copy, and how often it does so in one step of a recipe."""

    place: str
    why: str
    times: Callable[[Recipe], int] = lambda recipe: 1


WAITS = [
    Allowed(
        "training/trainer.py Trainer._result",
        "loss, norm, labels and votes to stop are read at once, before the optimizer may step",
    ),
    Allowed(
        "training/hooks.py CountLabelsFirst.before_forward",
        "a gradient that is stepped with in the backward needs the labels of all ranks counted before it",
        lambda recipe: int(recipe.optimizer.step_in_backward),
    ),
    Allowed(
        "training/local_sgd/replicas.py LocalSgd._receive",
        "a pseudo-gradient that is not finite must not reach the outer parameters",
        lambda recipe: int(recipe.local_sgd.sync_every is not None),
    ),
]
COPIES = [
    Allowed(
        "training/trainer.py Trainer._on_device",
        "inputs, labels, the keys of dropout, and of each microbatch's documents the starts and the positions",
        lambda recipe: 2 + (recipe.model.dropout > 0) + 2 * recipe.microbatches * (recipe.data.documents == "mask"),
    ),
]
MIXED = {  # operators that read a CPU tensor beside one of the device, by place, and the reason
    "layers/dropout.py Dropout.dropped: aten::add.Tensor": "a number of the host's is handed to the kernel by value",
}
HELD_ON_CPU = {"state step": "adafactor computes with the number of the step on the host"}
NCCL_DTYPES = {
    "int8",
    "uint8",
    "bool",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
}  # NCCL has 8-bit floats, too
POINT_TO_POINT = ("send", "recv_")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    """What every rank of the usual layouts does in a step, and what it does with each of the faults."""
    return _programs(tmp_path_factory, "usual")


def _programs(tmp_path_factory: pytest.TempPathFactory, of: str) -> list[Program]:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, g++ or c++, which makes a CPU build of torch take fake CUDA tensors")
    if torch.version.cuda is not None or torch.version.hip is not None or sys.platform != "linux":
        pytest.skip("needs a CPU build of torch on Linux: this one has a device guard of its own, and may have a GPU")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the runners share
    folder /= f"fake_cuda_{of}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _run_all(folder, compiler, of)
    lines = "".join((folder / f"{part}.jsonl").read_text() for part in range(CHILDREN)).splitlines()
    return [Program.of_json(line) for line in lines]


def _run_all(folder: Path, compiler: str, of: str) -> None:
    """Compiles the guard, and runs the programs in children of this process."""
    guard, package = folder / "guard.so", Path(torch.__file__).parent
    includes = [package / "include", package / "include/torch/csrc/api/include"]
    command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", str(ROOT / "tests/fake_cuda/guard.cpp")]
    command += [*(f"-I{path}" for path in includes), f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(guard)]
    subprocess.run(command, check=True)
    children = []
    for part in range(CHILDREN):
        command = [sys.executable, "-m", "tests.fake_cuda", str(guard), of, str(part), str(CHILDREN)]
        with (folder / f"{part}.jsonl").open("w") as out, (folder / f"{part}.txt").open("w") as errors:
            children.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors))
    for part, child in enumerate(children):
        assert child.wait() == 0, (folder / f"{part}.txt").read_text()[-4000:]
    (folder / "done").touch()


@pytest.fixture
def sound(programs: list[Program]) -> list[Program]:
    """The programs without a fault."""
    return [program for program in programs if not program.faults]


def test_the_layouts_are_recipes_that_are_allowed_and_cover_every_name_of_a_registry() -> None:
    for recipe in LAYOUTS.values():
        validate(recipe)
    recipes = LAYOUTS.values()
    assert {each.parallel.schedule for each in recipes if each.parallel.pp > 1} == set(SCHEDULES)
    assert {each.parallel.strategy for each in recipes if each.parallel.dp > 1} == set(get_args(ShardingName))
    assert {each.optimizer.name for each in recipes} == set(get_args(OptimizerName))
    assert {each.train.precision for each in recipes} == set(get_args(Precision))
    assert {each.local_sgd.transport for each in recipes if each.local_sgd.sync_every} <= set(get_args(Transport))


@pytest.mark.parametrize("layout", USUAL)
def test_every_rank_of_a_layout_trains_a_step(sound: list[Program], layout: str) -> None:
    ranks = [program for program in sound if program.layout == layout]
    assert len(ranks) == LAYOUTS[layout].parallel.world_size
    assert not [f"{program}: {program.error}" for program in ranks if program.error]


def test_what_the_trainer_holds_and_computes_with_is_on_the_device(sound: list[Program]) -> None:
    assert not [finding for program in sound for finding in misplaced(program)]
    assert MIXED.keys() == {place for program in sound for place in program.mixed}
    assert HELD_ON_CPU.keys() == {each.split(" of ")[0] for program in sound for each in program.strays}


def test_the_host_waits_for_the_device_where_the_list_says_and_nowhere_else(sound: list[Program]) -> None:
    assert not [finding for program in sound for finding in unlisted(program, program.waits, WAITS)]
    assert not unused(WAITS)


def test_the_host_copies_to_the_device_where_the_list_says_and_nowhere_else(sound: list[Program]) -> None:
    assert not [finding for program in sound for finding in unlisted(program, program.copies, COPIES)]
    assert not unused(COPIES)


def test_what_is_sent_is_on_the_device_contiguous_and_of_a_dtype_that_nccl_has(sound: list[Program]) -> None:
    assert sum(len(program.sent) for program in sound) > 1000
    assert not [finding for program in sound for finding in unfit(program)]


def test_a_block_along_the_sequence_has_six_gathers_and_four_scatters(sound: list[Program]) -> None:
    """The forward has 2 + 2: attention and MLP each gather their input and scatter their output. The backward of a
    scatter is a gather and that of a gather a scatter: 2 + 2 more. The last two gathers are of the inputs, which are
    kept as this rank's part alone and are needed whole for the gradients of the weights."""
    assert block_collectives(sound) == {"_allgather_base_": 6, "_reduce_scatter_base_": 4}


def test_all_ranks_of_a_group_send_the_same_in_one_order_over_groups(sound: list[Program]) -> None:
    assert not [finding for layout in USUAL for finding in disagreements(sound, layout)]


@pytest.mark.long
def test_the_other_layouts_have_none_of_these_mistakes(tmp_path_factory: pytest.TempPathFactory) -> None:
    programs = _programs(tmp_path_factory, "long")
    assert {program.layout for program in programs} == set(LONG)
    assert not [f"{program}: {program.error}" for program in programs if program.error]
    for program in programs:
        waits = unlisted(program, program.waits, WAITS) + unlisted(program, program.copies, COPIES)
        assert not misplaced(program) + unfit(program) + waits
    assert not [finding for layout in LONG for finding in disagreements(programs, layout)]


FOUND = {
    "a CPU tensor added": "FakeTensorDeviceMismatchError",
    "a CPU number stacked": "aten::stack",
    "a state on the CPU": "state late of",
    "a buffer on the CPU": "buffer late",
    "a number read": "faults.py _item: 2 times",
    "a list read": "faults.py _list: 1 times",
    "a branch": "faults.py _branch: 1 times",
    "a copy to the CPU": "faults.py _to_cpu: 1 times",
    "a mask as an index": "faults.py _mask: 1 times",
    "places of what is not zero": "faults.py _nonzero: 1 times",
    "a constant copied": "faults.py _constant: 1 times",
    "a CPU tensor reduced": "float32[4] of cpu",
    "int16 reduced": "int16[4] of cuda:0",
    "a transposed tensor reduced": "not contiguous",
    "two dtypes reduced": "allreduce_ float32[4] on rank 0, allreduce_ bfloat16[4] on rank 1",
    "reduced by one rank": "nothing on rank 0, allreduce_ float32[1] on rank 1",
    "orders in a ring": "in a ring",
    "a message too short": "float32[4] is sent, float32[5] is received",
    "a message without a receiver": "float32[1] is sent, nothing is received",
    "one more gather in each block": "{'_allgather_base_': 9, '_reduce_scatter_base_': 4}",
}


def test_every_planted_fault_is_looked_for() -> None:
    assert sorted(FOUND) == sorted(fault for _, faults in FAULTY for fault in faults)


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found(programs: list[Program], fault: str) -> None:
    faulty = [program for program in programs if fault in program.faults]
    layout = faulty[0].layout
    findings = [f"{program}: {program.error}" for program in faulty if program.error]
    for program in faulty:
        findings += misplaced(program) + unfit(program)
        findings += unlisted(program, program.waits, WAITS) + unlisted(program, program.copies, COPIES)
    findings += disagreements(faulty, layout)
    if layout == BLOCKS[1]:
        fewer = [program for program in programs if program.layout == BLOCKS[0]]
        findings.append(str(block_collectives([*fewer, *faulty])))
    assert [finding for finding in findings if FOUND[fault] in finding], findings


def misplaced(program: Program) -> list[str]:
    """Returns what is held on the CPU, and the operators that mix tensors of both where the list does not have it."""
    mixed = [f"{program.lines[place.split(':')[0]]} {place}" for place in program.mixed if place not in MIXED]
    held = [each for each in program.strays if each.split(" of ")[0] not in HELD_ON_CPU]
    return [f"{program}: {each}" for each in (*held, *mixed)]


def unlisted(program: Program, found: Counter[str], allowed: list[Allowed]) -> list[str]:
    """Returns the places that do something more or less often than is allowed."""
    listed = Counter({each.place: each.times(LAYOUTS[program.layout]) for each in allowed})
    return [
        f"{program}: {program.lines.get(place, '')} {place}: {found[place]} times, not {listed[place]}"
        for place in sorted(found.keys() | listed.keys())
        if found[place] != listed[place]
    ]


def unused(allowed: list[Allowed]) -> list[str]:
    """Returns the places in a list that no layout comes to."""
    return [each.place for each in allowed if not any(each.times(recipe) for recipe in LAYOUTS.values())]


def unfit(program: Program) -> list[str]:
    """Returns what NCCL would refuse, or would not find on the device."""
    return [
        f"{program}: {program.lines.get(sent.place)} {sent.op}: {operand.dtype}[{operand.numel}] of {operand.device}"
        + ("" if operand.is_contiguous else ", not contiguous")
        for sent in program.sent
        for operand in sent.operands
        if operand.device != "cuda:0" or not operand.is_contiguous or operand.dtype not in NCCL_DTYPES
    ]


def block_collectives(programs: list[Program]) -> dict[str, int]:
    """Returns the collectives that a model of three blocks has more of than one of two, by their kind."""
    fewer, more = (
        next(Counter(sent.op for sent in each.sent) for each in programs if each.layout == layout and each.rank == 0)
        for layout in BLOCKS
    )
    return {op: more[op] - fewer[op] for op in sorted(more.keys() | fewer.keys()) if more[op] != fewer[op]}


def disagreements(programs: list[Program], layout: str) -> list[str]:
    """Returns where the members of a group do not send the same, where messages and receivers do not match, and where
    the ranks wait for each other in a ring because they come to several groups in different orders."""
    ranks = [program for program in programs if program.layout == layout]
    members: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
    messages: defaultdict[tuple[str, int, int, str], list[str]] = defaultdict(list)
    order: TopologicalSorter[tuple[str, int]] = TopologicalSorter()
    for program in ranks:
        calls = [sent for sent in program.sent if sent.op not in POINT_TO_POINT]
        for sent in calls:
            for rank in sent.ranks:
                members[sent.group].setdefault(rank, [])
            members[sent.group][program.rank].append(sent.content)
            for other, received, given in sent.parts:
                dtype = sent.operands[0].dtype
                messages[sent.group, program.rank, other, "send"].append(f"{dtype}[{given}]")
                messages[sent.group, other, program.rank, "recv_"].append(f"{dtype}[{received}]")
        for one, other in pairwise(_numbered(calls)):
            order.add(other, one)
        for sent in (sent for sent in program.sent if sent.op in POINT_TO_POINT):
            assert sent.peer is not None
            ends = (program.rank, sent.peer) if sent.op == "send" else (sent.peer, program.rank)
            messages[(sent.group, *ends, sent.op)].append(sent.content.removeprefix(f"{sent.op} "))
    found = []
    for group, by_rank in members.items():
        (first, expected), *rest = by_rank.items()
        for rank, contents in rest:
            different = (pair for pair in zip_longest(expected, contents, fillvalue="nothing") if pair[0] != pair[1])
            found += [f"{layout}, group {group}: {a} on rank {first}, {b} on rank {rank}" for a, b in different][:3]
    for group, source, target in sorted({key[:3] for key in messages}):
        sent, received = (messages[group, source, target, op] for op in POINT_TO_POINT)
        different = (pair for pair in zip_longest(sent, received, fillvalue="nothing") if pair[0] != pair[1])
        words = f"{layout}, group {group}, from rank {source} to {target}"
        found += [f"{words}: {a} is sent, {b} is received" for a, b in different][:3]
    try:
        order.prepare()
    except CycleError as error:
        found.append(f"{layout}: these wait for each other in a ring: {error.args[1]}")
    return found


def _numbered(calls: list[Sent]) -> Iterator[tuple[str, int]]:
    """Yields each call as its group and how many calls of the group came before it."""
    before: Counter[str] = Counter()
    for sent in calls:
        yield sent.group, before[sent.group]
        before[sent.group] += 1
