"""Marks the tests of this folder, skips them without a GPU, and writes their report into
docs/status.md (`--gpu-report FILE`)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import torch

HEADING = "## The last report"
Measure = Callable[[str, float], float]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-report",
        type=Path,
        metavar="FILE",
        help="the report goes into FILE",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(no_gpu)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measure:
    """`measured(name, value)` puts a value into the report and returns it."""

    def measure(name: str, value: float) -> float:
        record_property(name, f"{value:.4g}")
        return value

    return measure


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    path: Path | None = config.getoption("--gpu-report", default=None)
    if path is None or not torch.cuda.is_available():
        return
    rows = []
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(outcome):
            values = "; ".join(f"{name} {value}" for name, value in report.user_properties)
            name = report.nodeid.partition("::")[2].replace("|", "/")
            rows.append(f"| {name} | {outcome} | {report.duration:.0f} | {values} |")
    text = path.read_text() if path.exists() else ""
    text = text.partition(HEADING)[0]
    table = [
        "| test | outcome | s | measured |",
        "|---|---|---|---|",
        *sorted(rows),
    ]
    path.write_text("\n".join([f"{text}{HEADING}", "", machine(), "", *table, ""]))


def machine() -> str:
    gpu = torch.cuda.get_device_name(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    cudnn = torch.backends.cudnn.version()
    return (
        f"{date.today()}: {torch.cuda.device_count()} x {gpu}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {cudnn}."
    )
