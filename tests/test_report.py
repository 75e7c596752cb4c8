"""`parallel3d-report`: what it reads, shows and leaves alone, without a browser."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel3d.config.load import to_yaml
from parallel3d.launch.run_lock import is_locked, locked
from parallel3d.recipes.pretrain import main as train
from parallel3d.timeline.draw import draw_svg
from parallel3d.timeline.trace import read_trace
from parallel3d.tools.report.command import main
from parallel3d.tools.report.page import page, table
from tests.report_runs import EVIL, RECIPE, line, resumed_run, start, write_run
from tests.test_start import RECIPE as TRAINED

Said = pytest.CaptureFixture[str]


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


def test_a_killed_resumed_and_failed_run_shows_each_event_in_its_place(
    tmp_path: Path, capsys: Said
) -> None:
    run = as_json(capsys, str(resumed_run(tmp_path / "run")))["runs"][0]
    events = [(event["step"], event["kind"]) for event in run["events"]]
    assert events == [
        (25, "checkpoint"),
        *((50, "resume"), (50, "checkpoint")),
        *((71, "skipped_steps"), (72, "skipped_steps")),
        (75, "checkpoint"),
        *((80, "spikes"), (81, "rollbacks")),
    ]
    told = {event["step"]: event["text"] for event in run["events"]}
    assert told[25] == "checkpoint, since deleted"
    assert told[72] == "1 skipped step in step 72"
    resumed = next(event["text"] for event in run["events"] if event["kind"] == "resume")
    layout = "parallel.pp 2 → 1; parallel.tp 2 → 4"
    assert resumed == f"resumed from step 50, before: killed; {layout}"
    assert (run["status"], run["step"], run["skipped_steps"]) == ("failed", 90, 2)
    assert run["resume"] == "parallel3d-train quickstart train.steps=100 checkpoint.resume=auto"
    # The lines of steps 1 and 51 include the start-up: 1 s instead of about 0.25 s.
    assert run["step_time_s"] < 0.28
    assert sum(run["time_s"].values()) == pytest.approx(run["step_time_s"], rel=0.02)
    assert run["curves"]["loss"]["y"]["loss"][79] == 9.0
    evaluation = run["curves"]["evaluation: validation"]
    assert evaluation["x"] == [25, 50, 75]


def test_the_data_of_the_page_are_those_of_json(tmp_path: Path, capsys: Said) -> None:
    for run in (resumed_run(tmp_path / "a"), write_run(tmp_path / "b", [line(7)])):
        page_data = json.loads(report(run).data)
        assert page_data == as_json(capsys, str(run))
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*both, "-o", str(tmp_path / "both.html")]) == 0
    page_data = json.loads(Elements((tmp_path / "both.html").read_text()).data)
    assert page_data == as_json(capsys, *both)
    assert [run["name"] for run in page_data["runs"]] == ["a", "b"]


def test_runs_are_compared_by_the_keys_that_differ(tmp_path: Path, capsys: Said) -> None:
    first = write_run(tmp_path / "first", [line(1)])
    recipe = RECIPE.replace("tp: 2", "tp: 1, cp: 2")
    second = write_run(tmp_path / "second", [line(1)], recipe=recipe)
    found = as_json(capsys, str(first), str(second))["differences"]
    assert found == {"parallel.tp": ["2", "1"], "parallel.cp": ["", "2"]}


def test_damaged_and_cut_lines_are_left_out(tmp_path: Path, capsys: Said) -> None:
    run = write_run(tmp_path / "run", [line(step) for step in range(1, 11)])
    path = run / "metrics.jsonl"
    odd = ['{"step": 11, "loss', "[1]", '{"step": "x"}', "", '{"step": 1e999}', "[" * 9999]
    again = json.dumps(line(5, loss=7.0))
    path.write_text(path.read_text() + "\n".join([*odd, again, json.dumps(line(12))])[:-40])
    found = as_json(capsys, str(run))["runs"][0]
    assert found["damaged_lines"] == 6
    assert found["curves"]["loss"]["x"] == [*range(1, 11)]
    assert found["curves"]["loss"]["y"]["loss"][4] == 7.0


def test_values_that_are_not_numbers_leave_gaps(tmp_path: Path, capsys: Said) -> None:
    odd = {"loss": None, "lr": "x", "grad_norm": float("nan"), "mfu": [1], "tokens": 10**400}
    details = {"time_s": 3, "time_spread_s": {"tp": "ab"}, "memory_bytes": {"gradients": "x"}}
    run = write_run(tmp_path / "run", [line(1), line(2, **odd, **details), line(3)])
    (run / "run.json").write_text('{"starts": [{"step": 1e999}]}')
    (run / "timeline_step_00000001.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    (run / "config.yaml").write_text("a: [")
    found = as_json(capsys, str(run))["runs"][0]
    assert found["curves"]["loss"]["y"]["loss"][1] is None
    assert found["curves"]["lr"]["y"]["lr"][1] is None
    assert (found["starts"], found["timelines"], found["recipe"]) == ([], None, {})
    report(run)


def test_an_old_run_gives_a_report_with_what_it_has(tmp_path: Path, capsys: Said) -> None:
    keys = ("step", "loss", "lr", "grad_norm", "tokens", "step_time_s", "tokens_per_s")
    lines = [{key: line(step)[key] for key in keys} for step in (1, 2, 3)]
    run = write_run(tmp_path / "run", lines)
    found = as_json(capsys, str(run))["runs"][0]
    assert {*found["curves"]} == {"loss", "lr", "grad_norm", "tokens_per_s"}
    assert (found["status"], found["time_s"], found["mfu"]) == ("unfinished", {}, None)
    report(run)
    assert main([str(run), "--text"]) == 0


def test_hostile_names_and_values_do_nothing(tmp_path: Path, capsys: Said) -> None:
    name = "".join(EVIL).replace("/", "|")
    evil = "".join(EVIL)
    starts = [
        start(0, {evil: evil}, command=[evil], hosts={evil: [0]}, environment={evil: evil}),
        start(1, {evil: "other"}, versions={evil: evil}, reason=evil),
    ]
    losses = {"val_loss": 1.0, f"val_loss/{evil}": 2.0}
    run = write_run(
        tmp_path / name,
        [line(1), line(2, **losses)],
        starts=starts,
        outcome={"status": evil, "reason": evil},
        recipe=RECIPE + json.dumps({evil: evil})[1:-1] + "\n",
        checkpoints=(1,),
    )
    elements = report(run)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"img", "iframe", "link", "base", "form", "a"}
    assert [tag for tag, _ in elements.found].count("script") == 4
    attributes = {attribute for _, found in elements.found for attribute in found}
    assert not [each for each in attributes if each.startswith("on") or each in ("src", "href")]
    assert "<" not in elements.data
    assert json.loads(elements.data)["runs"][0]["starts"][0]["recipe"]
    capsys.readouterr()
    assert main([str(run), "--text"]) == 0
    text = capsys.readouterr().out
    assert "onerror=alert(1)" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert max(map(len, text.splitlines())) <= 80


def test_100_000_lines_stay_small_and_keep_a_spike_of_one_step(
    tmp_path: Path, capsys: Said
) -> None:
    text = json.dumps(line(123457, loss=1.2345678901))
    run = write_run(tmp_path / "run", [])
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            loss = 50.0 if step == 66_666 else 2.0 + step % 1009 / 1000
            varied = text.replace("123457", str(step)).replace("1.2345678901", str(loss))
            if step == 77_777:
                varied = varied.replace('"tp": ', '"tp": 9', 1)
            file.write(varied + "\n")
    report(run)
    assert (run / "report.html").stat().st_size < 3_000_000
    curves = as_json(capsys, str(run))["runs"][0]["curves"]
    losses = dict(zip(curves["loss"]["x"], curves["loss"]["y"]["loss"], strict=True))
    assert losses[66_666] == 50.0
    assert min(losses.values()) == 2.0
    times = dict(zip(curves["time_s"]["x"], curves["time_s"]["y"]["tp"], strict=True))
    assert times[77_777] > 90
    assert len(losses) < 10_000


def test_mistakes_are_one_line(tmp_path: Path, capsys: Said) -> None:
    empty = write_run(tmp_path / "empty", [])
    run = write_run(tmp_path / "run", [line(1)])
    own = tmp_path / "own.html"
    own.write_text("<p>mine")
    for words, said in (
        ((tmp_path / "no",), "cannot be read (No such file or directory); give the folder"),
        ((empty,), "metrics.jsonl: has no metrics; give a run that has completed a step"),
        ((run, "-o", own), "own.html: exists already and is not a report; try another path"),
        ((run, "-o", tmp_path), "is a folder; try"),
        ((run, "--gpu", "h101"), "--gpu"),
        ((), "RUN: required"),
    ):
        assert main([str(word) for word in words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert said in error or said == "--gpu"
    assert own.read_text() == "<p>mine"
    assert main([str(run), "-o", str(tmp_path / "no" / "x.html")]) == 73


def test_the_prediction_stands_next_to_the_measurement(tmp_path: Path, capsys: Said) -> None:
    run = str(resumed_run(tmp_path / "run"))
    assert as_json(capsys, run)["runs"][0]["note"].startswith("no prediction: give the hardware")
    found = as_json(capsys, run, "--gpu", "h100")["runs"][0]
    predicted = found["predicted"]
    assert {"step_time_s", "mfu", "peak_memory_bytes", "compute", "other"} <= {*predicted}
    causes = sum(value for key, value in predicted.items() if key in found["time_s"])
    assert causes == pytest.approx(predicted["step_time_s"], rel=1e-3)
    assert main([run, "--gpu", "h100", "--text"]) == 0
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
        assert as_json(capsys, str(run))["runs"][0]["status"] == "running"
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


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs parallel3d-train in this process, as the only worker of a launcher."""
    text = tmp_path / "corpus.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    data = replace(TRAINED.data, source="text", path=str(text))
    (tmp_path / "tiny.yaml").write_text(to_yaml(replace(TRAINED, data=data)))

    def run(*overrides: str) -> int:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        said = f"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_PORT={port} MASTER_ADDR=localhost"
        for setting in said.split():
            monkeypatch.setenv(*setting.split("="))
        words = ["train.steps=3", "logging.every=1", f"run_dir={tmp_path}/run", *overrides]
        try:
            return train([str(tmp_path / "tiny.yaml"), *words])
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run


