"""Builds the documentation site with Sphinx: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import generate

import parallel3d

generate.write_reference()

project, version = "parallel3d", parallel3d.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["reference/generated/*"]  # included by the pages of reference/
default_role = "code"  # single backticks in docstrings are code
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "description"
html_theme = "furo"
html_title = f"parallel3d {version}"
copybutton_prompt_text = "$ "
