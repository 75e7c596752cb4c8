"""Dashboards that receive the lines of metrics.jsonl: TensorBoard, Weights & Biases and MLflow.

Each sink runs in its own thread and cannot stop a run or slow down its steps. If a sink has lost
lines, `parallel3d-train replay` sends all lines again.

If steps are repeated after a crash, TensorBoard drops their first values and MLflow uses the later
ones. Weights & Biases keeps the first values. After a rollback, TensorBoard shows both. A replay
shows only the lines of the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Full, Queue
from textwrap import indent
from threading import Thread
from typing import Any, Protocol
from uuid import uuid4

from parallel3d.config.recipe import Recipe, SinkName

# One line of metrics.jsonl, or {"step": ..., "sample": text} for generated text.
Line = Mapping[str, Any]
_MOST_LINES_WAITING = 1000  # Queue size per sink. Further lines are dropped.
_LAST_WAIT_S = 60.0  # Seconds to send the remaining lines at the end of a run.
# The same if the run failed, because the launcher then soon ends its workers.
_WAIT_OF_A_FAILED_RUN_S = 1.0


@dataclass(frozen=True)
class SinkRun:
    """The run whose metrics a sink receives."""

    recipe: Recipe
    folder: Path
    resumed_step: int  # Step that the run resumes from, or 0.

    @property
    def project(self) -> str:
        return self.recipe.logging.project

    @property
    def name(self) -> str:
        return self.recipe.logging.run_name or self.folder.resolve().name

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Sections of the recipe as dicts. Top-level keys such as `run_dir` are omitted."""
        sections = asdict(self.recipe).items()
        return {key: value for key, value in sections if isinstance(value, dict)}

    @property
    def parameters(self) -> dict[str, str | float | bool]:
        """Values of the recipe by their full key, with text for values that are not scalars."""
        found: dict[str, str | float | bool] = {}
        for section, keys in self.settings.items():
            for key, value in keys.items():
                is_scalar = isinstance(value, str | float | int)
                found[f"{section}.{key}"] = value if is_scalar else str(value)
        return found

    def id_file(self, sink: str) -> Path:
        """File with the ID under which `sink` knows the run, so that a resumed run continues it."""
        return self.folder / f"{sink}.id"


class Sink(Protocol):
    """Destination of metrics. Methods are called in this order from one thread.

    If one raises an exception, the sink is disabled and the run continues.
    """

    def start(self, run: SinkRun) -> None:
        """Imports the library, and creates or continues the dashboard's run."""

    def log(self, line: Line) -> None:
        """Sends a line."""

    def finish(self, succeeded: bool) -> None:
        """Sends pending lines and closes the run."""


