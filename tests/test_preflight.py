"""`parallel3d-launch check`: what it says of a cluster that is in order, slow or broken, and of two
hosts for real."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_restarts import ENVIRONMENT, write_recipe

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.units import GIB
from parallel3d.tools.launch.command import main
from parallel3d.tools.plan.hardware import find_cluster
from parallel3d.tools.preflight.emit import hardware_text
from parallel3d.tools.preflight.expected import RecipeNeeds, base_cluster
from parallel3d.tools.preflight.facts import RankFacts, disk_facts, leave_mark
from parallel3d.tools.preflight.findings import Finding, Measured, find
from parallel3d.tools.preflight.measure import TimedLink

Said = pytest.CaptureFixture[str]
LAYOUT = ParallelConfig(tp=2, dp_shard=3)
VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "parallel3d": "0.1.0"}
MS = 1e-3


def in_order() -> Measured:
    """Three hosts of two ranks; tp is within a host, and dp_shard is across them. Messages go at 1
    GB/s, and those of all ranks but the last one of an axis to the next are known, and back."""
    facts = [
        RankFacts(
            rank=rank,
            host=f"node{rank // 2}",
            device="CPU",
            versions=VERSIONS,
            free_bytes=4 * GIB,
            clock_s=100.0 + 0.1 * rank,
        )
        for rank in range(6)
    ]
    facts[::2] = [replace(each, disk_free_bytes=9 * GIB) for each in facts[::2]]
    links = []
    for rank in range(6):
        tp = (rank - rank % 2, rank - rank % 2 + 1)
        for axis, group in {"tp": tp, "dp_shard": tuple(range(rank % 2, 6, 2))}.items():
            links.append(link(axis, "all-reduce", group, 2 * MS, 0.5e9))
            at = group.index(rank)
            for other in group[max(0, at - 1) : at + 2]:
                if other != rank:
                    links.append(link(axis, "message", (rank, other), 1 * MS, 1e9))
    return Measured(facts=facts, matmuls=[10e9] * 6, links=links)


def link(
    axis: str, kind: Any, ranks: tuple[int, ...], latency_s: float, bytes_per_s: float
) -> TimedLink:
    sizes = (1 << 10, 1 << 16, 1 << 22)
    rows = tuple((size, latency_s + size / bytes_per_s) for size in sizes)
    return TimedLink(axis=axis, kind=kind, ranks=ranks, rows=rows)


def with_rates(measured: Measured, rates: dict[tuple[str, str], float]) -> Measured:
    """Returns the same with other bytes per second from one host to another."""
    links = []
    for each in measured.links:
        pair = measured.facts[each.ranks[0]].host, measured.facts[each.ranks[-1]].host
        if each.kind == "message" and pair in rates:
            each = link(each.axis, "message", each.ranks, 1 * MS, rates[pair])
        links.append(each)
    return replace(measured, links=links)


def found(measured: Measured, tp_note: str | None = None) -> list[Finding]:
    needs = RecipeNeeds(memory_bytes=(GIB,), checkpoints=3, checkpoint_bytes=GIB)
    return find(measured, needs, LAYOUT, tp_note)


def with_fact(measured: Measured, rank: int, **changes: Any) -> Measured:
    facts = list(measured.facts)
    facts[rank] = replace(facts[rank], **changes)
    return replace(measured, facts=facts)


def test_a_cluster_in_order_has_no_finding() -> None:
    assert found(in_order()) == []


@pytest.mark.parametrize(
    ("rank", "changes", "text"),
    [
        (
            3,
            {"versions": VERSIONS | {"torch": "2.11.0"}},
            "torch 2.11.0 on rank 3 (node1), 2.13.0 elsewhere",
        ),
        (
            2,
            {"free_bytes": GIB},
            "ranks 2 and 3 (node1): the recipe needs 2.0 GiB and 1.0 are free",
        ),
        (
            4,
            {"disk_free_bytes": 2 * GIB},
            "node2: run_dir has 2.0 GiB free, and 3 checkpoints take 3.0",
        ),
        (4, {"problems": ("run_dir = /x: cannot be written",)}, "node2: run_dir = /x: cannot be"),
    ],
)
def test_what_would_break_the_run_is_told_with_its_host(
    rank: int, changes: dict[str, Any], text: str
) -> None:
    (finding,) = found(with_fact(in_order(), rank, **changes))
    assert finding.breaks and finding.text.startswith(text)


def test_another_python_a_clock_and_tp_across_nodes_are_warned_of() -> None:
    measured = with_fact(in_order(), 1, versions=VERSIONS | {"python": "3.11.2"})
    measured = with_fact(measured, 4, clock_s=98.5)
    texts = [each.text for each in found(measured, tp_note="tp is across") if not each.breaks]
    assert texts == [
        "python 3.11.2 on rank 1 (node0), 3.12.1 elsewhere: install one version",
        "node2: its clock is 1.5 s behind that of rank 0; set it by NTP",
        "tp is across",
    ]


def test_slow_ranks_are_named_by_host_however_many_of_the_hosts_are_slow() -> None:
    measured = replace(in_order(), matmuls=[10e9, 9e9, 7.9e9, 5e9, 10e9, 10e9])
    (finding,) = found(measured)
    assert finding.text.startswith(
        "ranks 2 and 3 (node1): matmuls at 5.0 GFLOP/s, 0.50 of the median 10.0"
    )
    (finding,) = found(replace(measured, matmuls=[10e9, 10e9, 5e9, 5e9, 5e9, 10e9]))[:1]
    # half of all ranks are slow, and the median is that of the others
    assert "(node1)" in finding.text


def test_a_slow_link_is_named_with_its_direction() -> None:
    def texts(rates: dict[tuple[str, str], float]) -> list[str]:
        return [each.text for each in found(with_rates(in_order(), rates))]

    (between,) = texts({("node1", "node0"): 1e7})
    assert between.startswith("from node1 to node0 messages go at 9.98 MB/s, 0.8")
    assert texts({("node0", "node1"): 0.8e9}) == []
    (within,) = texts({("node2", "node2"): 0.1e9})
    assert within.startswith("within node2 messages go at 97.7 MB/s, 0.8")


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    rows = ((1, 9.0), (1000, 2.0))
    four = TimedLink(axis="tp", kind="all-reduce", ranks=(0, 1, 2, 3), rows=rows)
    assert four.bandwidth == 1000 / 2.0 * 2 * 3 / 4
    assert replace(four, kind="message", ranks=(0, 1)).bandwidth == 1000 / 2.0


def test_the_emitted_file_has_the_measured_links_and_rates_and_the_planner_reads_it(
    tmp_path: Path,
) -> None:
    measured = replace(in_order(), matmuls=[4e10, 3e10, 4e10, 4e10, 4e10, 4e10])
    links = list(measured.links)
    for rank in range(6):
        node, network = (rank - rank % 2, rank - rank % 2 + 1), tuple(range(rank % 2, 6, 2))
        slow = 1e6 if rank % 2 else 2e6
        links.append(link("node", "all-reduce", node, 2 * MS, 1e9))
        links.append(link("network", "all-reduce", network, 80 * MS, slow))
    measured = replace(measured, links=links)
    path = tmp_path / "mine.yaml"
    path.write_text(hardware_text(measured, base_cluster(None, "", 2), "fp32"))
    cluster = find_cluster(str(path))
    assert cluster.gpus_per_node == 2 and cluster.device.peak("fp32") == pytest.approx(3e10)
    assert cluster.device.memory_bytes == pytest.approx(2 * GIB)
    assert (cluster.node.sustained, cluster.node.latency_s) == pytest.approx(
        (1e9, 1 * MS), rel=2e-3
    )
    # Three nodes: 4/3 of the bytes go through each link, and the smallest message takes two times
    # two hops.
    assert (cluster.network.sustained, cluster.network.latency_s) == pytest.approx(
        (4 / 3 * 1e6, 20 * MS), rel=0.03
    )


def test_a_folder_that_another_host_does_not_see_is_told(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "runs" / "one")
    mark = leave_mark(run_dir)
    assert mark is not None and mark.parent == tmp_path
    free, problem = disk_facts(run_dir, mark.name)
    assert free is not None and free > 0 and problem == ""
    mark.unlink()
    assert "is not the folder that rank 0 writes into" in disk_facts(run_dir, mark.name)[1]


def test_four_local_ranks_are_fine_and_leave_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run", ParallelConfig(tp=2, dp_shard=2))
    before = sorted(tmp_path.iterdir())
    check = f"-m parallel3d.tools.launch check {recipe} train.callbacks=[] --json".split()
    ended = subprocess.run(
        [sys.executable, *check], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert ended.returncode == 0, ended.stderr
    tree = json.loads(ended.stdout)
    assert not any(each["breaks"] for each in tree["findings"]) and ended.stderr == ""
    assert [each["matmul_flops"] > 0 for each in tree["ranks"]] == [True] * 4
    links = {(each["axis"], each["kind"]): each for each in tree["links"]}
    assert set(links) == {
        (axis, kind) for axis in ("tp", "dp_shard") for kind in ("all-reduce", "message")
    }
    assert links["tp", "all-reduce"]["ranks"] in ([0, 1], [2, 3])
    assert all(each["bandwidth"] > 1e6 and 0 < each["latency_s"] < 1 for each in tree["links"])
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--emit-hardware", "mine.json"],
            "--emit-hardware mine.json: must end in .yaml, by which --hardware tells",
        ),
        (
            ["--emit-hardware", "no/mine.yaml"],
            "--emit-hardware no/mine.yaml: cannot be written (No such file or directory)",
        ),
        (["--hardware", "h1000"], "hardware h1000: unknown; did you mean"),
        (["--wait", "0"], "--wait: '0' must be a whole number from 1 on"),
    ],
)
def test_a_slip_is_told_in_one_line_before_anything_starts(
    options: list[str], text: str, capsys: Said
) -> None:
    assert main(["check", "quickstart", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {text}") and error.count("\n") == 1


def test_a_data_file_that_is_missing_breaks_the_run_and_is_told_once(
    tmp_path: Path, capfd: Said
) -> None:
    recipe = write_recipe(tmp_path, "run", ParallelConfig())
    (tmp_path / "corpus.txt").unlink()
    assert main(["check", str(recipe), "train.callbacks=[]"]) == 1
    said = capfd.readouterr()
    assert said.err.count("\n") == 1 and "corpus.txt: no such file or folder" in said.err
