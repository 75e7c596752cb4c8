"""Dashboards: what their own readers read back, a resumed run, a replay, and sinks that fail in
every way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from threading import Event
from typing import Any

import numpy as np
import pytest

from parallel3d.config.recipe import LoggingConfig, SinkName
from parallel3d.models.llama import Llama
from parallel3d.reporting import sinks
from parallel3d.reporting.metrics import MetricsFile, StepMetrics
from parallel3d.reporting.sinks import Line, SinkRun, Sinks
from parallel3d.training.worker import run_worker
from tests.one_rank import SMALL, one_rank

RECIPE = replace(SMALL, logging=LoggingConfig(every=1, project="mine"))
SAMPLE = "def f(x):\n    return <x>\n"
Curves = dict[str, dict[int, float]]  # name of a metric -> step -> value


def metrics_of(step: int, loss: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        lr=1e-3 * step,
        grad_norm=float("inf") if step == 2 else 0.5,  # a skipped step's, which is null in the file
        tokens=512 * step,
        step_time_s=0.25,
        tokens_per_s=2048.0,
        tokens_per_s_per_device=2048.0,
        mfu=None,
        peak_memory_bytes=412 * 2**20,
        time_s={"compute": 0.2, "tp": 0.05},
        time_spread_s={"compute": (0.1, 0.2), "tp": (0.05, 0.15)},
        val_loss=2.0 + step if step % 2 else None,
        set_losses={"books": loss},
    )


def write(folder: Path, name: SinkName, resumed_step: int, losses: list[tuple[int, float]]) -> None:
    """Writes the metrics of some steps as a run does that goes on from `resumed_step`."""
    told: list[str] = []
    with Sinks([name], SinkRun(RECIPE, folder, resumed_step), told.append) as fed:
        file = MetricsFile(folder / "metrics.jsonl", resumed_step=resumed_step, sinks=fed)
        for step, loss in losses:
            file.write(metrics_of(step, loss))
        fed.log({"step": step, "sample": SAMPLE})
    assert told == []


def curves_of_the_file(folder: Path) -> Curves:
    curves: Curves = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        line |= {f"time_s/{cause}": part for cause, part in line.pop("time_s").items()}
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                curves.setdefault(name, {})[line["step"]] = value
    return curves


def read_tensorboard(folder: Path) -> Curves:
    """Returns what TensorBoard's own reader has in the end, each step once and in order."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    curves = {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}
    sample = reader.Tensors("sample/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert sample == indent(SAMPLE, "    ")
    parameters = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"train.seq_len" in parameters
    for curve in curves.values():
        assert [event.step for event in curve] == sorted({event.step for event in curve})
    return {tag: {event.step: event.value for event in curve} for tag, curve in curves.items()}


def read_mlflow(folder: Path) -> Curves:
    """Returns what MLflow's own reader of files has: of two values of a step, the later one."""
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.name
    assert run.data.params["train.seq_len"] == "16"
    sample = client.download_artifacts(run.info.run_id, "samples/step_00000004.txt")
    assert Path(sample).read_text() == SAMPLE
    histories = {
        name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
    }
    return {
        name: {
            each.step: each.value
            for each in sorted(history, key=lambda each: (each.step, each.timestamp))
        }
        for name, history in histories.items()
    }


READERS: dict[SinkName, tuple[str, Callable[[Path], Curves], Callable[[float], float], str]] = {
    # in float32
    "tensorboard": (
        "tensorboard",
        read_tensorboard,
        lambda x: float(np.float32(x)),
        "val_loss/books",
    ),
    "mlflow": ("mlflow", read_mlflow, float, "val_loss.books"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # MLflow's, about its store of files
def test_its_own_reader_reads_what_metrics_jsonl_holds_also_after_a_crash(
    name: SinkName, tmp_path: Path
) -> None:
    """Steps 3 and 4 were lost in a crash after the checkpoint of step 2, and are trained again,
    with other losses."""
    library, read, rounded, books = READERS[name]
    pytest.importorskip(library, reason="an optional library")
    write(tmp_path, name, 0, [(1, 6.0), (2, 5.1), (3, 4.2), (4, 3.3)])
    write(tmp_path, name, 2, [(3, 4.25), (4, 3.35)])
    expected = curves_of_the_file(tmp_path)
    assert expected["loss"] == {1: 6.0, 2: 5.1, 3: 4.25, 4: 3.35}
    found = read(tmp_path)
    assert found[books] == {step: rounded(loss) for step, loss in expected["loss"].items()}
    time_name = books.replace("val_loss", "time_s").replace("books", "compute")
    found["time_s/compute"] = found[time_name]
    for key in ("loss", "lr", "val_loss", "grad_norm", "time_s/compute"):
        assert found[key] == {step: rounded(value) for step, value in expected[key].items()}


class Broken:
    """A sink that raises, exits or hangs in one of its methods."""

    def __init__(self, where: str, act: Callable[[], Any]) -> None:
        self._where = where
        self._act = act

    def start(self, run: SinkRun) -> None:
        self._at("start")

    def log(self, line: Line) -> None:
        self._at("log")

    def finish(self, succeeded: bool) -> None:
        self._at("finish")

    def _at(self, where: str) -> None:
        if where == self._where:
            self._act()


def fail(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


BROKEN: dict[str, tuple[str, Callable[[], Any], str]] = {
    "a library that is missing": (
        "start",
        fail(ModuleNotFoundError("No module named 'wandb'")),
        "pip install 'parallel3d[wandb]'",
    ),
    "a server that refuses": (
        "log",
        fail(ConnectionError("refused\nand more")),
        "ConnectionError: refused;",
    ),
    "a network that hangs": ("log", Event().wait, "it did not end in time;"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_sink_that_fails_is_told_once_and_changes_no_loss(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, act, says = BROKEN[case]
    monkeypatch.setitem(sinks.SINKS, "wandb", lambda: Broken(where, act))
    monkeypatch.setattr(sinks, "_LAST_WAIT_S", 0.2)
    losses = []
    for name, used in (("with", ("wandb",)), ("without", ())):
        recipe = replace(
            RECIPE,
            logging=replace(RECIPE.logging, sinks=used),
            run_dir=str(tmp_path / name),
        )
        run_worker(recipe, one_rank(tmp_path), Llama, lambda name, precision: None)
        losses.append(curves_of_the_file(tmp_path / name)["loss"])
    assert losses[0] == losses[1]
    assert list(losses[0]) == [1, 2, 3, 4]
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    assert says in told
    assert told.endswith(f"`parallel3d-train replay {tmp_path}/with wandb` sends all lines again")
