"""Checks that test_gpu_check.py has planted: what each does wrong is its name."""

from __future__ import annotations

import os
import subprocess
import time

from parallel3d.tools.gpu_check.findings import Findings, NotPossible


def keeps_its_bounds(findings: Findings) -> None:
    findings.at_most("error", 0.5, 1.0)
    findings.at_least("rate", 123.456789, 100.0)
    findings.at_most("time that only a GPU could keep", 9.0, 1.0, gpu_only=True)


def is_over_its_bound(findings: Findings) -> None:
    findings.at_most("error", 2.0, 1.0)
    findings.at_most("another", float("nan"), 1.0)
    findings.holds("equal to the bit", False)


def raises(findings: Findings) -> None:
    findings.note("before", 1.0)
    raise ValueError("a fault\nof two lines")


def hangs(findings: Findings) -> None:
    def waits_for_a_peer() -> None:
        time.sleep(60)

    waits_for_a_peer()


def dies(findings: Findings) -> None:
    os._exit(9)


def leaves_a_process(findings: Findings) -> None:
    process = subprocess.Popen(["sleep", "60"])
    findings.note("process", str(process.pid))


def can_show_nothing(findings: Findings) -> None:
    raise NotPossible("this machine has no such thing")
