"""The command `parallel3d-report`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.tools.cli_output import Reply, exit_status
from parallel3d.tools.command_line import Subcommand
from parallel3d.tools.plan.command import COMMAND_LINE
from parallel3d.tools.plan.hardware import asked_cluster
from parallel3d.tools.report.charts import Tree
from parallel3d.tools.report.html import report_page
from parallel3d.tools.report.page import write_page
from parallel3d.tools.report.prediction import add_prediction
from parallel3d.tools.report.run import differences, read_run
from parallel3d.tools.report.text import lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    return exit_status(arguments, _run)


def _run(words: list[str]) -> int:
    table = tomllib.loads(Path(__file__).with_name("command.toml").read_text())
    parser = Subcommand(**table).parser("parallel3d-report", COMMAND_LINE.table["shared"])
    options = parser.parse_intermixed_args(words)
    cluster = asked_cluster(options) if options.gpu or options.hardware else None
    tree = report_tree(options.runs, cluster)
    reply = Reply(page=lambda: lines(tree), tree=lambda: tree)
    if not (options.json or options.text):
        folder = options.runs[0] if len(options.runs) == 1 else Path()
        path = options.output or folder / "report.html"
        write_page(path, report_page(tree))
        reply = Reply(page=lambda: [f"wrote {path}"])
    return reply.print(as_json=options.json)


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
