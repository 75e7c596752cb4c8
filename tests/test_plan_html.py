"""`parallel3d-plan --html`: one file that says what the JSON says, in figures that can be read without seeing them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from parallel3d.tools.plan import command as plan

Said = pytest.CaptureFixture[str]
SVG = "{http://www.w3.org/2000/svg}"
PIPELINE = "--model llama3-8b --gpu a100-40gb --gpus 16 --seq-len 4096 --global-batch 128 --fix pp=4 --tokens 300B"
LARGE = "--model gpt3-175b --gpu a100 --gpus 1024 --seq-len 2048 --global-batch 1536 --fix pp=32 tp=8 schedule=1f1b"
TOO_LARGE = "--model llama3-70b --gpu h100 --gpus 8 --seq-len 8192 --global-batch 512"


def written(arguments: str, tmp_path: Path, capsys: Said, *, status: int = 0) -> tuple[ElementTree.Element, Any, str]:
    """Returns the page as XML, the JSON of the same plan, and the file's text."""
    file = tmp_path / "plan.html"
    assert plan.main(shlex.split(f"{arguments} --json --html {file}")) == status
    found = json.loads(capsys.readouterr().out)
    text = file.read_text(encoding="utf-8")
    return ElementTree.fromstring(text), found, text


def rows(page: ElementTree.Element, heading: str) -> list[dict[str, str]]:
    """Returns the rows of the first table that has this column, by column."""
    for table in page.iter("table"):
        head, *body = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        if heading in head:
            return [dict(zip(head, row, strict=True)) for row in body]
    raise AssertionError(f"no table has a column {heading}")


def test_the_page_says_what_the_json_says(tmp_path: Path, capsys: Said) -> None:
    page, found, _ = written(f"{PIPELINE} --why tp=8", tmp_path, capsys)
    for row, each in zip(rows(page, "tokens/s/GPU"), found["strategies"], strict=True):
        assert float(row["GiB"]) == pytest.approx(each["memory_gib"]["total"], abs=0.06)
        assert float(row["tokens/s/GPU"].replace(",", "")) == pytest.approx(each["tokens_per_s_per_gpu"], abs=0.6)
        assert float(row["step s"]) == pytest.approx(each["step_time_s"], rel=6e-3)
        assert f"tp={each['parallel']['tp']}" in row["layout"] or each["parallel"]["tp"] == 1
    ranks = rows(page, "activations")
    best = found["strategies"][0]
    fullest = max(ranks, key=lambda row: float(row["total"]))
    assert int(fullest["rank"]) == best["worst_rank"] and len(ranks) == best["parallel"]["pp"]
    for kind, gib in best["memory_gib"].items():
        assert float(fullest[kind]) == pytest.approx(gib, abs=6e-3)
    said = "".join(page.itertext())
    assert all(line in said for line in (*found["advice"]["reasons"], *found["advice"]["limits"]))


def test_figures_have_titles_and_marks_their_numbers(tmp_path: Path, capsys: Said) -> None:
    page, found, _ = written(PIPELINE, tmp_path, capsys)
    figures = {figure.find(f"{SVG}title").text: figure for figure in page.iter(f"{SVG}svg")}  # type: ignore[union-attr]
    memory, timeline, time, scatter = figures.values()
    assert all(figure.get("role") == "img" and title for title, figure in figures.items())
    best = found["strategies"][0]
    marks = [title.text or "" for title in memory.iter(f"{SVG}title")]
    kinds = [kind for kind, gib in best["memory_gib"].items() if gib > 0.005 and kind != "total"]
    for kind in kinds:
        assert f"rank {best['worst_rank']}, {kind}: {best['memory_gib'][kind]:.2f} GiB" in marks
    assert len(list(scatter.iter(f"{SVG}circle"))) == len(found["strategies"])
    shares = [title.text or "" for title in time.iter(f"{SVG}title")]
    share = best["time_s"]["compute"] / best["step_time_s"]
    assert any(text.startswith("compute: ") and text.endswith(f"{share:.1%}") for text in shares)
    ranks = [text.text for text in timeline.iter(f"{SVG}text") if (text.text or "").startswith("rank ")]
    assert ranks == [f"rank {rank}" for rank in range(4)]


@pytest.mark.parametrize("arguments", [PIPELINE, LARGE])
def test_it_is_one_small_file_that_needs_no_network_and_no_script(arguments: str, tmp_path: Path, capsys: Said) -> None:
    page, _, text = written(arguments, tmp_path, capsys)
    assert len(text) < 300_000
    assert not [element for element in page.iter() if element.tag in ("script", "link", "img", "iframe")]
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "prefers-color-scheme: dark" in text


def test_where_nothing_fits_the_page_says_what_would(tmp_path: Path, capsys: Said) -> None:
    page, found, text = written(TOO_LARGE, tmp_path, capsys, status=3)
    said = "".join(page.itertext())
    assert "Nothing fits" in said and all(line in said for line in found["advice"]["remedies"])
    assert "<svg" not in text


def test_a_page_that_cannot_be_written_is_one_line(capsys: Said) -> None:
    assert plan.main(shlex.split(f"{PIPELINE} --html no/such/plan.html")) == 2
    assert "--html no/such/plan.html: cannot be written" in capsys.readouterr().err
