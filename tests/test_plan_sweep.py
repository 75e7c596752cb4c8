"""`parallel3d-plan sweep`: each line is what `recommend` says of its size, and the cheapest in time
is marked. docs/how-to/plan.md shows an example."""

from __future__ import annotations

import shlex

import pytest

from parallel3d.tools.plan import command as plan
from tests.plan_json import Said, error_line, plan_json

ASKED = "--model llama2-13b --gpu a100-40gb --seq-len 4096 --global-batch 64"


def test_each_size_is_what_recommend_says_of_it(capsys: Said) -> None:
    sizes = plan_json(f"sweep {ASKED} --gpus 32,8,16", capsys)["sizes"]
    assert [size["gpus"] for size in sizes] == [8, 16, 32]
    for size in sizes:
        alone = plan_json(f"recommend {ASKED} --gpus {size['gpus']}", capsys)
        assert size["strategy"] == alone["strategies"][0]
        assert size["none"] is None


def test_the_cheapest_that_is_done_in_time_is_chosen(capsys: Said) -> None:
    asked = f"sweep {ASKED} --gpus 8-64 --tokens 300B --price 2"
    sizes = plan_json(asked, capsys)["sizes"]
    days = {size["gpus"]: size["strategy"]["run"]["days"] for size in sizes}
    hours = {size["gpus"]: size["strategy"]["run"]["gpu_hours"] for size in sizes}
    assert list(days) == [8, 16, 32, 64]
    assert days[8] > days[16] > days[32] > days[64]
    assert plan_json(f"{asked} --max-days {1.01 * days[8]}", capsys)["chosen"] == min(
        hours, key=lambda gpus: hours[gpus]
    )
    assert plan_json(f"{asked} --max-days {1.01 * days[64]}", capsys)["chosen"] == 64
    assert plan_json(f"{asked} --max-days {0.99 * days[64]}", capsys, status=3)["chosen"] is None


def test_devices_are_compared_and_the_fastest_is_first(capsys: Said) -> None:
    asked = "--model llama3-8b --seq-len 4096 --global-batch 64 --gpus 8"
    sizes = plan_json(f"{asked} --gpu a100,l4,h100", capsys)["sizes"]
    assert [size["device"] for size in sizes] == ["h100-80gb", "a100-80gb", "l4"]
    assert sizes == plan_json(f"sweep {asked} --gpu h100-80gb,a100,l4", capsys)["sizes"]


@pytest.mark.parametrize(
    "said, rule",
    [
        ("--gpus 16,x", "must be numbers of devices, such as 16,24,32 or 64-1024"),
        ("--gpus 64-16", "must begin with the smaller number, such as 64-1024"),
        ("--gpus 0-16", "must be numbers of devices"),
        ("--gpus 16 --max-days 3", "--max-days 3: needs a number of tokens; add --tokens 1T"),
        ("--gpus 16,32 --fix tp=7", "parallel.tp = 7: must divide model.heads = 40"),
        ("", "--gpus"),
    ],
)
def test_a_bad_input_is_one_line_and_status_2(said: str, rule: str, capsys: Said) -> None:
    assert plan.main(shlex.split(f"sweep {ASKED} {said}")) == 2
    assert rule in error_line(capsys)
