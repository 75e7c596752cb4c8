"""Pages of plans in a headless browser: the chart of layouts by mouse and keyboard."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.plan import command
from tests.browser import NARROW, WIDE, Page, browser
from tests.test_plan_html import EXPERTS, PIPELINE, TOO_LARGE, evil_model, page_data

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
@pytest.mark.parametrize("name", ["pipeline", "experts", "too-large", "evil"])
def test_a_page_is_drawn_and_nothing_is_wrong(
    browser: Any, folder: Path, name: str, viewport: Any, scheme: Any
) -> None:
    page = Page(browser, folder / f"{name}.html", viewport=viewport, color_scheme=scheme)
    assert page.charts_are_drawn()
    assert page.widest() <= viewport["width"]
    assert page.axe() == []
    assert page.problems == []


def test_keys_go_through_layouts_and_show_their_section(browser: Any, folder: Path) -> None:
    data = page_data(folder / "pipeline.html")
    page = Page(browser, folder / "pipeline.html")
    best = data["strategies"][0]
    assert ParallelConfig(**shown(page)) == ParallelConfig(**best["parallel"])
    page.page.locator("#priced .chart").focus()
    page.page.keyboard.press("ArrowRight")
    section = shown(page)
    memory = {}
    for index, each in enumerate(data["priced"]["layouts"]):
        memory[index] = each["memory_gib"]
        if each["parallel"] == section:
            found = index
    order = sorted(memory, key=lambda index: memory[index])
    assert order.index(found) == order.index(0) + 1
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
    assert 0 < len(wanted) < len(layouts)
    count = f"{len(wanted)} of {len(layouts)} layouts"
    assert count in page.page.locator("#priced .tools").inner_text()
    points = "look.charts[0].plot.data.slice(1, 4).flat()"
    assert page.js(f"{points}.filter(y => y !== null).length") == len(wanted)
    target = [each for each in wanted if each["fits"]][-1]
    x = page.js(f"look.charts[0].plot.valToPos({target['memory_gib']}, 'x')")
    y = page.js(f"look.charts[0].plot.valToPos({target['tokens_per_s_per_gpu']}, 'y')")
    page.page.locator("#priced .u-over").click(position={"x": x, "y": y})
    assert shown(page) == target["parallel"]


def test_the_table_sorts_filters_and_shows_layouts(browser: Any, folder: Path) -> None:
    strategies = page_data(folder / "experts.html")["strategies"]
    page = Page(browser, folder / "experts.html")
    rows = page.page.locator("table").first.locator("tbody tr:visible")
    assert rows.count() == len(strategies)
    page.page.get_by_role("button", name="GiB", exact=True).first.press("Enter")
    least = min(strategies, key=lambda each: float(each["memory_gib"]["total"]))
    rows.first.get_by_role("button").press("Enter")
    assert shown(page).items() <= least["parallel"].items()
    page.page.get_by_label("Filter").first.fill("every_n")
    kinds = [each["parallel"]["recompute"] for each in strategies]
    assert rows.count() == kinds.count("every_n") > 0
