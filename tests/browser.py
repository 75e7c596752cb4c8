"""A headless Chromium for tests of HTML reports. The tests skip with the reason without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
NARROW = {"width": 390, "height": 844}
WIDE = {"width": 1200, "height": 900}
_NOT_BLANK = """canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colors = new Set();
    for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3]) colors.add(pixels[at]);
    return colors.size > 4;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        yield launched
        launched.close()


class Page:
    """A page that was opened from disk. Collects the errors of its console and its requests."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": WIDE, **options})
        self.problems: list[str] = []
        add = self.problems.append
        self.page.on("console", lambda message: add(message.text))
        self.page.on("pageerror", lambda error: add(str(error)))
        self.page.on("request", lambda request: add(request.url))
        self.page.on("dialog", lambda dialog: add(dialog.message))
        self.page.goto(file.as_uri())
        assert self.problems.pop(0) == file.as_uri()

    def js(self, code: str) -> Any:
        return self.page.evaluate(code)

    def charts_are_drawn(self) -> bool:
        canvases = self.page.query_selector_all("canvas")
        return bool(canvases) and all(canvas.evaluate(_NOT_BLANK) for canvas in canvases)

    def widest(self) -> float:
        """Returns the right edge of the widest element in pixels, even within scrollable ones."""
        edge = "(most, each) => Math.max(most, each.getBoundingClientRect().right)"
        return float(self.js(f"[...document.querySelectorAll('body *')].reduce({edge}, 0)"))

    def axe(self) -> list[str]:
        """Returns the serious and critical violations that axe-core finds."""
        core = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
        script = Path(core.__file__).with_name("axe.min.js").read_text()
        self.js(script)
        found = self.js("axe.run()")["violations"]
        return [each["id"] for each in found if each["impact"] in ("serious", "critical")]
