"""What a step does on a GPU, on a machine without one: the trainer runs on fake tensors of
`cuda:0`, which have a shape, a dtype and a device, and no numbers.

The whole step is followed rank by rank: which tensors lie where, when the host waits for the
device or copies to it, and what each rank sends to whom. It cannot show what a kernel computes,
races of streams, time, or compiled blocks, whose compiler needs a GPU.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from parallel3d.config.rules import validate
from tests.fake_cuda.layouts import BLOCKS, LAYOUTS
from tests.fake_cuda.program import Program

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("g++") or shutil.which("c++")
NCCL_DTYPES = {"int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
POINT_TO_POINT = ("send", "recv_")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, g++ or c++"),
    pytest.mark.skipif(
        torch.version.cuda is not None or sys.platform != "linux",
        reason="needs a CPU build of torch on Linux",
    ),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    """Every rank of every layout."""
    guard = tmp_path_factory.mktemp("fake_cuda") / "guard.so"
    package = Path(torch.__file__).parent
    include = package / "include"
    lib = package / "lib"
    source = str(ROOT / "tests/fake_cuda/guard.cpp")
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", "-lc10", "-ltorch_cpu"]
    folders = [f"-I{include}", f"-L{lib}", "-o", str(guard)]
    assert COMPILER is not None
    subprocess.run([COMPILER, source, *folders, *options], check=True)
    census = [sys.executable, "-m", "tests.fake_cuda.census", str(guard)]
    found = subprocess.run(census, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    return pickle.loads(found)


def test_every_layout_trains_a_step(programs: list[Program]) -> None:
    for recipe in LAYOUTS.values():
        validate(recipe)
    assert not [f"{each.layout}, rank {each.rank}: {each.error}" for each in programs if each.error]
    assert len(programs) == sum(recipe.parallel.world_size for recipe in LAYOUTS.values())


def test_everything_is_on_the_device(programs: list[Program]) -> None:
    assert not [(program.layout, program.misplaced) for program in programs if program.misplaced]


def test_the_host_waits_once_and_copies_only_the_batch(programs: list[Program]) -> None:
    """Loss, norm, target tokens and votes are read together before the optimizer steps. Copied are
    inputs, labels, keys of dropout, and starts and positions of the documents."""
    for program in programs:
        recipe = LAYOUTS[program.layout]
        if recipe.parallel.offload:
            continue
        copies = 3 if recipe.model.dropout else 2
        if recipe.data.documents == "mask":
            copies += 2 * recipe.microbatches
        assert (program.waits.total(), program.copies.total()) == (1, copies), program


def test_offload_copies_parameters_before_their_use_and_gradients_after_it(
    programs: list[Program],
) -> None:
    """Two blocks of 9 parameters, the embedding, the last norm and the head are copied before the
    forward pass, those of the blocks again before the backward pass. The norms' gradients, which tp
    sums, go to the GPU and back in one piece."""
    offloaded = [program for program in programs if program.layout == "offload, tp"]
    assert len(offloaded) == 4
    for program in offloaded:
        assert program.copies.total() == (18 + 3) + 18 + 1 + 2  # the last are ids and labels
        assert program.waits.total() == (18 + 3) + 1 + 1  # the last is the loss with the norm


def test_nccl_can_send_what_is_sent(programs: list[Program]) -> None:
    assert sum(len(program.sent) for program in programs) > 200
    assert not [each for program in programs for each in unfit(program)]


def test_a_sequence_parallel_block_has_six_all_gathers_and_four_reduce_scatters(
    programs: list[Program],
) -> None:
    """In the forward pass attention and MLP each gather their input and scatter their output. The
    backward pass does the conjugates, and gathers both inputs again for the weight gradients."""
    ops = {}
    for program in programs:
        if program.rank == 0:
            ops[program.layout] = Counter(sent.op for sent in program.sent)
    assert ops[BLOCKS[1]] - ops[BLOCKS[0]] == {"_allgather_base_": 6, "_reduce_scatter_base_": 4}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_group_send_the_same_in_one_order(
    programs: list[Program], layout: str
) -> None:
    assert not disagreements([program for program in programs if program.layout == layout])


def unfit(program: Program) -> list[str]:
    """Returns what NCCL would refuse."""
    found = []
    for sent in program.sent:
        for operand in sent.operands:
            if operand.device != "cuda:0" or operand.dtype not in NCCL_DTYPES:
                found.append(f"{program.layout}, {sent.place}: {operand}")
            if not operand.is_contiguous:
                found.append(f"{program.layout}, {sent.place}: not contiguous: {operand}")
    return found


def disagreements(ranks: list[Program]) -> list[str]:
    """Returns where members of a group do not send the same, and where a message and its receiver
    do not match."""
    calls: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
    messages: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for program in ranks:
        for sent in program.sent:
            if sent.op in POINT_TO_POINT:
                ends = (program.rank, sent.peer)
                path = ends if sent.op == "send" else ends[::-1]
                messages[sent.group, *path, sent.op].append(sent.content)
                continue
            for rank in sent.ranks:
                calls[sent.group].setdefault(rank, [])
            calls[sent.group][program.rank].append(f"{sent.op} {sent.content}")
    found = []
    for group, by_rank in calls.items():
        (first, expected), *rest = by_rank.items()
        for rank, contents in rest:
            for a, b in zip_longest(expected, contents, fillvalue="nothing"):
                if a != b:
                    found.append(f"group {group}: {a} on rank {first}, {b} on rank {rank}")
    for path in {key[:3] for key in messages}:
        sent_and_received = (messages[*path, op] for op in POINT_TO_POINT)
        for a, b in zip_longest(*sent_and_received, fillvalue="nothing"):
            if a != b:
                found.append(f"{path}: {a} is sent, {b} is received")
    return found
