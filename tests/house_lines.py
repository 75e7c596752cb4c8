"""The lines of each room, in total and by kind, and the sums that the house has budgets for. `make lint` prints them.

`python tests/house_lines.py [ROOT]` counts the Python files below ROOT, by default this project's. The path of a batch
is every file of which a function runs in one training step of the quickstart (tensor 2 x pipeline 2 x sharded data 2,
`fully_shard`, AdamW, 1F1B, Llama) on any of its eight ranks. `tests/distributed/test_batch_path.py` traces such a step
and compares. A file that a step only imports, or that only builds the trainer, counts for the rest of the core.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BATCH_PATH = frozenset(
    {
        "models/decoder.py",
        "parallel3d/config/attention_kernels.py",
        "parallel3d/host_memory/exchange.py",
        "parallel3d/host_memory/ring.py",
        "parallel3d/host_memory/segment.py",
        "parallel3d/layers/attention.py",
        "parallel3d/layers/collectives.py",
        "parallel3d/layers/dropout.py",
        "parallel3d/layers/fused_attention.py",
        "parallel3d/layers/gradients.py",
        "parallel3d/layers/linear.py",
        "parallel3d/layers/loss.py",
        "parallel3d/layers/mlp.py",
        "parallel3d/layers/norm.py",
        "parallel3d/layers/parameter.py",
        "parallel3d/layers/positions.py",
        "parallel3d/layers/vocabulary.py",
        "parallel3d/optimizers/build.py",
        "parallel3d/pipeline/boundary.py",
        "parallel3d/pipeline/execution.py",
        "parallel3d/pipeline/links.py",
        "parallel3d/pipeline/runtime.py",
        "parallel3d/pipeline/transport.py",
        "parallel3d/schedules/schedule.py",
        "parallel3d/sharding/fully_sharded.py",
        "parallel3d/sharding/optimizer_parts.py",
        "parallel3d/row_split.py",
        "parallel3d/spikes.py",
        "parallel3d/torch_private.py",
        "parallel3d/training/hooks.py",
        "parallel3d/training/loss.py",
        "parallel3d/training/trainer.py",
        "parallel3d/training/update.py",
    }
)
# After the rooms were made the sums were 4,389, 8,264, 5,689 and 6,071. The CUDA path has come since, with `gpu_check`;
# then token files, mixtures, sinks, callbacks and models of others, with `parallel3d-data` and the conformance test;
# then Hugging Face in and out, saves in the background, restarts, and a planner that scores itself on unseen sources;
# then the watch over ranks, spikes and other numbers that go wrong, mixtures in the planner, launchers, `bench faults`.
_BUDGETS = {"path of a batch": 5_700, "rest of the core": 17_700, "planner": 7_600, "tools": 13_500}


def kinds(text: str) -> Counter[str]:
    """Counts the lines of a file: code, docstrings and comments (`words`), blank, and `total`.

    A line that has code and a comment is code; a blank line inside a docstring is part of the docstring.
    """
    lines = text.splitlines()
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            words |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            words.add(token.start[0])
    blank = sum(not line.strip() and number not in words for number, line in enumerate(lines, 1))
    return Counter(total=len(lines), code=len(lines) - len(words) - blank, words=len(words), blank=blank)


def sum_of(name: str) -> str:
    """Returns which of the sums a file belongs to, by its path below the root."""
    if name in BATCH_PATH:
        return "path of a batch"
    top, second = (*name.split("/"), "")[:2]
    if top == "tools":
        return "tools"
    if top == "tests":
        return "tests"
    return "planner" if second == "planner" else "rest of the core"


def main(root: str = str(ROOT)) -> None:
    """Prints a line for each room, then one for each sum beside its budget."""
    rooms: dict[str, Counter[str]] = {}
    sums: dict[str, Counter[str]] = {}
    for path in sorted(Path(root).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] not in ("parallel3d", "models", "recipes", "tools", "tests") or path.is_symlink():
            continue
        if any(name.startswith(f"parallel3d/{link}/") for link in ("models", "recipes", "tools")):
            continue
        counts = kinds(path.read_text())
        rooms.setdefault(name.rpartition("/")[0], Counter()).update(counts)
        sums.setdefault(sum_of(name), Counter()).update(counts)
    print(f"{'room':<32}{'lines':>8}{'code':>8}{'words':>8}{'blank':>8}   (words: docstrings and comments)")
    for name, counts in [*sorted(rooms.items()), ("", Counter()), *sorted(sums.items())]:
        figures = "".join(f"{counts[kind]:>8,}" for kind in ("total", "code", "words", "blank")) if name else ""
        budget = f"   of {_BUDGETS[name]:,}" if name in _BUDGETS else ""
        print(f"{name:<32}{figures}{budget}".rstrip())


if __name__ == "__main__":
    main(*sys.argv[1:])
