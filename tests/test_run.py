"""Whole runs from the command line: the files they write, going on from a checkpoint, and a worker
that is killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from parallel3d.recipes import pretrain
from tests.one_rank import read_metrics

COMMAND = [sys.executable, "-m", "parallel3d.recipes.pretrain", "quickstart"]
SMALL = [
    "parallel.tp=1",
    "parallel.dp_shard=1",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.ffn_hidden=48",
    "train.seq_len=32",
    "train.eval_sequences=8",
    "train.sample_tokens=4",
    "logging.every=1",
    "train.global_batch_size=8",
    "optimizer.warmup_steps=0",
]
METRICS = {
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "step_time_s",
    "data_wait_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_memory_bytes",
    "peak_reserved_bytes",
    "val_loss",
    "val_perplexity",
    "loss_scale",
    "spikes",
    "rollbacks",
    "skipped_steps",
    "time_s",
    "time_spread_s",
    "memory_bytes",
}


def run(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *SMALL, *overrides],
        capture_output=True,
        text=True,
        timeout=240,
    )


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return read_metrics(run_dir)


def test_a_run_writes_its_files_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Ten steps without a stop, and the last two again from what a stop after the eighth would have
    left: the same to the bit."""
    straight = tmp_path / "straight"
    stopped = tmp_path / "stopped"
    done = run(
        f"run_dir={straight}",
        "train.steps=10",
        "train.eval_every=5",
        "checkpoint.every=4",
        "checkpoint.keep=2",
    )
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr  # a worker that runs the main module once more
    assert done.stdout.startswith("--- sample after step 10\ndef ")
    assert re.search(r"step 10/10  loss \d\.\d{4}  val \d\.\d{4}  grad .* tok/s", done.stderr)
    lines = metrics(straight)
    assert [line["step"] for line in lines] == list(range(1, 11))
    for line in lines:
        assert set(line) == METRICS
    assert lines[-1]["tokens"] == 10 * 8 * 32
    assert lines[0]["mfu"] is None
    for line in lines:
        assert 0 < line["data_wait_s"] < line["step_time_s"]
        for cause, (least, most) in line["time_spread_s"].items():
            assert 0 <= least <= line["time_s"][cause] <= most
    # The parts add up to 2 % or 1 ms. A step may wait for the processor between two of its parts.
    missing = [line["step_time_s"] - sum(line["time_s"].values()) for line in lines]
    assert abs(median(missing)) <= max(0.02 * median(line["step_time_s"] for line in lines), 1e-3)
    assert [line["time_s"]["checkpoint"] > 0 for line in lines] == [
        step in (5, 9) for step in range(1, 11)
    ]
    assert lines[-1]["memory_bytes"]["optimizer"] > 2 * lines[-1]["memory_bytes"]["gradients"]
    assert lines[4]["val_loss"] is not None
    assert lines[3]["val_loss"] is None
    kept = sorted((straight / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step_00000008", "step_00000010"]
    assert json.loads((straight / "outcome.json").read_text())["status"] == "done"

    shutil.copytree(kept[0], stopped / "checkpoints" / kept[0].name)
    first_lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)[:8]
    (stopped / "metrics.jsonl").write_text("".join(first_lines))
    resumed = run(
        f"run_dir={stopped}",
        "train.steps=10",
        "checkpoint.resume=auto",
        "train.eval_every=5",
    )
    assert "resumed at step 8" in resumed.stderr
    same = ("step", "loss", "lr", "grad_norm", "tokens", "val_loss")
    assert [[line[key] for key in same] for line in metrics(stopped)] == [
        [line[key] for key in same] for line in lines
    ]


def test_a_killed_worker_takes_the_run_down_and_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second start of the recipe is refused meanwhile, and moves nothing."""
    run_dir = tmp_path / "run"
    endless = [f"run_dir={run_dir}", "train.steps=100000", "checkpoint.every=null"]
    command = [*COMMAND, *SMALL, *endless]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("step 3/"))
        second = pretrain.main([*command[3:], "checkpoint.resume=none"])
        assert second == 73
        assert f"pid {process.pid}, since 20" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        workers = descendants(process.pid)
        os.kill(workers[-1], signal.SIGKILL)
        killed_at = time.monotonic()
        errors = [line for line in process.stderr.read().splitlines() if "error" in line.lower()]
        assert process.wait(timeout=30) == 70
    assert time.monotonic() - killed_at < 30
    assert len(errors) == 1, errors
    place = r"pp \d, dp_replicate 0, dp_shard \d, cp 0, tp \d"
    assert re.match(rf"error: rank \d \(.*{place}\) was killed by SIGKILL", errors[0])
    while alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() - killed_at < 30, f"{alive} outlive the run"
        time.sleep(0.05)  # the fork server sees the launcher's end, and ends
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert outcome["exit_status"] == 70
    assert "SIGKILL" in outcome["reason"]


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_a_signal_to_all_processes_saves_and_the_command_is_told_that_goes_on(
    signum: signal.Signals, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    endless = [f"run_dir={run_dir}", "train.steps=100000", "checkpoint.every=90000"]
    command = [*COMMAND, *SMALL, *endless]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("step 3/"))
        os.killpg(process.pid, signum)  # as a terminal at Ctrl-C; as systemd, timeout(1) and SLURM
        said = process.stderr.read().splitlines()
    is_ctrl_c = signum == signal.SIGINT
    assert process.returncode == (130 if is_ctrl_c else 75)
    last = int(metrics(run_dir)[-1]["step"])
    assert (run_dir / "checkpoints" / f"step_{last:08d}").is_dir()
    assert last < 100
    (told,) = [line for line in said if line.startswith("error: ")]
    assert told.startswith(
        f"error: stopped by {'Ctrl-C' if is_ctrl_c else 'SIGTERM'} after step {last}, saved: "
    )
    (goes_on,) = [line for line in said if line.startswith("resume with: ")]
    assert (
        goes_on == f"resume with: parallel3d-train {shlex.join(command[3:])} checkpoint.resume=auto"
    )
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert outcome["exit_status"] == process.returncode
    assert outcome["status"] == ("stopped" if is_ctrl_c else "preempted")
    assert f"saved: {run_dir}/checkpoints/step_{last:08d}" in outcome["reason"]


def descendants(pid: int) -> list[int]:
    """Returns the processes below `pid`, oldest first."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return sorted(
        children + [grandchild for child in children for grandchild in descendants(child)]
    )
