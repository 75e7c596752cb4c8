"""Reports of runs in a headless browser: charts, mouse, keyboard, narrow screens, both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel3d.tools.report.command import main
from tests.browser import NARROW, WIDE, Page, browser
from tests.report_runs import EVIL, line, resumed_run, write_run

__all__ = ["browser"]  # A fixture.

# Pixels at a loss of 30 next to step 3,333 in the color of the curve. The grid is gray.
_BLUE_PIXELS_NEAR_THE_SPIKE = """(() => {
    const plot = look.charts[0].plot;
    const x = Math.round(plot.valToPos(3333, "x", true));
    const y = Math.round(plot.valToPos(30, "y", true));
    const pixels = plot.ctx.getImageData(x - 2, y, 5, 1).data;
    let found = 0;
    for (let at = 0; at < pixels.length; at += 4) found += pixels[at + 2] > pixels[at] + 50;
    return found;
})()"""
_LIMITS = "look.charts.map(chart => [chart.plot.scales.x.min, chart.plot.scales.x.max])"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert main([str(resumed_run(folder / "run")), "--gpu", "h100"]) == 0
    return folder / "run" / "report.html"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("both")
    first = resumed_run(folder / "a")
    name = EVIL[0].replace("/", "|") + EVIL[1]
    second = write_run(folder / name, [line(1), line(30)])
    file = folder / "both.html"
    assert main([str(first), str(second), "-o", str(file)]) == 0
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [NARROW, WIDE])
@pytest.mark.parametrize(
    "name, charts",
    [
        ("report", 9),
        ("both", 12),
    ],
)
def test_every_chart_is_drawn_and_nothing_is_wrong(
    browser: Any,
    request: pytest.FixtureRequest,
    name: str,
    charts: int,
    viewport: dict[str, int],
    scheme: str,
) -> None:
    file = request.getfixturevalue(name)
    page = Page(browser, file, viewport=viewport, color_scheme=scheme)
    assert page.js("look.charts.length") == charts
    assert page.charts_are_drawn()
    page.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.widest() <= viewport["width"]
    assert page.axe() == []
    assert page.problems == []
    brightness = page.js(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (sum(brightness) < 200) == (scheme == "dark")


def test_hover_and_arrow_keys_show_the_values_of_a_step(browser: Any, report: Path) -> None:
    page = Page(browser, report)
    first = page.page.locator("figure").first
    legend = first.locator(".legend")
    box = first.locator(".u-over").bounding_box()
    page.page.mouse.move(box["x"] + 2, box["y"] + 40)
    assert "step 1" in legend.inner_text()
    assert "5.669" in legend.inner_text()
    page.page.mouse.move(0, 0)
    first.locator(".chart").focus()
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowRight")
    assert "step 2" in legend.inner_text()


def test_mouse_and_keyboard_zoom_all_charts_and_reset_them(browser: Any, report: Path) -> None:
    page = Page(browser, report)
    full = page.js(_LIMITS)
    box = page.page.locator(".u-over").first.bounding_box()
    y = box["y"] + 50
    quarter = box["width"] / 4
    mouse = page.page.mouse
    mouse.move(box["x"] + quarter, y)
    mouse.down()
    mouse.move(box["x"] + 2 * quarter, y, steps=4)
    mouse.up()
    for low, high in page.js(_LIMITS):
        assert 20 < low < 26
        assert 43 < high < 48
    mouse.dblclick(box["x"] + quarter, y)
    assert page.js(_LIMITS) == full
    mouse.move(0, 0)
    keyboard = page.page.keyboard
    page.page.locator(".chart").nth(1).focus()
    keyboard.press("+")
    assert page.js(_LIMITS) != full
    keyboard.press("0")
    assert page.js(_LIMITS) == full


def test_a_series_and_a_kind_of_mark_can_be_hidden(browser: Any, report: Path) -> None:
    page = Page(browser, report)
    picture = "look.charts[0].plot.ctx.canvas.toDataURL()"
    before = page.js(picture)
    button = page.page.locator(".legend button").first
    button.press("Enter")
    assert page.js("look.charts[0].plot.series[1].show") is False
    button.press("Enter")
    page.page.get_by_label("skipped steps").uncheck()
    page.js("new Promise(done => requestAnimationFrame(done))")
    assert page.js(picture) != before


def test_the_table_of_events_sorts_and_filters_by_mouse_and_keyboard(
    browser: Any,
    report: Path,
) -> None:
    page = Page(browser, report)
    rows = page.page.locator("details[open] tbody tr:visible")
    assert rows.count() == 8
    head = page.page.get_by_role("button", name="step", exact=True)
    head.click()
    head.press("Enter")
    assert rows.first.inner_text().startswith("81")
    page.page.get_by_label("Filter").first.press_sequentially("skipped 72")
    assert rows.count() == 1
    assert "1 of 8" in page.page.get_by_role("status").first.inner_text()


def test_another_cause_can_be_chosen_for_the_spread(browser: Any, report: Path) -> None:
    page = Page(browser, report)
    page.page.locator("select").select_option("data")
    assert page.js("look.charts.length") == 9
    spread = page.page.locator("figure", has_text="Spread over ranks")
    assert "5.992 ms" in spread.locator(".legend").inner_text()
    assert page.problems == []


def test_a_spike_of_one_step_is_visible_at_every_width(browser: Any, tmp_path: Path) -> None:
    lines = [line(step, loss=40.0 if step == 3_333 else 2.0) for step in range(1, 9_000)]
    assert main([str(write_run(tmp_path / "run", lines))]) == 0
    file = tmp_path / "run" / "report.html"
    for width in (390, 700, 1200):
        page = Page(browser, file, viewport={"width": width, "height": 800})
        assert page.js("look.charts[0].plot.scales.y.max") > 40
        assert page.js(_BLUE_PIXELS_NEAR_THE_SPIKE) > 0
