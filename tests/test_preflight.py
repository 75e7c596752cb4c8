"""`parallel3d-launch check`: what it says of a cluster that is in order, slow or broken, and of two
hosts for real."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_restarts import ENVIRONMENT, write_recipe

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.planner.hardware.units import GIB
from parallel3d.tools.launch.command import main
from parallel3d.tools.preflight.facts import RankFacts, RecipeNeeds, host_facts, marked
from parallel3d.tools.preflight.findings import CheckReport
from parallel3d.tools.preflight.measure import TimedLink

Said = pytest.CaptureFixture[str]
RECIPE = Recipe(
    model=ModelConfig(
        layers=1,
        hidden=8,
        heads=2,
        ffn_hidden=8,
        vocab=264,
    ),
    train=TrainConfig(steps=1, global_batch_size=6, seq_len=8),
    parallel=ParallelConfig(tp=2, dp_shard=3),
)
VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "parallel3d": "0.1.0"}


def in_order() -> CheckReport:
    """Three hosts of two ranks; tp is within a host, and dp_shard is across them. All links go at 1
    GB/s."""
    facts = []
    links = []
    for rank in range(6):
        disk = 9 * GIB if rank % 2 == 0 else None
        facts.append(
            RankFacts(
                rank=rank,
                host=f"node{rank // 2}",
                device="CPU",
                versions=VERSIONS,
                free_bytes=4 * GIB,
                clock_s=100.0 + 0.1 * rank,
                disk_free_bytes=disk,
            )
        )
        for axis, other in {"tp": rank ^ 1, "dp_shard": (rank + 2) % 6}.items():
            for pair in ((rank, other), (other, rank)):
                links.append(TimedLink(axis=axis, kind="message", ranks=pair, bandwidth=1e9))
    needs = RecipeNeeds(
        memory_bytes=(GIB,),
        checkpoints=3,
        checkpoint_bytes=GIB,
    )
    return CheckReport(
        recipe=RECIPE,
        needs=needs,
        facts=facts,
        matmuls=[1e10] * 6,
        links=links,
    )


def with_fact(report: CheckReport, rank: int, **changes: Any) -> CheckReport:
    facts = list(report.facts)
    facts[rank] = replace(facts[rank], **changes)
    return replace(report, facts=facts)


@pytest.mark.parametrize(
    "rank, changes, text",
    [
        (
            3,
            {"versions": VERSIONS | {"torch": "2.11.0"}},
            "torch 2.11.0 on rank 3 (node1), 2.13.0 elsewhere",
        ),
        (
            2,
            {"free_bytes": GIB},
            "ranks 2 and 3 (node1): the recipe needs 2.0 GiB, but only 1.0 GiB are free",
        ),
        (
            4,
            {"disk_free_bytes": 2 * GIB},
            "node2: run_dir has 2.0 GiB free, but 3 checkpoints take 3.0",
        ),
        (4, {"problems": ("run_dir = /x: cannot be written",)}, "node2: run_dir = /x: cannot be"),
    ],
)
def test_what_would_break_the_run_is_told_with_its_host(
    rank: int, changes: dict[str, Any], text: str
) -> None:
    assert in_order().findings() == []
    report = with_fact(in_order(), rank, **changes)
    (finding,) = report.findings()
    assert finding.breaks
    assert finding.text.startswith(text)
    assert "1 would break the run" in [*report.lines()][-1]


def test_a_folder_that_another_host_does_not_see_is_told(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "runs" / "one")
    facts = in_order().facts[0]
    with marked(run_dir) as mark:
        assert (tmp_path / mark).is_file()
        found = host_facts(facts, RECIPE, run_dir, mark)
    assert found.disk_free_bytes
    assert found.problems == ()
    (problem,) = host_facts(facts, RECIPE, run_dir, mark).problems
    assert "is not on storage shared with rank 0" in problem
    assert not [*tmp_path.iterdir()]


def test_four_local_ranks_are_fine_and_leave_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run", ParallelConfig(tp=2, dp_shard=2))
    before = sorted(tmp_path.iterdir())
    check = f"-m parallel3d.tools.launch check {recipe} train.callbacks=[] --json".split()
    ended = subprocess.run(
        [sys.executable, *check],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert ended.returncode == 0, ended.stderr
    tree = json.loads(ended.stdout)
    assert not any(each["breaks"] for each in tree["findings"])
    assert ended.stderr == ""
    assert [rate > 0 for rate in tree["matmul_flops"]] == [True] * 4
    links = {(each["axis"], each["kind"]): each for each in tree["links"]}
    assert set(links) == {*product(("tp", "dp_shard"), ("all-reduce", "message"))}
    assert links["tp", "all-reduce"]["ranks"] in ([0, 1], [2, 3])
    for each in tree["links"]:
        assert each["bandwidth"] > 1e6
    assert sorted(tmp_path.iterdir()) == before


def test_a_data_file_that_is_missing_breaks_the_run_and_is_told_once(
    tmp_path: Path, capfd: Said
) -> None:
    recipe = write_recipe(tmp_path, "run", ParallelConfig())
    (tmp_path / "corpus.txt").unlink()
    assert main(["check", str(recipe), "train.callbacks=[]"]) == 1
    said = capfd.readouterr()
    assert said.err.count("\n") == 1
    assert "corpus.txt: no such file or folder" in said.err
