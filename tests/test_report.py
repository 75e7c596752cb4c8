"""`parallel3d-report`: what it reads, shows and leaves alone, without a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from parallel3d.launch.run_lock import is_locked, locked
from parallel3d.timeline.draw import draw_svg
from parallel3d.timeline.trace import read_trace
from parallel3d.tools.report.command import main
from parallel3d.tools.report.page import page, table
from tests.plan_json import Said, error_line
from tests.report_runs import EVIL, RECIPE, line, resumed_run, start, write_run
from tests.test_run_dir import Train, train

__all__ = ["train"]  # A fixture.


class Elements(HTMLParser):
    """Elements of a page with their attributes, and the text of its data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][1].get("id") == "data":
            self.data += data


def report(folder: Path, *words: str) -> Elements:
    assert main([str(folder), *words]) == 0
    return Elements((folder / "report.html").read_text())


def as_json(said: Said, *words: str) -> dict[str, Any]:
    said.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(said.readouterr().out)


def read(said: Said, run: Path, *words: str) -> dict[str, Any]:
    """Returns the tree of a run."""
    return as_json(said, str(run), *words)["runs"][0]


def values(run: dict[str, Any], curve: str, key: str) -> dict[int, Any]:
    """Returns the values of a curve by step."""
    found = run["curves"][curve]
    return dict(zip(found["x"], found["y"][key], strict=True))


def test_a_killed_resumed_and_failed_run_shows_each_event_in_its_place(
    tmp_path: Path,
    capsys: Said,
) -> None:
    run = read(capsys, resumed_run(tmp_path / "run"))
    events = [(event["step"], event["kind"]) for event in run["events"]]
    assert events == [
        (25, "checkpoint"),
        (50, "resume"),
        (50, "checkpoint"),
        (71, "skipped_steps"),
        (72, "skipped_steps"),
        (75, "checkpoint"),
        (80, "spikes"),
        (81, "rollbacks"),
    ]
    told = {event["step"]: event["text"] for event in run["events"]}
    assert told[25] == "checkpoint, since deleted"
    assert told[72] == "1 skipped step in step 72"
    resumed = next(event["text"] for event in run["events"] if event["kind"] == "resume")
    layout = "parallel.pp 2 → 1; parallel.tp 2 → 4"
    assert resumed == f"resumed from step 50, before: killed; {layout}"
    assert run["status"] == "failed"
    assert run["step"] == 90
    assert run["skipped_steps"] == 2
    assert run["resume"] == "parallel3d-train quickstart train.steps=100 checkpoint.resume=auto"
    # The lines of steps 1 and 51 include the start-up: 1 s instead of about 0.25 s.
    assert run["step_time_s"] < 0.28
    assert sum(run["time_s"].values()) == pytest.approx(run["step_time_s"], rel=0.02)
    assert values(run, "loss", "loss")[80] == 9.0
    assert {*values(run, "evaluation: validation", "loss")} == {25, 50, 75}


def test_the_data_of_the_page_are_those_of_json(tmp_path: Path, capsys: Said) -> None:
    first = resumed_run(tmp_path / "a")
    second = write_run(tmp_path / "b", [line(7)])
    both = tmp_path / "both.html"
    assert main([str(first), str(second), "-o", str(both)]) == 0
    elements = Elements(both.read_text())
    assert json.loads(elements.data) == as_json(capsys, str(first), str(second))
    for run in (first, second):
        assert json.loads(report(run).data) == as_json(capsys, str(run))


def test_runs_are_compared_by_the_keys_that_differ(tmp_path: Path, capsys: Said) -> None:
    first = write_run(tmp_path / "first", [line(1)])
    recipe = RECIPE.replace("tp: 2", "tp: 1, cp: 2")
    second = write_run(tmp_path / "second", [line(1)], recipe=recipe)
    found = as_json(capsys, str(first), str(second))["differences"]
    assert found == {
        "parallel.tp": ["2", "1"],
        "parallel.cp": ["", "2"],
    }
    other = write_run(tmp_path / "other" / "first", [line(1)])
    runs = as_json(capsys, str(first), str(other))["runs"]
    assert [run["name"] for run in runs] == [str(first), str(other)]


def test_damaged_and_cut_lines_are_left_out(
    tmp_path: Path,
    capsys: Said,
) -> None:
    run = write_run(tmp_path / "run", [line(step) for step in range(1, 11)])
    path = run / "metrics.jsonl"
    odd = [
        '{"step": 11, "loss',
        "[1]",
        '{"step": "x"}',
        "",
        '{"step": 1e999}',
        "[" * 9999,
    ]
    again = json.dumps(line(5, loss=7.0))
    path.write_text(path.read_text() + "\n".join([*odd, again, json.dumps(line(12))])[:-40])
    found = read(capsys, run)
    assert found["damaged_lines"] == 6
    losses = values(found, "loss", "loss")
    assert [*losses] == [*range(1, 11)]
    assert losses[5] == 7.0


