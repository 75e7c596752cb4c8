"""Dashboards beside metrics.jsonl: each is fed the very lines of that file, from a thread of its
own, and none of them can stop or slow a run. What one has lost, `parallel3d-train replay` sends
again.

If steps are trained again after a crash, TensorBoard drops what it had of them, and MLflow takes
the later value. The history of Weights & Biases only grows, so the value of the first time stays.
After a rollback TensorBoard shows both. A replay shows the lines of the file alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol
from uuid import uuid4

from parallel3d.config.recipe import Recipe, SinkName

# one line of metrics.jsonl: a number, or None where there is none, by its name
Line = Mapping[str, Any]
_MOST_LINES_WAITING = 1000  # a sink that is as far behind as this hangs
_LAST_WAIT_S = 60.0  # for what is still on its way when the run is done
# ... when it has failed, and its launcher waits for no more than the causes
_WAIT_OF_A_FAILED_RUN_S = 1.0


@dataclass(frozen=True)
class SinkRun:
    """The run as a sink knows it."""

    recipe: Recipe
    folder: Path
    resumed_step: int  # the step that the run goes on from; 0: it starts

    @property
    def project(self) -> str:
        return self.recipe.logging.project

    @property
    def name(self) -> str:
        return self.recipe.logging.run_name or self.folder.resolve().name

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The recipe, by section."""
        sections = asdict(self.recipe).items()
        return {key: value for key, value in sections if isinstance(value, dict)}

    def id_file(self, sink: str) -> Path:
        """The file that holds the run's id in a sink, so that a resumed run goes on in the same
        one."""
        return self.folder / f"{sink}.id"


class Sink(Protocol):
    """Somewhere that metrics go. Its methods are called in this order from one thread; what they
    raise loses the sink and nothing else."""

    def start(self, run: SinkRun) -> None:
        """Imports the library and opens the run, or goes on in it."""

    def log(self, line: Line) -> None:
        """Takes a line."""

    def finish(self, succeeded: bool) -> None:
        """Sends what is on its way, and closes the run."""


class TensorBoard:
    """Event files in `run_dir/tensorboard`."""

    def start(self, run: SinkRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.resumed_step + 1)

    def log(self, line: Line) -> None:
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def finish(self, succeeded: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose own variables (WANDB_MODE, WANDB_API_KEY, ...) say where it
    goes. Its files are in `run_dir/wandb`."""

    def start(self, run: SinkRun) -> None:
        import wandb

        own_id = run.id_file("wandb")
        if not own_id.exists():
            own_id.write_text(uuid4().hex[:8])
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            id=own_id.read_text(),
            resume="allow",
            config=run.settings,
            allow_val_change=True,
            settings=wandb.Settings(console="off"),  # the terminal is the progress bar's
        )

    def log(self, line: Line) -> None:
        self._run.log(_numbers(line), step=line["step"])

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in files in `run_dir/mlflow` where the variable is not
    set."""

    def start(self, run: SinkRun) -> None:
        # without it MLflow 3 refuses the store of files
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
        for section, keys in run.settings.items():  # MLflow takes 100 in one request
            params = [Param(f"{section}.{key}", str(value)) for key, value in keys.items()]
            self._client.log_batch(self._id, params=params)

    def log(self, line: Line) -> None:
        now_ms = time.time_ns() // 1_000_000
        # in its store of files val_loss cannot be both a file and the folder of val_loss/books
        metrics = [
            self._metric(name.replace("/", "."), value, now_ms, line["step"])
            for name, value in _numbers(line).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, succeeded: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")


SINKS: dict[str, Callable[[], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


class Sinks(AbstractContextManager["Sinks"]):
    """The sinks of a run, each with its thread. `tell` shows a line to the user, once for each sink
    that is lost."""

    def __init__(
        self, names: Sequence[SinkName], run: SinkRun, tell: Callable[[str], None]
    ) -> None:
        self._feeders = [_Feeder(name, run, tell) for name in names]

    def log(self, line: Line) -> None:
        """Hands a line to every sink, and waits for none."""
        for feeder in self._feeders:
            feeder.offer(line)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Ends all sinks."""
        wait_s = _LAST_WAIT_S if error is None else _WAIT_OF_A_FAILED_RUN_S
        deadline = time.monotonic() + wait_s
        for feeder in self._feeders:
            feeder.offer(error is None)
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))
            if feeder.is_alive():
                feeder.lose("it did not end in time")


class _Feeder(Thread):
    """Feeds one sink."""

    def __init__(self, name: SinkName, run: SinkRun, tell: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)  # a sink that hangs does not keep the process
        self._run = run
        self._tell = tell
        self._is_lost = False
        self._items: Queue[Line | bool] = Queue(_MOST_LINES_WAITING)
        self.start()

    def offer(self, item: Line | bool) -> None:
        """Puts a line into the queue, or at the end of the run whether it has succeeded."""
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
        except BaseException as error:  # a library that calls sys.exit loses itself alone
            self.lose(cause_of(error, self.name))

    def lose(self, cause: str) -> None:
        """Says once that the sink gets no more lines, and why."""
        if not self._is_lost:
            self._is_lost = True
            again = f"`parallel3d-train replay {self._run.folder} {self.name}`"
            self._tell(
                f"logging.sinks: {self.name} is lost, the run is not: {cause}; {again} sends "
                "everything again"
            )


def _numbers(line: Line) -> dict[str, float]:
    """Returns the numbers of a line but for its step, which a sink has as the place of the
    others."""
    return {name: value for name, value in line.items() if value is not None and name != "step"}


def cause_of(error: BaseException, name: str) -> str:
    """Returns the error of a sink in one line, with the command that installs a library that is not
    there."""
    first_line = str(error).partition("\n")[0]
    cause = f"{type(error).__name__}: {first_line}"
    if isinstance(error, ImportError):
        cause += f"; pip install 'parallel3d[{name}]', in a clone pip install -e '.[{name}]'"
    return cause