class TensorBoard:
    """Writes event files to `run_dir/tensorboard`."""

    def start(self, run: SinkRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.resumed_step + 1)
        # `run_name`: otherwise, the hyperparameters would become a run of their own.
        self._writer.add_hparams(run.parameters, {}, run_name=".")

    def log(self, line: Line) -> None:
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])
        if "sample" in line:
            # TensorBoard renders Markdown, in which an indented text is code.
            text = indent(line["sample"], "    ")
            self._writer.add_text("sample", text, line["step"])
        self._writer.flush()

    def finish(self, succeeded: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases, with files in `run_dir/wandb`. WANDB_* variables configure it."""

    def start(self, run: SinkRun) -> None:
        import wandb

        own_id = run.id_file("wandb")
        if not own_id.exists():
            own_id.write_text(uuid4().hex[:8])
        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            id=own_id.read_text(),
            resume="allow",
            config=run.settings,
            allow_val_change=True,
            settings=wandb.Settings(console="off"),  # Leave the terminal to the progress bar.
        )

    def log(self, line: Line) -> None:
        values: dict[str, Any] = _numbers(line)
        if "sample" in line:
            table = self._table(columns=["step", "sample"])
            table.add_data(line["step"], line["sample"])
            values["sample"] = table
        self._run.log(values, step=line["step"])

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class MLflow:
    """Logs to MLFLOW_TRACKING_URI, or to files in `run_dir/mlflow` if it is not set."""

    def start(self, run: SinkRun) -> None:
        # MLflow 3 rejects the file store without this variable.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        files = (run.folder / "mlflow").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or files)
        own_id = run.id_file("mlflow")
        if own_id.exists():
            self._id = own_id.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        own_id.write_text(self._id)
        params = [Param(name, str(value)) for name, value in run.parameters.items()]
        for start in range(0, len(params), 100):  # MLflow accepts 100 parameters per request.
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, line: Line) -> None:
        now_ms = time.time_ns() // 1_000_000
        # In the file store, val_loss cannot be both a file and the folder of val_loss/books.
        metrics = [
            self._metric(name.replace("/", "."), value, now_ms, line["step"])
            for name, value in _numbers(line).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)
        if "sample" in line:
            path = f"samples/step_{line['step']:08d}.txt"
            self._client.log_text(self._id, line["sample"], path)

    def finish(self, succeeded: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")


SINKS: dict[str, Callable[[], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


class Sinks(AbstractContextManager["Sinks"]):
    """Sinks of a run, each with its own thread. `tell` reports the first failure of each sink."""

    def __init__(
        self, names: Sequence[SinkName], run: SinkRun, tell: Callable[[str], None]
    ) -> None:
        self._feeders = [_Feeder(name, run, tell) for name in names]

    def log(self, line: Line) -> None:
        """Queues a line for every sink."""
        for feeder in self._feeders:
            feeder.offer(line)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Finishes all sinks. Waits for a limited time."""
        wait_s = _LAST_WAIT_S if error is None else _WAIT_OF_A_FAILED_RUN_S
        deadline = time.monotonic() + wait_s
        for feeder in self._feeders:
            feeder.offer(error is None)
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))
            if feeder.is_alive():
                feeder.lose("it did not end in time")


class _Feeder(Thread):
    """Thread that passes queued lines to one sink."""

    def __init__(self, name: SinkName, run: SinkRun, tell: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)  # A hanging sink must not keep the process alive.
        self._run = run
        self._tell = tell
        self._is_lost = False
        self._items: Queue[Line | bool] = Queue(_MOST_LINES_WAITING)
        self.start()

    def offer(self, item: Line | bool) -> None:
        """Queues a line or, at the end of the run, whether the run succeeded."""
        try:
            self._items.put_nowait(item)
        except Full:
            self.lose(f"it is {_MOST_LINES_WAITING} lines behind")

    def run(self) -> None:
        try:
            sink = SINKS[self.name]()
            sink.start(self._run)
            while not isinstance(item := self._items.get(), bool):
                sink.log(item)
            sink.finish(succeeded=item)
        except BaseException as error:  # A library that calls sys.exit ends only its own sink.
            self.lose(cause_of(error, self.name))

    def lose(self, cause: str) -> None:
        """Reports, once per sink, that the sink failed or lost lines."""
        if not self._is_lost:
            self._is_lost = True
            again = f"`parallel3d-train replay {self._run.folder} {self.name}`"
            self._tell(
                f"logging.sinks: {self.name} stopped, the run continues: {cause}; {again} sends "
                "all lines again"
            )


def _numbers(line: Line) -> dict[str, float]:
    """Returns the numbers of a line, without `step`, which sinks take separately.

    Nested numbers get names such as `time_s/compute`.
    """
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            nested = _numbers(value)
            numbers |= {f"{name}/{key}": number for key, number in nested.items()}
        elif isinstance(value, int | float) and name != "step":
            numbers[name] = value
    return numbers


def cause_of(error: BaseException, name: str) -> str:
    """Formats an error of a sink as one line, with the command that installs a missing library."""
    first_line = str(error).partition("\n")[0]
    cause = f"{type(error).__name__}: {first_line}"
    if isinstance(error, ImportError):
        cause += f"; pip install 'parallel3d[{name}]', in a clone pip install -e '.[{name}]'"
    return cause