def test_values_that_are_not_numbers_leave_gaps(tmp_path: Path, capsys: Said) -> None:
    odd = {
        "loss": None,
        "lr": "x",
        "grad_norm": float("nan"),
        "mfu": [1],
        "tokens": 10**400,
    }
    details = {
        "time_s": 3,
        "time_spread_s": {"tp": "ab"},
        "memory_bytes": {"gradients": "x"},
    }
    run = write_run(
        tmp_path / "run",
        [
            line(1),
            line(2, **odd, **details),
            line(3),
        ],
    )
    (run / "run.json").write_text('{"starts": [{"step": 1e999}]}')
    (run / "timeline_step_00000001.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    (run / "config.yaml").write_text("a: [")
    found = read(capsys, run)
    for key in (
        "loss",
        "lr",
        "grad_norm",
        "mfu",
    ):
        assert values(found, key, key)[2] is None
    assert found["starts"] == []
    assert found["timelines"] is None
    assert found["recipe"] == {}
    report(run)


def test_a_run_without_a_finite_loss_gives_a_report(tmp_path: Path, capsys: Said) -> None:
    run = write_run(tmp_path / "run", [line(1, loss=None)])
    report(run)
    assert main([str(run), "--text"]) == 0
    assert "loss: not finite" in capsys.readouterr().out


def test_an_old_run_gives_a_report_with_what_it_has(tmp_path: Path, capsys: Said) -> None:
    keys = (
        "step",
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "step_time_s",
        "tokens_per_s",
    )
    lines = [{key: line(step)[key] for key in keys} for step in (1, 2, 3)]
    run = write_run(tmp_path / "run", lines)
    found = read(capsys, run)
    assert {*found["curves"]} == {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
    }
    assert found["status"] == "unfinished"
    assert found["time_s"] == {}
    assert found["mfu"] is None
    report(run)
    assert main([str(run), "--text"]) == 0


def test_hostile_names_and_values_do_nothing(tmp_path: Path, capsys: Said) -> None:
    name = "".join(EVIL).replace("/", "|")
    evil = "".join(EVIL)
    starts = [
        start(
            0,
            {evil: evil},
            command=[evil],
            hosts={evil: [0]},
            environment={evil: evil},
        ),
        start(
            1,
            {evil: "other"},
            versions={evil: evil},
            reason=evil,
        ),
    ]
    losses = {
        "val_loss": 1.0,
        f"val_loss/{evil}": 2.0,
    }
    run = write_run(
        tmp_path / name,
        [line(1), line(2, **losses)],
        starts=starts,
        outcome={
            "status": evil,
            "reason": evil,
        },
        recipe=RECIPE + json.dumps({evil: evil})[1:-1] + "\n",
        checkpoints=(1,),
    )
    elements = report(run)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {
        "img",
        "iframe",
        "link",
        "base",
        "form",
        "a",
    }
    assert [tag for tag, _ in elements.found].count("script") == 4
    for _, attributes in elements.found:
        assert not attributes.keys() & {
            "src",
            "href",
            "style",
            "onerror",
            "onload",
        }
    assert "<" not in elements.data
    assert json.loads(elements.data)["runs"][0]["starts"][0]["recipe"]
    capsys.readouterr()
    assert main([str(run), "--text"]) == 0
    text = capsys.readouterr().out
    assert "onerror=alert(1)" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert max(map(len, text.splitlines())) <= 80


def test_30_000_lines_stay_small_and_keep_a_spike_of_one_step(
    tmp_path: Path,
    capsys: Said,
) -> None:
    text = json.dumps(line(123457, loss=1.2345678901))
    run = write_run(tmp_path / "run", [])
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 30_001):
            loss = 50.0 if step == 16_666 else 2.0 + step % 1009 / 1000
            varied = text.replace("123457", str(step)).replace("1.2345678901", str(loss))
            if step == 27_777:
                varied = varied.replace('"tp": ', '"tp": 9', 1)
            file.write(varied + "\n")
    report(run)
    assert (run / "report.html").stat().st_size < 3_000_000
    found = read(capsys, run)
    losses = values(found, "loss", "loss")
    assert losses[16_666] == 50.0
    assert min(losses.values()) == 2.0
    assert values(found, "time_s", "tp")[27_777] == pytest.approx(90, rel=0.1)
    assert len(losses) < 10_000


def test_mistakes_are_one_line(tmp_path: Path, capsys: Said) -> None:
    empty = write_run(tmp_path / "empty", [])
    run = write_run(tmp_path / "run", [line(1)])
    own = tmp_path / "own.html"
    own.write_text("<p>mine")
    mistakes: dict[str, list[object]] = {
        "cannot be read (No such file or directory); give the folder": [tmp_path / "no"],
        "metrics.jsonl: has no metrics; give a run that": [empty],
        "own.html: exists already and is not a report": [run, "-o", own],
        "is a folder; try": [run, "-o", tmp_path],
        "did you mean": [run, "--gpu", "h101"],
        "RUN: required": [],
    }
    for said, words in mistakes.items():
        assert main([str(word) for word in words]) == 2
        assert said in error_line(capsys)
    assert own.read_text() == "<p>mine"
    assert main([str(run), "-o", str(tmp_path / "no" / "x.html")]) == 73


def test_the_prediction_stands_next_to_the_measurement(tmp_path: Path, capsys: Said) -> None:
    run = resumed_run(tmp_path / "run")
    assert read(capsys, run)["note"].startswith("no prediction: give the hardware")
    found = read(capsys, run, "--gpu", "h100")
    predicted = found["predicted"]
    assert {"step_time_s", "mfu", "peak_memory_bytes", "compute", "other"} <= {*predicted}
    causes = sum(value for key, value in predicted.items() if key in found["time_s"])
    assert causes == pytest.approx(predicted["step_time_s"], rel=1e-3)
    assert main([str(run), "--gpu", "h100", "--text"]) == 0
    assert re.search(r"step time +0\.25\d* s +[\d.]+ s\n", capsys.readouterr().out)


def test_measured_and_simulated_timelines_have_one_scale(tmp_path: Path) -> None:
    run = resumed_run(tmp_path / "run")
    measured, simulated = read_trace(run / "timeline_step_00000020.json")
    assert (measured.ranks, len(measured.spans)) == (2, 16)
    assert measured.makespan_s > simulated.makespan_s
    widths = []
    for timeline in (measured, simulated):
        drawn = draw_svg(timeline, longest_s=measured.makespan_s)
        widths.append(float(re.findall(r'class="bar"><rect [^>]*width="([\d.]+)"', drawn)[0]))
    assert widths[0] == widths[1]  # Both begin with a forward action of 10 ms.
    html = (tmp_path / "run" / "report.html").read_text() if report(run) else ""
    assert html.count("<svg ") == 2


def test_a_folder_is_locked_while_a_run_uses_it(tmp_path: Path, capsys: Said) -> None:
    run = write_run(tmp_path / "run", [line(1)])
    with locked(run):
        assert is_locked(run)
        assert read(capsys, run)["status"] == "running"
    assert not is_locked(run)


def test_a_page_escapes_text_and_allows_only_its_own_scripts() -> None:
    shown = table(EVIL[0], [EVIL[1]], [[EVIL[0]]])
    built = page(EVIL[0], shown, {"x": EVIL[0]}, scripts=["let one = 1;"])
    elements = Elements(built)
    assert [tag for tag, _ in elements.found].count("script") == 4
    policy = next(found["content"] for _, found in elements.found if "http-equiv" in found)
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("'sha256-") == 5
    assert "unsafe" not in policy
    with pytest.raises(ValueError):
        page("", "", float("nan"))


def test_a_run_writes_its_report_and_ends_with_three_lines(
    train: Train,
    tmp_path: Path,
    capsys: Said,
) -> None:
    run_dir = f"run_dir={tmp_path}/run"
    assert train(run_dir) == 0
    last = capsys.readouterr().err.splitlines()[-3:]
    assert [words.partition(":")[0] for words in last] == ["loss", "time", "report"]
    data = json.loads(Elements((tmp_path / "run" / "report.html").read_text()).data)
    run = data["runs"][0]
    assert run["status"] == "done"
    assert run["step"] == 2
    assert train(run_dir, "checkpoint.resume=none") == 0
    assert (tmp_path / "run.1" / "report.html").is_file()


def test_a_report_that_cannot_be_written_does_not_fail_a_run(
    train: Train,
    tmp_path: Path,
    capsys: Said,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("mine")
    assert train(f"run_dir={tmp_path}/run", "checkpoint.every=1") == 0
    error = capsys.readouterr().err
    assert error.count("warning: no report of") >= 2
    assert (tmp_path / "run" / "report.html").read_text() == "mine"


def test_a_refused_start_leaves_the_report_of_the_run(
    train: Train,
    tmp_path: Path,
    capsys: Said,
) -> None:
    run = write_run(tmp_path / "run", [line(1)])
    (run / "report.html").write_text("mine")
    assert train(f"run_dir={tmp_path}/run", "checkpoint.resume=/no/such") != 0
    assert "report" not in capsys.readouterr().err
    assert (run / "report.html").read_text() == "mine"
