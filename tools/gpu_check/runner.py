"""Runs checks, each in a child process with a session of its own, which is killed whole when the check has ended or its
time is over. No torch here."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from parallel3d.tools.gpu_check.findings import Check, Findings, NotPossible, Outcome

STACKS_BEFORE_S = 2.0  # so long before its end a child writes the stacks of its threads
CPU_SLOWER = 6.0  # the limits are for a GPU's host; on a CPU the same code may take so much longer
_LOG_CHARACTERS = 6000


def run_checks(checks: Sequence[Check], device: str) -> Iterator[Outcome]:
    """Runs checks one after the other, and yields how each ended. A check whose `needs` ran and did not pass is skipped
    with its reason."""
    ended: dict[str, Outcome] = {}
    for check in checks:
        before = ended.get(check.needs)
        if before is not None and before.result != "pass":
            reason = f"{check.needs} did not pass: {before.reason}"
            outcome = Outcome(id=check.id, title=check.title, result="skipped", reason=reason)
        else:
            limit_s = check.limit_s * (1.0 if device == "cuda" else CPU_SLOWER)
            outcome = run_child(check, device, limit_s)
        ended[check.id] = outcome
        yield outcome


def run_child(check: Check, device: str, limit_s: float) -> Outcome:
    """Runs one check in a child process, and returns how it ended."""
    with tempfile.TemporaryDirectory(prefix="parallel3d-gpu-check-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        child = ["--child", check.target, "--device", device, "--limit", str(limit_s), "--answer", str(answer)]
        start = time.monotonic()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "parallel3d.tools.gpu_check", *child],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):  # what the child has started: ranks, and the server that forks them
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = round(time.monotonic() - start, 1)
        said = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        outcome = Outcome(id=check.id, title=check.title, result="fail", seconds=seconds, log=said)
        if status is None:
            return replace(
                outcome, result="timeout", reason=f"was not done after {limit_s:.0f} s; the log has its stacks"
            )
        if not answer.exists():
            return replace(outcome, reason=f"its process ended with status {status} and without an answer")
        found = json.loads(answer.read_text())
        return replace(outcome, **found, log=said if found["result"] == "fail" else "")


def answer_as_child(target: str, device: str, limit_s: float, answer: Path) -> int:
    """Calls `target` and writes what it found: the main function of a child process."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, limit_s - STACKS_BEFORE_S))
    findings = Findings(device, limit_s)
    module, _, name = target.partition(":")
    result, reason = "pass", ""
    try:
        getattr(import_module(module), name)(findings)
    except NotPossible as error:
        result, reason = "skipped", str(error)
    except Exception as error:
        traceback.print_exc()
        result, reason = "fail", "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    if findings.broken:
        result, reason = "fail", "; ".join([*findings.broken, *([reason] if reason else [])])
    answer.write_text(json.dumps({"result": result, "reason": reason, "figures": findings.figures}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not through the exit handlers: what a check has left open may wait for a peer
