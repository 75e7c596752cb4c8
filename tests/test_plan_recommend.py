"""`parallel3d-plan recommend`: its report, its JSON, and what it does if nothing fits."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.plan import command as plan
from tests.plan_json import Said, plan_json

SMALL = "--model llama3.2-1b --gpu a100 --gpus 8 --seq-len 2048 --global-batch 64"
TOO_LARGE = "--model llama3-70b --gpu h100 --gpus 8 --seq-len 8192 --global-batch 512"
REPORTS = (
    "--model llama3-70b --gpu h100 --gpus 124 --seq-len 8192 --global-batch 512 --tokens 2T "
    "--price 2.5 --why tp=8,pp=2",
    "--model gpt2-large --gpu a100 --gpus 16 --seq-len 1024 --global-batch 256 --fix tp=4",
    f"{TOO_LARGE} --tokens 15T",
    "--model quickstart --gpu cpu --why pp=2,tp=2",
)
KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "temporary",
    "fragmentation",
    "context",
)


def run(arguments: str) -> int:
    return plan.main(shlex.split(arguments))


@pytest.mark.parametrize("arguments", REPORTS)
def test_a_report_has_at_most_22_lines_of_80_columns(arguments: str, capsys: Said) -> None:
    run(arguments)
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.isascii()
    assert len(said.out.splitlines()) <= 22
    assert max(map(len, said.out.splitlines())) <= 80


def test_a_report_has_the_winner_its_rivals_and_better_neighbours(capsys: Said) -> None:
    found = plan_json(REPORTS[0], capsys)
    run(REPORTS[0])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[4:8]]
    assert [row[0] for row in rows].count(">") == 1
    shown = [int(row[-3].replace(",", "")) for row in rows]
    assert shown == [round(each["tokens_per_s_per_gpu"]) for each in found["strategies"][:4]]
    by_label = {line[:10].strip(): line for line in lines}
    assert found["neighbours"]["gpus"]["gpus"] == 128
    assert by_label["devices"].split()[1:4] == ["128", "instead", "of"]
    assert {"memory", "time", "range", "limits", "next"} <= set(by_label)
    run(f"{REPORTS[0]} --explain")
    assert len(capsys.readouterr().out.splitlines()) > 30


def test_json_says_what_was_asked_with_defaults_filled_in(capsys: Said) -> None:
    said = plan_json(
        f"{SMALL} --fix tp=2 --max-pp 4 --tokens 300B --price 2 --gpu-memory 80GB", capsys
    )
    asked = said["input"]
    assert said["schema"] == "parallel3d.plan/1"
    assert asked["model"]["name"] == "llama3.2-1b"
    assert asked["model"]["parameters"] == 1_235_814_400
    assert asked["fixed"] == {"tp": 2, "max_pp": 4}
    assert asked["risk"] == 0.05
    assert 0.8 < asked["memory_fraction"] < 1
    assert asked["tokens"] == 3e11
    assert asked["hardware"]["price_per_hour"] == 2
    assert asked["hardware"]["memory_gib"] == pytest.approx(80e9 / 2**30, rel=1e-4)


def test_json_strategies_add_up_and_come_best_first(capsys: Said) -> None:
    said = plan_json(f"{SMALL} --tokens 300B --price 2 --top 7", capsys)
    assert len(said["strategies"]) == 7
    times = [each["step_time_s"] for each in said["strategies"]]
    assert times[0] <= min(times) * 1.06
    for each in said["strategies"]:
        memory = each["memory_gib"]
        parts = each["time_s"]
        assert memory["total"] == pytest.approx(sum(memory[kind] for kind in KINDS), rel=1e-3)
        assert set(memory) == {"total", *KINDS}
        assert each["step_time_s"] == pytest.approx(sum(parts.values()), rel=1e-3)
        tokens = each["tokens_per_s_per_gpu"] * 8
        assert tokens == pytest.approx(64 * 2048 / each["step_time_s"], rel=1e-3)
        assert each["mfu"] == pytest.approx(each["tflops_per_gpu"] / 312, rel=1e-3)
        assert each["run"]["price"] == pytest.approx(2 * each["run"]["gpu_hours"], rel=1e-3)
        assert each["fits"] is True
        assert 0 <= each["worst_rank"] < each["parallel"]["pp"]
        assert ParallelConfig(**each["parallel"]).world_size == each["gpus"] == 8


def test_if_nothing_fits_it_says_what_would_and_how_long_the_matmuls_take(capsys: Said) -> None:
    said = plan_json(f"{TOO_LARGE} --tokens 15T", capsys, status=3)
    assert said["strategies"] == []
    assert said["rejected"][0]["short_pct"] > 0
    assert "16 devices instead of 8" in said["advice"]["remedies"]
    larger = TOO_LARGE.replace("--gpus 8", "--gpus 16")
    assert plan_json(larger, capsys)["strategies"]
    assert any("b200" in line for line in said["advice"]["remedies"])
    # 6 FLOPs a parameter and token at the 989 TFLOP/s of 8 H100s, at most
    least = 6 * 70e9 * 15e12 / (8 * 989e12) / 86400
    assert least < said["advice"]["least_days"] < 2 * least


def test_an_objective_changes_the_order(capsys: Said) -> None:
    asked = "--model llama3-8b --gpu h100 --gpus 128 --seq-len 4096 --global-batch 128"
    usual, other = (
        [each["memory_gib"]["total"] for each in plan_json(words, capsys)["strategies"]]
        for words in (asked, f"{asked} --objective memory")
    )
    assert other == sorted(other)
    assert other[0] < min(usual)


def test_why_compares_refuses_and_rejects(capsys: Said) -> None:
    asked = "--model llama3-8b --gpu h100 --gpus 16 --seq-len 8192 --global-batch 128"
    slower = plan_json(f"{asked} --why tp=8,pp=2", capsys)
    assert slower["why"]["strategy"]["step_time_s"] > slower["strategies"][0]["step_time_s"]
    assert plan_json(f"{asked} --why tp=5", capsys)["why"]["refused"].startswith(
        "parallel.tp = 5: must divide model.heads = 32"
    )
    assert (
        plan_json(f"{asked} --why tp=1 pp=1 recompute=none mb=8", capsys)["why"]["rejected"][
            "short_gib"
        ]
        > 0
    )
    best = slower["strategies"][0]["parallel"]
    assert run(f"{asked} --why tp={best['tp']} pp={best['pp']} dp_shard={best['dp_shard']}") == 0
    assert "it is the winner" in capsys.readouterr().out


def status_of(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode


def test_it_answers_without_torch_or_numpy() -> None:
    framework = (
        "import resource, sys\n"
        "from parallel3d.tools.plan.command import main\n"
        f"status = main('{SMALL}'.split())\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_utime < 2, 'seconds of this process alone'\n"  # noqa: E501
        "sys.exit(status)"
    )
    assert status_of(framework) == 0


def test_help_is_quick() -> None:
    framework = (
        "import resource, sys\n"
        "from parallel3d.tools.plan.command import main\n"
        "try:\n    main(['recommend', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_utime < 0.3\n"
        "assert not {'omegaconf', 'yaml', 'torch'} & set(sys.modules)"
    )
    assert status_of(framework) == 0


VERIFIED = (
    "--layers 2 --hidden 64 --heads 4 --vocab 512 --gpu a100 --gpus 2 --seq-len 64 --global-batch 4"
)


def test_a_winner_that_fits_is_verified_by_a_dry_run(capsys: Said) -> None:
    found = plan_json(f"{VERIFIED} --verify", capsys)
    (checked,) = found["verified"]
    assert checked["fits"]
    assert checked["parallel"] == found["strategies"][0]["parallel"]
    assert checked["dry_run_gib"] == pytest.approx(checked["estimated_gib"], rel=0.05)
    assert run(f"{VERIFIED} --verify") == 0
    assert "fits: " in capsys.readouterr().out


def test_a_winner_that_the_dry_run_refuses_gives_its_place_to_the_next(
    capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dry run is planted: it holds more than the device has."""
    from parallel3d.tools.verify import dry_run as module
    from parallel3d.tools.verify.ledger import Snapshot

    usual = module.dry_run
    runs = []

    def planted(*args: Any, **settings: Any) -> module.DryRun:
        runs.append(args)
        found = usual(*args, **settings)
        too_much = Snapshot({"forward": 2**40}, {}, 0)
        if len(runs) == 1:
            return replace(found, peak=too_much)
        return found

    monkeypatch.setattr(module, "dry_run", planted)
    winner = plan_json(VERIFIED, capsys)["strategies"][0]["parallel"]
    found = plan_json(f"{VERIFIED} --verify", capsys)
    assert [each["fits"] for each in found["verified"]] == [False, True]
    assert found["verified"][0]["parallel"] == winner != found["strategies"][0]["parallel"]
    runs.clear()
    assert run(f"{VERIFIED} --verify") == 0
    assert "does not fit" in capsys.readouterr().out


def test_a_plan_splits_long_sequences(capsys: Said) -> None:
    asked = "--model llama3-8b --gpu h100 --gpus 64 --global-batch 64"
    best = plan_json(f"{asked} --seq-len 131072", capsys)["strategies"][0]
    assert best["parallel"]["cp"] > 1
    assert best["time_s"]["cp"] > 0


def test_offload_fits_a_model_on_one_gpu(capsys: Said) -> None:
    asked = "--model llama3-8b --gpu h100 --gpus 1 --seq-len 4096 --global-batch 64"
    best = plan_json(f"{asked} --fix offload=true", capsys)["strategies"][0]
    assert best["memory_gib"]["optimizer"] == 0
