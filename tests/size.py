"""Measures the size of the code in tokens, and compares it with the budgets.

    python tests/size.py          the table of packages and budgets; exits with 1 above a budget

A token is what Python's tokenizer yields, without comments, docstrings and line ends, so that
neither long lines nor short names change the count. An f-string is one token, as in Python 3.11.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("parallel3d", "models", "recipes", "tools", "tests")
LINKS = ("models", "recipes", "tools")  # parallel3d/ has a symbolic link to each
NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
BUDGETS = {
    "core without planner": 139_500,
    "planner": 44_800,
    "tools, shipped": 58_600,
    "tools/bench": 22_000,
    "models, recipes": 9_000,
    "tests": 222_000,
}
MOST_TOKENS_PER_LINE = 8.5


def count(path: Path) -> tuple[int, int]:
    """Returns the tokens of a file, and its lines that hold code."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    tokens, lines = 0, set()
    depth = 0  # of nested f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if token.type not in NOT_COUNTED and token.start not in docstrings:
            tokens += depth == 0
            lines.update(range(token.start[0], token.end[0] + 1))
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return tokens, len(lines)


def group_of(package: str) -> str:
    """Returns the budget that a package counts for."""
    if package == "tools/bench":
        return "tools/bench"
    if package == "parallel3d/planner":
        return "planner"
    top = package.partition("/")[0]
    return {
        "parallel3d": "core without planner",
        "tools": "tools, shipped",
        "models": "models, recipes",
        "recipes": "models, recipes",
    }.get(top, "tests")


def main() -> int:
    packages: dict[str, Counter[str]] = {}
    groups = {name: Counter[str]() for name in BUDGETS}
    for top in TOPS:
        for path in (ROOT / top).rglob("*.py"):
            folders = path.relative_to(ROOT).parts[:-1]
            if top == "parallel3d" and folders[1:2] and folders[1] in LINKS:
                continue
            package = "/".join(folders[:2])
            tokens, lines = count(path)
            for counter in (packages.setdefault(package, Counter()), groups[group_of(package)]):
                counter.update(tokens=tokens, lines=lines)
    for package, counter in sorted(packages.items()):
        print(row(package, counter))
    is_over = False
    for group, counter in groups.items():
        print(f"{row(group, counter)}   at most {BUDGETS[group]:,}")
        is_over |= counter["tokens"] > BUDGETS[group]
        is_over |= counter["tokens"] > MOST_TOKENS_PER_LINE * counter["lines"]
    if is_over:
        words = f"above a budget, or {MOST_TOKENS_PER_LINE} tokens a line; something has to go"
        print(f"error: the code is {words}", file=sys.stderr)
    return int(is_over)


def row(name: str, counter: Counter[str]) -> str:
    tokens, lines = counter["tokens"], counter["lines"]
    return f"{name:<24}{tokens:>9,} tokens {lines:>7,} lines {tokens / lines:>5.1f} a line"


if __name__ == "__main__":
    sys.exit(main())
