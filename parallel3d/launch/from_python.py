"""Trains a recipe from Python or a notebook, as the command `parallel3d-train` does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from parallel3d.errors import ConfigError


@dataclass(frozen=True)
class TrainingRun:
    """Result of `train`.

    Attributes:
        folder: Run folder.
        metrics: One dict per logged step, as in `metrics.jsonl`.
    """

    folder: Path
    metrics: list[dict[str, Any]]

    def __repr__(self) -> str:
        last = self.metrics[-1]
        return f"TrainingRun({str(self.folder)!r}, step={last['step']}, loss={last['loss']})"


def train(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> TrainingRun:
    """Trains a recipe on local workers, and prints their output.

    Args:
        recipe: Name of a shipped recipe, or path of a YAML file.
        overrides: Recipe keys with new values, such as `{"train.steps": 50}`.

    Returns:
        Folder and metrics of the run. Without `run_dir`, the folder is a new temporary one.

    Raises:
        ConfigError: The recipe or an override is invalid.
        RuntimeError: The run ended with a nonzero exit status.

    Example:
        >>> run = parallel3d.train("quickstart", {"train.steps": 50})
        >>> run.metrics[-1]["loss"]
    """
    command = [sys.executable, "-m", "parallel3d.recipes.pretrain", str(recipe)]
    command += [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    shown = subprocess.run([*command, "--print-config"], capture_output=True, text=True)
    if shown.returncode:
        raise ConfigError(shown.stderr.strip().removeprefix("error: "))
    folder = yaml.safe_load(shown.stdout)["run_dir"]
    if folder is None:
        folder = tempfile.mkdtemp(prefix="parallel3d-")
        command.append(f"run_dir={folder}")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        try:
            for line in run.stdout:
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            run.send_signal(signal.SIGINT)
            raise
    if run.returncode:
        raise RuntimeError(f"{recipe}: ended with status {run.returncode}; its error is above")
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return TrainingRun(Path(folder), [json.loads(line) for line in lines])
