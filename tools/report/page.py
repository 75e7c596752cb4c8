"""Builds and writes self-contained HTML files. Each holds its style, scripts and data, and opens
from disk without a network.

All text in HTML goes through `html.escape`. Data cannot end its script element, because each "<" in
it is escaped. The Content-Security-Policy allows only the scripts and styles of the file itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from parallel3d.errors import ConfigError, writing
from parallel3d.launch.run_dir import write_atomically

_FOLDER = Path(__file__).parent
_MARK = '<meta name="generator" content="parallel3d">'  # In the first bytes of each file.


class Number(NamedTuple):
    """Cell of a table that is sorted by `value` and shown as `text`."""

    value: float
    text: str


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str | Number]],
    *,
    filters: bool = False,
) -> str:
    """Returns a table that look.js makes sortable, and with `filters` also searchable.

    Args:
        caption: Caption, as plain text.
        head: Column titles, as plain text.
        rows: Cells of each row, as plain text or numbers.
        filters: Adds a field that filters the rows.
    """
    columns = [f'<th scope="col">{escape(title)}</th>' for title in head]
    marked = ' data-filter=""' if filters else ""
    parts = [f'<table class="data"{marked}><caption>{escape(caption)}</caption>']
    parts.append(f"<thead><tr>{''.join(columns)}</tr></thead><tbody>")
    for row in rows:
        parts.append(f"<tr>{''.join(map(_cell, row))}</tr>")
    return "\n".join([*parts, "</tbody></table>"])


def _cell(cell: str | Number) -> str:
    if isinstance(cell, Number):
        return f'<td class="number" data-value="{cell.value}">{escape(cell.text)}</td>'
    return f"<td>{escape(cell)}</td>"


def page(
    title: str, body: str, data: object, *, scripts: Sequence[str] = (), styles: Sequence[str] = ()
) -> str:
    """Returns a self-contained HTML file.

    Args:
        title: Title, as plain text.
        body: HTML below the title. It must not have inline styles or event handlers.
        data: Data for the scripts, which find it as `look.data`. NaN and infinity are not allowed.
        scripts: Scripts that run after look.js.
        styles: Style sheets after look.css.
    """
    licence = _asset("uplot/LICENSE").strip()
    library = f"/*\n{licence}\n*/\n{_asset('uplot/uPlot.iife.min.js')}"
    every_script = [library, _asset("look.js"), *scripts]
    every_style = [_asset("uplot/uPlot.min.css"), _asset("look.css"), *styles]
    policy = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, every_script))}",
        f"style-src {' '.join(map(_hash, every_style))}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        _MARK,
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        *(f"<style>{style}</style>" for style in every_style),
        f"</head><body><main>\n{body}\n</main>",
        f'<script type="application/json" id="data">{text}</script>',
        *(f"<script>{script}</script>" for script in every_script),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def write_page(path: Path, html: str) -> None:
    """Writes a report atomically. Replaces an earlier report, but no other file.

    Raises:
        ConfigError: The path is a folder, or a file that is not a report.
        SaveError: The file cannot be written.
    """
    with writing(path):
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; try {path / 'report.html'}")
        if path.exists() and not is_page(path):
            raise ConfigError(f"{path}: exists already and is not a report; try another path")
        write_atomically(path, html)


def is_page(path: Path) -> bool:
    """Returns True if `page` built the content of a file, or if the file is empty."""
    if not path.is_file():  # For example a device or a pipe.
        return False
    with path.open("rb") as file:
        head = file.read(1000)
    return not head or _MARK.encode() in head


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns the source of a script or style for the Content-Security-Policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
