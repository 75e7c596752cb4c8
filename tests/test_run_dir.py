"""The folder of a run: what a start may change in it, and when. Whole commands, as the one worker
of a launcher."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel3d.checkpoint.manifest import MANIFEST_FILE
from parallel3d.config.load import to_yaml
from parallel3d.launch.run_dir import RunOutcome
from parallel3d.recipes.pretrain import main
from tests.test_start import RECIPE

Said = pytest.CaptureFixture[str]
Train = Callable[..., int]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs parallel3d-train in this process, as a launcher's only worker."""
    recipe = tmp_path / "tiny.yaml"
    text = tmp_path / "corpus.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    data = replace(RECIPE.data, source="text", path=str(text))
    recipe.write_text(to_yaml(replace(RECIPE, data=data, train=replace(RECIPE.train, steps=2))))

    def run(*overrides: str) -> int:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        said = f"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_PORT={port} MASTER_ADDR=localhost"
        for setting in said.split():
            monkeypatch.setenv(*setting.split("="))
        try:
            return main([str(recipe), *overrides])
        finally:
            if dist.is_initialized():  # a run that is refused leaves its group open
                dist.destroy_process_group()

    return run


def files(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below a folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_refused_resume_changes_nothing_in_the_folder_of_the_run(
    train: Train, tmp_path: Path, capsys: Said
) -> None:
    run_dir = tmp_path / "run"
    assert train(f"run_dir={run_dir}") == 0
    (run_dir / "checkpoints" / "step_00000009.partial").mkdir()
    (run_dir / "checkpoints" / "step_00000009.partial" / "cut_off").touch()
    before = files(run_dir)
    resume = (f"run_dir={run_dir}", "checkpoint.resume=auto")
    for other in ("model.layers=3", "data.validation_fraction=0.3"):
        assert train(*resume, other) == 65, other
        assert files(run_dir) == before, other
    assert train(*resume, "train.steps=3") == 0
    after = files(run_dir)
    assert b"steps: 3" in after["config.yaml"]
    assert "checkpoints/step_00000009.partial/cut_off" not in after


def test_a_checkpoint_of_a_newer_version_stops_auto_and_is_not_renamed(
    train: Train, tmp_path: Path, capsys: Said
) -> None:
    run_dir = tmp_path / "run"
    assert train(f"run_dir={run_dir}", "checkpoint.every=1") == 0
    manifest = run_dir / "checkpoints/step_00000002" / MANIFEST_FILE
    body = (
        manifest.read_bytes()
        .replace(b'"tokens": ', b'"optimism": 1, "tokens": ')
        .rpartition(b',\n"crc32"')[0]
    )
    manifest.write_bytes(body + f',\n"crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())
    before = files(run_dir)
    capsys.readouterr()
    assert train(f"run_dir={run_dir}", "checkpoint.resume=auto", "train.steps=3") == 65
    assert "progress.optimism: Unexpected keyword argument" in capsys.readouterr().err
    assert files(run_dir) == before


def test_a_resume_from_another_run_does_not_mix_with_the_run_in_the_folder(
    train: Train, tmp_path: Path, capsys: Said
) -> None:
    for name in ("ours", "theirs"):
        assert train(f"run_dir={tmp_path / name}") == 0
    before = files(tmp_path / "ours")
    other = f"checkpoint.resume={tmp_path}/theirs/checkpoints/step_00000002"
    capsys.readouterr()
    assert train(f"run_dir={tmp_path / 'ours'}", other, "train.steps=3") == 2
    assert (
        f"{other.replace('=', ' = ')}: belongs to another run than the one in run_dir"
        in capsys.readouterr().err
    )
    assert files(tmp_path / "ours") == before
    assert train(f"run_dir={tmp_path / 'new'}", other, "train.steps=3") == 0
    own = f"checkpoint.resume={tmp_path}/ours/checkpoints/step_00000002"
    assert train(f"run_dir={tmp_path / 'ours'}", own, "train.steps=3") == 0


def test_a_run_in_the_current_folder_works_twice_and_moves_its_own_files_alone(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "checkpoints").mkdir(parents=True)
    foreign = {
        name: name.encode()
        for name in ("notes.txt", "checkpoints/best.pt", "checkpoints/step_5.partial")
    }
    for name, content in foreign.items():
        (project / name).write_bytes(content)
    monkeypatch.chdir(project)
    assert train("run_dir=.") == 0
    assert not (tmp_path / "project.1").exists()  # another program's checkpoints are no earlier run
    (project / "logs").mkdir()
    for name in ("logs/rank_00001.log", "logs/rank_00001.log.1", "log.txt.1", "run.json.1"):
        (project / name).write_text(f"an earlier {name}")
    first = files(project)
    assert train("run_dir=.", "train.seed=1") == 0
    earlier = files(tmp_path / "project.1")
    now = files(project)
    assert first == {**earlier, **foreign}
    assert now == now | foreign
    assert {*now, "logs/rank_00001.log", "logs/rank_00001.log.1"} | {
        "log.txt.1",
        "run.json.1",
    } == {*first}
    assert Path.cwd() == project
    assert b"seed: 1" in now["config.yaml"]


@pytest.mark.parametrize("resume", ["none", "auto"])
@pytest.mark.parametrize(
    "name, text",
    [
        ("config.yaml", to_yaml(RECIPE)),
        ("metrics.jsonl", '{"accuracy": 0.5}\n'),
        ("outcome.json", '{"mine": true}'),
        ("run.json", '{"mine": true}'),
    ],
)
def test_a_file_that_no_run_has_written_is_not_overwritten(
    name: str, text: str, resume: str, train: Train, tmp_path: Path, capsys: Said
) -> None:
    (tmp_path / name).write_text(text)
    before = files(tmp_path)
    assert train(f"run_dir={tmp_path}", f"checkpoint.resume={resume}") == 2
    assert f"would overwrite {name}, which is not from a run" in capsys.readouterr().err
    assert files(tmp_path) == before


def test_the_outcome_says_how_a_run_was_stopped_and_stays_where_a_start_is_refused(
    tmp_path: Path,
) -> None:
    words = {
        0: "done",
        75: "preempted",
        143: "stopped",
        130: "stopped",
        70: "failed",
    }
    for status, word in words.items():
        RunOutcome(exit_status=status).write(str(tmp_path))
        assert json.loads((tmp_path / "outcome.json").read_text())["status"] == word
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    RunOutcome(exit_status=0).write(str(tmp_path))
    assert json.loads((tmp_path / "outcome.json").read_text())["status"] == "failed"
