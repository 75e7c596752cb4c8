"""The command `parallel3d-report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.command_line import SingleCommand
from parallel3d.tools.plan.command import COMMAND_LINE
from parallel3d.tools.plan.hardware import asked_cluster
from parallel3d.tools.report.charts import Tree
from parallel3d.tools.report.html import report_page
from parallel3d.tools.report.page import write_page
from parallel3d.tools.report.prediction import add_prediction
from parallel3d.tools.report.run import differences, read_run
from parallel3d.tools.report.text import lines

main = SingleCommand(
    "parallel3d-report",
    Path(__file__).with_name("command.toml"),
    COMMAND_LINE.table["shared"],
).main


def answer(options: argparse.Namespace) -> Reply:
    cluster = asked_cluster(options) if options.gpu or options.hardware else None
    tree = report_tree(options.runs, cluster)
    if options.json or options.text:
        return Reply(page=lines(tree), tree=lambda: tree)
    folder = options.runs[0] if len(options.runs) == 1 else Path()
    path = options.output or folder / "report.html"
    write_page(path, report_page(tree))
    return Reply(page=[f"wrote {path}"])


def report_tree(folders: Sequence[Path], cluster: Cluster | None = None) -> Tree:
    """Returns all numbers and texts of the report of some runs."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        add_prediction(run, cluster)
    if len({run["name"] for run in runs}) < len(runs):
        for run in runs:
            run["name"] = run["folder"]
    changed = differences([run["recipe"] for run in runs])
    return {"schema": "parallel3d.report/1", "runs": runs, "differences": changed}
