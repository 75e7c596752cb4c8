"""`train`, `plan` and `estimate_memory` from Python do what the commands do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import parallel3d
from parallel3d.errors import ConfigError
from parallel3d.tools.plan.command import main

ASKED = {"model": "llama3-8b", "gpu": "h100", "seq_len": 4096, "global_batch": 64}
WORDS = ["--model=llama3-8b", "--gpu=h100", "--seq-len=4096", "--global-batch=64", "--json"]


def test_a_recipe_is_trained(tmp_path: Path) -> None:
    one = {"parallel.pp": 1, "parallel.tp": 1, "parallel.dp_shard": 1}
    small = {"train.steps": 2, "train.seq_len": 32, "train.sample_tokens": 4}
    changes = {**one, **small, "run_dir": str(tmp_path / "run")}
    run = parallel3d.train("quickstart", changes)
    assert run.folder == tmp_path / "run"
    assert run.metrics[-1]["step"] == 2
    assert f"loss={run.metrics[-1]['loss']}" in repr(run)
    (start,) = json.loads((run.folder / "run.json").read_text())["starts"]
    assert start["command"][:4] == [
        "parallel3d-train",
        "quickstart",
        "parallel.pp=1",
        "parallel.tp=1",
    ]


def test_a_wrong_recipe_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz.*train\.steps"):
        parallel3d.train("quickstart", {"train.stepz": 2})


def test_a_plan_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    found = parallel3d.plan(**ASKED, gpus=16, fix={"tp": 2, "pp": 2}, objective="memory")
    words = ["recommend", *WORDS, "--gpus=16", "--fix", "tp=2", "pp=2", "--objective=memory"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)["strategies"][0]["parallel"]
    assert found.best is not None
    assert (found.best.parallel.tp, found.best.parallel.dp_shard) == (2, told["dp_shard"])
    assert "llama3-8b, 8.03B parameters" in repr(found)


def test_an_estimate_of_memory_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    found = parallel3d.estimate_memory(**ASKED, layout={"tp": 2, "dp_shard": 8})
    assert main(["memory", *WORDS, "--layout", "tp=2", "dp_shard=8"]) == 0
    told = json.loads(capsys.readouterr().out)["memory_gib"]["total"]
    assert found.total / 2**30 == pytest.approx(told, rel=1e-4)


def test_an_unknown_option_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--gpuz"):
        parallel3d.plan(**ASKED, gpuz=16)
