"""The site of docs/: `make docs` builds it with Sphinx, from the pages and the docstrings of the
public names."""

from typing import Any

import parallel3d

project, version = "parallel3d", parallel3d.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
default_role = "code"  # what a docstring has in single backticks is code
myst_heading_anchors = 3
# links to files of the repository, which the site does not have
suppress_warnings = ["myst.xref_missing"]
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
html_theme = "furo"
html_title = f"parallel3d {version}"


def keep_indented(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Has the indented lines of a docstring, which are programs and tables, printed as they
    stand."""
    was_indented, kept = False, list[str]()
    for line in lines:
        is_indented = line.startswith(" ") if line else was_indented
        if is_indented != was_indented:
            kept += ["", "::", ""] if is_indented else [""]
        kept.append(line)
        was_indented = is_indented
    lines[:] = kept


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_indented)
