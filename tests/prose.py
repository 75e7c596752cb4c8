"""Counts wordings that readers stumble over, per 1,000 words of each kind of text.

python tests/prose.py            a table of the rates; exits with 1 if one is above prose.toml
python tests/prose.py FILE...    every hit in these files, with words to use instead
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ("parallel3d/", "models/", "recipes/", "tools/")
SETTINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PATTERNS = {re.compile(each, re.MULTILINE): use for each, use in SETTINGS["patterns"]}
HELP = ("help", "description", "epilog", "summary", "does")


def main() -> int:
    if len(sys.argv) > 1:
        for name in sys.argv[1:]:
            for _, text in texts_of(name):
                for match, advice in hits(text):
                    print(f"{name}: {match[0]}  -> {advice}")
        return 0
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    words, found = dict.fromkeys(SETTINGS["most"], 0), dict.fromkeys(SETTINGS["most"], 0)
    for name in listing.stdout.split():
        for kind, text in texts_of(name):
            words[kind] += len(text.split())
            found[kind] += len(hits(text))
    is_over = False
    for kind, most in SETTINGS["most"].items():
        rate = 1000 * found[kind] / max(words[kind], 1)
        print(f"{kind:<13}{words[kind]:>8,} words {rate:>5.1f} hits per 1,000   at most {most}")
        is_over |= rate > most
    if is_over:
        print("error: too many odd wordings; list them by tests/prose.py FILE...", file=sys.stderr)
    return int(is_over)


def hits(text: str) -> list[tuple[re.Match[str], str]]:
    return [(match, use) for pattern, use in PATTERNS.items() for match in pattern.finditer(text)]


def texts_of(name: str) -> list[tuple[str, str]]:
    """Returns the texts of a file of the repository, each with its kind."""
    path = ROOT / name
    if path.is_symlink() or not path.is_file():
        return []
    if name.endswith(".md"):
        kinds = {"README.md": "readme", "CONTRIBUTING.md": "contributing"}
        kind = kinds.get(name, "docs" if name.startswith("docs/") else "contributing")
        return [(kind, running_text(path.read_text()))]
    if not name.startswith(SHIPPED):
        return []
    if name.endswith("commands.toml"):
        options = "|".join(HELP)
        found = re.findall(rf'\b(?:{options})\s*=\s*"([^"]*)"', path.read_text())
        return [("help", text) for text in found]
    return python_texts(path.read_text()) if name.endswith(".py") else []


def running_text(markdown: str) -> str:
    """Returns the sentences and tables of a Markdown file, without code, links and comments."""
    text = re.sub(r"<!--.*?-->|^```.*?^```\s*$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", without_code(text))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "X", text)


def python_texts(source: str) -> list[tuple[str, str]]:
    """Returns the docstrings, comments, errors and help texts of a module."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented):
            texts.append(("docstrings", without_code(ast.get_docstring(node) or "")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts.append(("errors", " ".join(strings_in(node.exc))))
        if isinstance(node, ast.keyword) and node.arg in HELP:
            texts.append(("help", " ".join(strings_in(node.value))))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append(("comments", without_code(token.string)))
    return texts


def strings_in(node: ast.AST) -> list[str]:
    constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


if __name__ == "__main__":
    sys.exit(main())
