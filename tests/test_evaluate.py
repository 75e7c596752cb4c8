"""The commands on the folder of a run: evaluate, generate and replay, and their errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d import recipes
from parallel3d.config.recipe import (
    CheckpointConfig,
    OptimizerConfig,
)
from parallel3d.recipes import evaluate, pretrain
from parallel3d.reporting import sinks
from parallel3d.reporting.sinks import Line, SinkRun
from tests.one_rank import SMALL, one_rank, read_metrics
from tests.plan_json import Said, error_line

RECIPE = replace(
    SMALL,
    train=replace(SMALL.train, eval_every=2, eval_sequences=4),
    # whose states a model that is only read must not need
    optimizer=OptimizerConfig(name="muon", warmup_steps=2),
    checkpoint=CheckpointConfig(every=2),
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe = replace(RECIPE, run_dir=str(folder))
    recipes.work(recipe, one_rank(folder.parent))
    return folder


def answer(command: str, run_dir: Path, tmp_path: Path, said: Said) -> str:
    """Returns what a command prints, run in this process."""
    options = evaluate.parse([*command.replace("RUN", str(run_dir)).split()])
    job = options.load(options)
    before = sorted(run_dir.rglob("*"))
    getattr(recipes, job.function)(job.recipe, one_rank(tmp_path), *job.arguments)
    assert sorted(run_dir.rglob("*")) == before, "a command wrote into the run's folder"
    return said.readouterr().out


def test_evaluate_prints_the_loss_that_the_run_had_at_that_step(
    run_dir: Path, tmp_path: Path, capsys: Said
) -> None:
    lines = read_metrics(run_dir)
    val_losses = {line["step"]: line["val_loss"] for line in lines}
    newest = json.loads(answer("evaluate RUN --json", run_dir, tmp_path, capsys))
    assert newest == {
        "checkpoint": str(run_dir / "checkpoints/step_00000004"),
        "step": 4,
        "tokens": 4 * 2 * 16,
        "loss": val_losses[4],
        "perplexity": pytest.approx(2.718281828459045 ** val_losses[4]),
    }
    older = json.loads(answer("evaluate RUN --json --step 2", run_dir, tmp_path, capsys))
    assert (older["step"], older["loss"]) == (2, val_losses[2]) != (4, val_losses[4])
    text = answer(
        f"evaluate RUN checkpoint.resume={older['checkpoint']}",
        run_dir,
        tmp_path,
        capsys,
    )
    assert text == f"step 2  loss {older['loss']:.4f}  perplexity {older['perplexity']:.2f}\n"


def test_generate_writes_as_its_options_say(run_dir: Path, tmp_path: Path, capsys: Said) -> None:
    def text(options: str) -> str:
        return json.loads(answer(f"generate RUN --json {options}", run_dir, tmp_path, capsys))[
            "text"
        ]

    greedy = text("--prompt class --tokens 5")
    assert greedy.startswith("class")
    assert len(greedy) > len("class")
    drawn = "--tokens 30 --top-k 200 --temperature 3"
    assert text(f"{drawn} --seed 1") == text(f"{drawn} --seed 1") != text(f"{drawn} --seed 2")


def test_replay_sends_every_whole_line_as_a_new_run(
    run_dir: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[object] = []

    class Kept:
        def start(self, run: SinkRun) -> None:
            got.append((run.name, run.project, run.resumed_step, run.id_file("wandb").exists()))

        def log(self, line: Line) -> None:
            got.append(line)

        def finish(self, succeeded: bool) -> None:
            got.append(succeeded)

    monkeypatch.setitem(sinks.SINKS, "wandb", Kept)
    (run_dir / "wandb.id").write_text("of the run that was lost")
    assert pretrain.main(["replay", str(run_dir), "wandb", "logging.project=mine"]) == 0
    lines = read_metrics(run_dir)
    assert got == [("run", "mine", 0, False), *lines, True]
    assert capsys.readouterr().out == f"sent 4 lines of {run_dir}/metrics.jsonl to wandb\n"
    monkeypatch.setattr(Kept, "log", lambda self, line: 1 / 0)
    assert pretrain.main(["replay", str(run_dir), "wandb"]) == 73
    assert capsys.readouterr().err == "error: wandb: ZeroDivisionError: division by zero\n"


@pytest.mark.parametrize(
    "command, message",
    [
        ("evaluate nowhere", "nowhere: has no config.yaml, so it is not the folder of a run"),
        (
            "evaluate RUN --step 3",
            "RUN: --step 3: no such checkpoint; there are step_00000004, step_00000002",
        ),
        (
            "generate RUN --temperature 2",
            "only used with train.sample_top_k, but it is 1; try train.sample_top_k=40",
        ),
        ("replay RUN", "SINK = None: no such sink; try tensorboard or wandb or mlflow"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    command: str, message: str, run_dir: Path, capsys: Said
) -> None:
    assert pretrain.main(command.replace("RUN", str(run_dir)).split()) == 2
    assert message.replace("RUN", str(run_dir)) in error_line(capsys)