def test_a_run_writes_its_report_and_ends_with_three_lines(
    trained: Any, tmp_path: Path, capsys: Said
) -> None:
    assert trained() == 0
    last = capsys.readouterr().err.splitlines()[-3:]
    assert [words.partition(":")[0] for words in last] == ["loss", "time", "report"]
    data = json.loads(Elements((tmp_path / "run" / "report.html").read_text()).data)
    assert (data["runs"][0]["status"], data["runs"][0]["step"]) == ("done", 3)
    assert trained("checkpoint.resume=none") == 0
    assert (tmp_path / "run.1" / "report.html").is_file()


def test_a_report_that_cannot_be_written_does_not_fail_a_run(
    trained: Any, tmp_path: Path, capsys: Said
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("mine")
    assert trained("checkpoint.every=1") == 0
    error = capsys.readouterr().err
    assert error.count("warning: no report of") >= 2
    assert (tmp_path / "run" / "report.html").read_text() == "mine"


def test_a_refused_start_leaves_the_report_of_the_run(
    trained: Any, tmp_path: Path, capsys: Said
) -> None:
    run = write_run(tmp_path / "run", [line(1)])
    (run / "report.html").write_text("mine")
    assert trained("checkpoint.resume=/no/such") != 0
    assert "report" not in capsys.readouterr().err
    assert (run / "report.html").read_text() == "mine"
