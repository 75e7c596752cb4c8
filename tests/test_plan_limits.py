"""`parallel3d-plan limits`: each answer fits, and a little more does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.planner.hardware.framework import FRAMEWORKS
from parallel3d.planner.search.best_layouts import one_that_fits, search
from parallel3d.planner.search.request import Fixed, PlanRequest, Strategy
from parallel3d.planner.search.size_limits import (
    largest_batch,
    longest_sequence,
    smallest_cluster,
)
from tests.plan_json import Said, plan_json
from tests.planned_runs import plan_request

ASKED = "--model llama2-13b --gpu a100-40gb --seq-len 4096 --global-batch 64"


def request(name: str = "llama2-13b", **changes: object) -> PlanRequest:
    usual = {"gpus": 8, "seq_len": 2048, "global_batch_size": 64}
    return plan_request(name, "a100-40gb", **{**usual, **changes})


def held(found: Strategy | None) -> PlanRequest:
    """The request at its limit, whose layout really fits."""
    assert found is not None
    assert found.memory.total <= found.request.usable_bytes
    assert found.parallel.world_size == found.request.gpus
    return found.request


@pytest.mark.parametrize("name", ["gpt2-xl", "llama2-13b", "llama2-70b"])
def test_the_smallest_cluster_holds_the_model_and_fewer_devices_do_not(name: str) -> None:
    at = held(smallest_cluster(request(name, seq_len=1024)))
    fewer = [gpus for gpus in (1, 2, 4, *range(8, at.gpus, 8)) if gpus < at.gpus]
    for gpus in fewer:
        assert one_that_fits(replace(at, gpus=gpus)) is None


def test_of_another_program_whether_one_fits_is_what_its_search_finds() -> None:
    found = set()
    for gpus in (2, 4, 8, 16):
        asked = request("llama3-8b", gpus=gpus, framework=FRAMEWORKS["megatron-core"])
        answer = search(asked, top=1)
        found.add(fits := bool(answer.strategies))
        assert (one_that_fits(asked) is not None) == fits, gpus
    assert found == {True, False}


def test_the_longest_sequence_fits_and_a_sixteenth_more_does_not() -> None:
    asked = request()
    length = held(longest_sequence(asked)).seq_len
    step = 2048
    while 2 * step <= length:
        step *= 2
    assert length > 2048
    assert length % (step // 16) == 0
    assert one_that_fits(replace(asked, seq_len=length + step // 16)) is None


def test_the_largest_batch_is_taken_at_once_and_twice_as_much_is_not() -> None:
    asked = request("gpt2-xl", seq_len=1024, fixed=Fixed(recompute="none", tp=1, pp=1))
    found = largest_batch(asked)
    batch = held(found).global_batch_size
    assert found is not None
    assert batch == found.parallel.dp * found.parallel.microbatch_size
    twice = Fixed(
        recompute="none",
        tp=1,
        pp=1,
        microbatch_size=2 * found.parallel.microbatch_size,
    )
    assert one_that_fits(replace(asked, global_batch_size=2 * batch, fixed=twice)) is None


def test_the_smallest_cluster_needs_no_number_of_devices(capsys: Said) -> None:
    found = plan_json(f"limits cluster {ASKED} --fix tp=4", capsys)["limits"]["cluster"]
    assert found["strategy"]["parallel"]["tp"] == 4
    assert found["strategy"]["gpus"] == found["gpus"]


def test_what_has_no_answer_is_said_and_ends_with_3(capsys: Said) -> None:
    endless = ASKED.replace("--seq-len 4096", "--seq-len 16777216")
    said = plan_json(f"limits cluster {endless} --fix tp=1,pp=1", capsys, status=3)
    assert said["limits"] == {"cluster": None}
