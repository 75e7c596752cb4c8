"""Runs of the real command on real processes, and what tests do to them from outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from test_launch import is_alive

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from tests.one_rank import read_metrics
from tests.planted import FOLDER

ROOT = Path(__file__).parents[1]
LONGEST_S = 120.0  # a run or a wait that takes longer is said to hang
MODEL = ModelConfig(
    architecture="tests.planted:Planted",
    layers=2,
    hidden=16,
    heads=2,
    ffn_hidden=32,
    vocab=258,
)
_MARK = "PARALLEL3D_TEST_RUN"  # an environment variable that all processes of a run inherit
# A cache for the next run, and what torchrun leaves when it is killed.
_LEFT_BY_TORCH = ("torchinductor_", "torchelastic_")

Launch = Callable[[int], list[str]]  # the command before the recipe, for a number of ranks


def local(ranks: int) -> list[str]:
    return [sys.executable, "-m", "parallel3d.recipes.pretrain"]


def torchrun(ranks: int) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(ranks), "-m", "parallel3d.recipes.pretrain"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def srun(ranks: int) -> list[str]:
    """Returns a shell that starts the ranks with the variables of srun, and ends as rank 0 does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = f"""
        export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
        export SLURM_NTASKS={ranks} SLURM_NNODES=1
        for i in {{0..{ranks - 1}}}; do
            SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks[i]=$!
        done
        for i in {{{ranks - 1}..0}}; do
            wait ${{tasks[i]}}; status=$?
            echo "task $i: exited with exit code $status" >&2
        done
        exit $status"""
    return ["bash", "-c", script, "bash", *local(ranks)]


def nohup(ranks: int) -> list[str]:
    return ["nohup", *local(ranks)]


def timeout(ranks: int) -> list[str]:
    return ["timeout", "--preserve-status", "1h", *local(ranks)]


def small_recipe(folder: Path, parallel: ParallelConfig, **train: Any) -> Recipe:
    """Returns the recipe of a small run in a folder, of 60 steps unless `train` says otherwise."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(f"line {number} of a text" for number in range(400)))
    settings = {"steps": 60, "callbacks": ("tests.planted:Pace",), **train}
    return Recipe(
        model=MODEL,
        train=TrainConfig(
            global_batch_size=8,
            seq_len=16,
            device="cpu",
            **settings,
        ),
        parallel=parallel,
        data=DataConfig(source="text", path=str(corpus)),
        checkpoint=CheckpointConfig(every=10, resume="auto"),
        logging=LoggingConfig(every=1),
        run_dir=str(folder / "run"),
    )


def _heed_signals() -> None:
    """Undoes what pytest inherits from `&` in a shell (ignores Ctrl-C) or nohup (SIGHUP)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class LiveRun:
    """A run in a session of its own. `folder` holds its recipe and its stderr."""

    def __init__(self, folder: Path, recipe: Recipe, launch: Launch = local) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self._launch = launch
        self._mark = uuid4().hex
        self._temporary = Path(tempfile.mkdtemp(prefix="p3d-"))  # short: sockets are made there
        recipe_file = folder / "recipe.yaml"
        recipe_file.write_text(to_yaml(recipe))
        own = {
            _MARK: self._mark,
            FOLDER: str(folder),
            "TMPDIR": str(self._temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        with (folder / "stderr").open("w") as stderr:
            self.command = subprocess.Popen(
                [*launch(recipe.parallel.world_size), str(recipe_file)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                env=os.environ | own,
                preexec_fn=_heed_signals,
            )

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def step(self) -> int:
        """Returns the last step that this run has printed, or 0."""
        steps = re.findall(r"^step (\d+)/", self.stderr(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def wait_for_step(self, step: int) -> None:
        for _ in patiently(LONGEST_S):
            if self.step() >= step:
                return
            if self.command.poll() is not None:
                break
        raise AssertionError(f"the run did not reach step {step}:\n{self.stderr()}")

    def processes(self) -> list[int]:
        """Returns the living processes of the run, orphans included."""
        mark = f"{_MARK}={self._mark}".encode()
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in pids if mark in _read(pid, "environ") and is_alive(pid)]

    def rank_pid(self, rank: int) -> int:
        return int((self.folder / f"rank{rank}").read_text())

    def fork_server(self) -> int:
        status = _read(self.rank_pid(0), "status").decode()
        return int(status.partition("PPid:")[2].split()[0])

    def end(self) -> list[str]:
        """Kills what is left of the run. Returns the processes and temporary files it has left."""
        for _ in patiently(20.0):
            if not self.processes():
                break
        left = [_read(pid, "cmdline").replace(b"\0", b" ").decode() for pid in self.processes()]
        for pid in self.processes():
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)
        self.command.wait()
        names = [path.name for path in self._temporary.glob("*")]
        left += [name for name in names if not name.startswith(_LEFT_BY_TORCH)]
        shutil.rmtree(self._temporary, ignore_errors=True)
        return left

    def outcome(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "outcome.json").read_text())
        return found

    def exit_status(self) -> int:
        """Returns the exit status of the run. torchrun and srun end with their own, so that of
        outcome.json counts."""
        status = self.command.returncode
        outcome = self.run_dir / "outcome.json"
        if status >= 0 and self._launch in (torchrun, srun) and outcome.exists():
            status = self.outcome()["exit_status"]
        return status


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Returns the step and the loss of each line of metrics.jsonl."""
    lines = read_metrics(run_dir)
    return [(line["step"], line["loss"]) for line in lines]


_STRAIGHT: dict[str, list[tuple[int, float]]] = {}  # losses by recipe


def undisturbed_losses(folder: Path, recipe: Recipe) -> list[tuple[int, float]]:
    """Returns the losses of a run of the recipe without a fault."""
    key = to_yaml(replace(recipe, run_dir=None, data=DataConfig()))
    if key not in _STRAIGHT:
        folder.mkdir()
        run = LiveRun(folder, replace(recipe, run_dir=str(folder / "run")))
        try:
            assert run.command.wait(600) == 0, run.stderr()
        finally:
            run.end()
        _STRAIGHT[key] = losses(run.run_dir)
    return _STRAIGHT[key]


Act = Callable[[LiveRun], object]


def to_rank(rank: int, signum: int) -> Act:
    return lambda run: os.kill(run.rank_pid(rank), signum)


def to_launcher(signum: int) -> Act:
    """Signals the process that the user has started."""
    return lambda run: run.command.send_signal(signum)


def to_group(signum: int) -> Act:
    """Signals all processes of the run, as a terminal, systemd and SLURM do."""
    return lambda run: os.killpg(run.command.pid, signum)


def to_fork_server(signum: int) -> Act:
    return lambda run: os.kill(run.fork_server(), signum)


def plant(rank: int | str, function: str) -> Act:
    """Makes a rank, or "all", call a function of `tests.planted` in its next forward pass."""

    def act(run: LiveRun) -> None:
        partial = run.folder / "plant.partial"
        partial.write_text(f"{rank} {function}")
        partial.rename(run.folder / "plant")

    return act


def one_after_the_other(*acts: Act) -> Act:
    def act(run: LiveRun) -> None:
        for each in acts:
            each(run)
            time.sleep(0.2)

    return act


def patiently(seconds: float) -> Iterator[None]:
    """Yields every few milliseconds until the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""
