"""Pages of plans in a headless browser: the chart of layouts by mouse and keyboard."""

from __future__ import annotations

import shlex
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.plan import command
from tests.browser import (
    NARROW,
    WIDE,
    Page,
    browser,
)
from tests.test_plan_html import (
    EVIL,
    EXPERTS,
    PIPELINE,
    TOO_LARGE,
    evil_model,
    page_data,
)

__all__ = ["browser"]  # A fixture.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages of four plans."""
    made = tmp_path_factory.mktemp("plans")
    model = shlex.quote(str(evil_model(made)))
    plans = {
        "pipeline": PIPELINE,
        "experts": EXPERTS,
        "too-large": TOO_LARGE,
        "evil": f"--model {model} --gpu cpu --gpus 2 --seq-len 128 --global-batch 8",
    }
    for name, arguments in plans.items():
        command.main([*shlex.split(arguments), "--html", str(made / f"{name}.html")])
    return made


def shown(page: Page) -> dict[str, Any]:
    """Returns the `parallel:` section that a page shows."""
    text = page.page.locator("#layout pre").inner_text()
    found: dict[str, Any] = yaml.safe_load(text)["parallel"]
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [NARROW, WIDE], ids=["390", "1200"])
@pytest.mark.parametrize(
    "name",
    [
        "pipeline",
        "experts",
        "too-large",
        "evil",
    ],
)
def test_a_page_is_drawn_and_nothing_is_wrong(
    browser: Any, folder: Path, name: str, viewport: Any, scheme: Any
) -> None:
    page = Page(browser, folder / f"{name}.html", viewport=viewport, color_scheme=scheme)
    assert page.charts_are_drawn()
    assert page.widest() <= viewport["width"]
    assert page.axe() == []
    assert page.problems == []


def test_names_are_only_text(folder: Path) -> None:
    html = (folder / "evil.html").read_text()
    assert "<script>alert" not in html
    assert "<img" not in html
    assert EVIL[1] in page_data(folder / "evil.html")["input"]["model"]["name"]


def test_keys_go_through_layouts_and_show_their_section(browser: Any, folder: Path) -> None:
    data = page_data(folder / "pipeline.html")
    page = Page(browser, folder / "pipeline.html")
    best = data["strategies"][0]
    assert ParallelConfig(**shown(page)) == ParallelConfig(**best["parallel"])
    page.page.locator("#priced .chart").focus()
    page.page.keyboard.press("ArrowRight")
    section = shown(page)
    order = sorted(data["priced"]["layouts"], key=itemgetter("memory_gib"))
    layouts = [each["parallel"] for each in order]
    first = data["priced"]["layouts"][0]["parallel"]
    assert layouts.index(section) == layouts.index(first) + 1
    page.page.keyboard.press("Enter")
    assert page.js("document.activeElement.textContent") == "Copy"
    page.page.keyboard.press("Enter")
    assert yaml.safe_load(page.js("getSelection().toString()"))["parallel"] == section


def test_layouts_are_filtered_by_axis_and_clicked(browser: Any, folder: Path) -> None:
    layouts = page_data(folder / "pipeline.html")["priced"]["layouts"]
    page = Page(browser, folder / "pipeline.html")
    page.page.get_by_role("combobox", name="tp").focus()
    page.page.keyboard.type("8")
    wanted = [each for each in layouts if each["parallel"].get("tp") == 8]
    filters = page.page.locator("#priced .tools").inner_text()
    assert f"{len(wanted)} of {len(layouts)} layouts" in filters
    target = [each for each in wanted if each["fits"]][-1]
    memory = target["memory_gib"]
    speed = target["tokens_per_s_per_gpu"]
    place = {
        "x": page.js(f"look.charts[0].plot.valToPos({memory}, 'x')"),
        "y": page.js(f"look.charts[0].plot.valToPos({speed}, 'y')"),
    }
    page.page.locator("#priced .u-over").click(position=place)
    assert shown(page) == target["parallel"]


def test_the_table_shows_layouts_after_sorting(browser: Any, folder: Path) -> None:
    strategies = page_data(folder / "experts.html")["strategies"]
    page = Page(browser, folder / "experts.html")
    page.page.get_by_role("button", name="GiB", exact=True).first.press("Enter")
    least = min(strategies, key=lambda each: float(each["memory_gib"]["total"]))
    page.page.locator("tbody button").first.press("Enter")
    assert shown(page).items() <= least["parallel"].items()
