"""The house as data: the project's Python files, the rooms that hold them, who imports whom, and what breaks a rule.

A room is a folder of Python files; a file that lies directly in `parallel3d/` is a room of its own. The order of the
rooms and which of them do without torch are read from the table in CONTRIBUTING.md. `tests/test_house.py` asserts that
no rule is broken; `python tests/house.py [PATH]` prints every broken rule below a path. Nothing here imports the
project: every file is read as text and as a syntax tree.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("models", "recipes", "tools")  # the folders that parallel3d/ links to
MOST_FILES = 12
MORE_FILES = {  # rooms that are a list of like things, in which a reader opens one file
    "parallel3d/layers": 22,  # a file for each layer
}
MOST_ARGUMENTS = 8


@dataclass(frozen=True)
class Finding:
    """One broken rule: where it is, and what to do."""

    path: str
    line: int
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.advice}"


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The path below the project's root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """The name by which the file is imported; a test has its path's."""
        parts = list(self.path.relative_to(ROOT).with_suffix("").parts)
        if parts[0] in LINKED:
            parts.insert(0, "parallel3d")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The room as CONTRIBUTING.md names it, such as `planner/time`, `mesh` or `tools/plan`."""
        if self.path.parent == ROOT / "parallel3d":
            return self.path.stem
        return self.path.parent.relative_to(ROOT).as_posix().removeprefix("parallel3d/")


@cache
def sources(*tops: str) -> tuple[Source, ...]:
    """All Python files below some top folders; each file comes once, by the folder that holds it."""
    found = []
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            below = path.relative_to(ROOT).parts
            if not (below[0] == "parallel3d" and below[1] in LINKED):
                found.append(Source(path, text := path.read_text(), ast.parse(text)))
    return tuple(found)


def product() -> tuple[Source, ...]:
    """Every file that a user installs."""
    return sources("parallel3d", *LINKED)


def everything() -> tuple[Source, ...]:
    """Every file of the product and of the tests."""
    return (*product(), *sources("tests"))


# Imports.


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _statements_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run when a module is imported; a function's body does not."""
    for node in body:
        if _is_for_types(node) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _statements_at_import(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements_at_import(handler.body)


@cache
def _modules() -> dict[str, Source]:
    return {source.module: source for source in product()}


def _targets(node: ast.AST) -> list[str]:
    """Returns the modules that one import statement names; a name inside a module stands for the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [
            inner if (inner := f"{node.module}.{alias.name}") in _modules() else node.module for alias in node.names
        ]
    return []


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """Yields the project's modules that a file imports anywhere in it, types included, each with its line."""
    for node in ast.walk(source.tree):
        for target in _targets(node):
            # `parallel3d` itself is a table of lazy names: to import it is to import nothing else.
            if target in _modules() and target not in (source.module, "parallel3d"):
                yield target, node.lineno


def _strong_components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the sets of two or more nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        queue = [start]
        while queue:
            for node in graph.get(queue.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    queue.append(node)
        return seen

    reach = {node: reached(node) for node in graph}
    components = {
        tuple(sorted({node} | {other for other in reach[node] if node in reach.get(other, ())})) for node in graph
    }
    return [list(component) for component in sorted(components) if len(component) > 1]


@cache
def _import_edges() -> tuple[tuple[Source, Source, int], ...]:
    """Returns (importing file, imported file, line) of every import; the lazy names of `parallel3d` do not count."""
    return tuple(
        (source, _modules()[target], line)
        for source in product()
        if source.module != "parallel3d"
        for target, line in sorted(set(imports(source)))
    )


def file_cycles() -> Iterator[Finding]:
    """Finds files that import each other, directly or by way of others."""
    graph: dict[str, set[str]] = {}
    for source, target, _ in _import_edges():
        graph.setdefault(source.module, set()).add(target.module)
    for component in _strong_components(graph):
        for source, target, line in _import_edges():
            if {source.module, target.module} <= set(component):
                advice = f"it imports {target.module}, which leads back here: break the circle"
                yield Finding(source.name, line, advice)


def room_cycles() -> Iterator[Finding]:
    """Finds rooms that import each other, directly or by way of others."""
    graph: dict[str, set[str]] = {}
    for source, target, _ in _import_edges():
        if source.room != target.room:
            graph.setdefault(source.room, set()).add(target.room)
    for component in _strong_components(graph):
        for source, target, line in _import_edges():
            if source.room != target.room and {source.room, target.room} <= set(component):
                yield Finding(
                    source.name, line, f"{source.room}/ imports {target.room}/, which leads back: break the circle"
                )


@dataclass(frozen=True)
class Floor:
    """One row of CONTRIBUTING's table: rooms that stand side by side."""

    rooms: tuple[str, ...]
    without_torch: bool


@cache
def floors() -> tuple[Floor, ...]:
    """Reads the table of rooms in CONTRIBUTING.md, ground first."""
    rows = re.findall(r"^\| *\d+ *\|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    columns = [row.split("|") for row in rows]
    return tuple(Floor(tuple(re.findall(r"`([\w/]+)`", row[0])), "no torch" in row[-1]) for row in columns)


def order_of_rooms() -> Iterator[Finding]:
    """Finds imports of a room on the same floor or above, and rooms that the table lacks or that are gone."""
    floor_of = {room: floor for floor, row in enumerate(floors()) for room in row.rooms}
    rooms = {source.room for source in product() if source.path.name != "__init__.py"}
    for room in sorted(rooms - set(floor_of)):
        yield Finding("CONTRIBUTING.md", 1, f"the table of rooms lacks `{room}`: add it to the floor where it belongs")
    for room in sorted(set(floor_of) - rooms):
        yield Finding("CONTRIBUTING.md", 1, f"the table of rooms names `{room}`, which does not exist: delete it there")
    for source, target, line in _import_edges():
        if source.room == target.room or not {source.room, target.room} <= set(floor_of):
            continue
        if floor_of[target.room] >= floor_of[source.room]:
            advice = f"{source.room} may import only the floors below its own, and {target.room} is not: move one"
            yield Finding(source.name, line, advice)


def torch_at_import() -> Iterator[Finding]:
    """Finds files of rooms without torch whose import imports torch, directly or by way of others."""
    imported: dict[str, set[str]] = {}
    for module, source in _modules().items():
        names = {target for node in _statements_at_import(source.tree.body) for target in _targets(node)}
        parents = {name.rsplit(".", n)[0] for name in names for n in range(1, name.count(".") + 1)}
        imported[module] = {name for name in names | parents if name in _modules() or name.split(".")[0] == "torch"}
    heavy: dict[str, str] = {
        module: "torch" for module, names in imported.items() if any(n[:5] == "torch" for n in names)
    }
    changed = True
    while changed:
        by_way_of = {
            module: min(names & set(heavy))
            for module, names in imported.items()
            if module not in heavy and names & set(heavy)
        }
        heavy |= by_way_of
        changed = bool(by_way_of)
    free = {"__init__"} | {room for floor in floors() if floor.without_torch for room in floor.rooms}
    for module, cause in sorted(heavy.items()):
        source = _modules()[module]
        if source.room in free:
            yield Finding(
                source.name, 1, f"it imports torch by way of {cause}: import that inside the function that needs it"
            )


# Names and sizes.


def crowded_folders() -> Iterator[Finding]:
    """Finds folders of more than a dozen Python files, `__init__.py` not counted."""
    folders: dict[str, int] = {}
    for source in product():
        if source.path.name != "__init__.py":
            folder = source.path.parent.relative_to(ROOT).as_posix()
            folders[folder] = folders.get(folder, 0) + 1
    for folder, count in sorted(folders.items()):
        if count > (most := MORE_FILES.get(folder, MOST_FILES)):
            yield Finding(folder, 1, f"it has {count} Python files, {most} at most: merge some, or make a room")


def modules_named_as_their_folder() -> Iterator[Finding]:
    """Finds `x/x.py`, which no reader can tell from `x/__init__.py`."""
    for source in product():
        if source.path.stem == source.path.parent.name:
            yield Finding(source.name, 1, "it has its folder's name: name it for what is in it")


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_signatures() -> Iterator[Finding]:
    """Finds functions of more than eight arguments; `self`, `cls` and an autograd function's `ctx` do not count."""
    for source in product():
        for node in _functions(source):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls", "ctx") for argument in arguments)
            if count > MOST_ARGUMENTS:
                advice = f"{node.name} takes {count} arguments, {MOST_ARGUMENTS} at most: pass one object"
                yield Finding(source.name, node.lineno, advice)


def classes_named_twice() -> Iterator[Finding]:
    """Finds class names that two files define; a leading underscore makes no difference."""
    places: dict[str, list[tuple[str, int]]] = {}
    for source in product():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append((source.name, node.lineno))
    for name, where in sorted(places.items()):
        if len({path for path, _ in where}) > 1:
            for path, line in where:
                others = ", ".join(other for other, _ in where if other != path)
                yield Finding(path, line, f"class {name} is defined in {others}, too: give it a name of its own")


_OF_PYTHON = {
    "_replace",
    "_asdict",
    "_fields",
    "_exit",
    "_current_frames",
    "_ArgumentGroup",
    "_SubParsersAction",
}  # also private, not torch's


def private_torch_names() -> Iterator[Finding]:
    """Finds names of torch with a leading underscore outside `parallel3d/torch_private.py`.

    An attribute with a leading underscore belongs to another library where no file of the project defines that name.
    """
    own = set(_OF_PYTHON)
    for source in product():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                own.add(node.attr)
    for source in product():
        if source.name == "parallel3d/torch_private.py" or "bench/peers" in source.name:
            continue
        for node in ast.walk(source.tree):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [
                    part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")
                ]
            elif isinstance(node, ast.Attribute) and (node.attr not in own or ast.unparse(node).startswith("torch.")):
                names = [node.attr]
            for name in names:
                if name.startswith("_") and not name.startswith("__"):
                    advice = f"{name} is private to torch: give it a function in parallel3d/torch_private.py"
                    yield Finding(source.name, node.lineno, advice)


# English.

# A docstring or comment that begins so has lost its subject. "Where x, y" is a sentence, "Where x." is not.
_DOCSTRING_BEGINS_BADLY = re.compile(r"(Of|Likewise|And|Those|Or|Whose|Where [^,]*?[.;:])(\s|$)", re.IGNORECASE)
_COMMENT_BEGINS_BADLY = re.compile(r"(Of|Likewise:?|And|Those|Or)(\s|$)", re.IGNORECASE)
_IS_NONE = re.compile(r"(?<![Tt]here )\b(is|are|was|were) none\b")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_AUXILIARIES = _words(
    "is are was were be been has have had do does did can may must will would should could cannot need let go make give"
)
# Words that end in -s and are hardly ever verbs. Any other word in -s passes for the third person of a verb.
_NOUNS = _words(
    """its this as ranks parameters stages bytes seconds gradients names s tensors rows numbers microbatches blocks
    layers weights files replicas axis tokens matrices ids logits processes batches axes parts schedules keys others
    times layouts ones strategies models heads labels losses shapes devices positions sequences features units
    collectives values products kernels cases checkpoints bits inputs buckets metrics synchronous norms sizes columns
    workers pipes groups backwards forwards nodes themselves activations modules ours options checksums settings ways
    documents bias neighbours outputs clusters measurements words totals places lines recipes https users safetensors
    corpus samples indices elements zeros lengths eps errors optimizers messages actions docs multiples fields figures
    results pictures timelines cards commands formulas always divisors rules dataclasses alternatives hints dicts
    scalars lists alias buffers cells xs functions dims queries angles cos probabilities contiguous cpus gpus params
    flops logarithms threads frameworks definitions papers plus slices cores engines floats processors tiers iterations
    alls spans pixels bars fragments parsers networks analysis arguments medians benchmarks curves sections arrays
    causes objects particulars scripts amounts powers gbps us dollars meshes biases programs mlps regions owners hosts
    pipelines embeddings referees transformers scalings views pages operators generators builders pairs copies states
    operations"""
)
# A function's docstring may begin with a command, as in "Compare the losses."
_COMMANDS = _words(
    """add build call check compare compute convert copy count cut derive draw fill find free gather give hold keep
    load make mark measure name pack parse place print put raise read record reduce refuse register release replace
    report return run save scale see send set shard show simulate split start step stop sum take tell train turn
    undo wait walk write yield"""
)


def _has_verb(sentence: str) -> bool:
    """Tells whether a sentence may have a finite verb; where that is unclear, it has."""
    words = [word.lower() for word in re.findall(r"[A-Za-z][A-Za-z']*", re.sub(r"`[^`]*`|\[[^\]]*\]", " ", sentence))]
    return bool(words) and (
        words[0] in _COMMANDS | {"copies", "lists", "names", "places", "orders", "groups"}
        or any(word in _AUXILIARIES or (re.search(r"[^s']s$", word) and word not in _NOUNS) for word in words)
    )


def _is_a_noun(node: ast.AST) -> bool:
    """Tells whether a noun phrase describes a definition well enough: a class, a property or a fixture is a thing."""
    decorators = " ".join(ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))
    return not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or bool(
        re.search(r"property|fixture", decorators)
    )


def docstrings() -> Iterator[Finding]:
    """Finds docstrings that are no sentence, as far as that can be told."""
    for source in everything():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = ast.get_docstring(node)
            if not text:
                continue
            line = node.body[0].lineno
            first = re.split(r"(?<=[.!?])\s|\n\n", text)[0]
            if _DOCSTRING_BEGINS_BADLY.match(text):
                yield Finding(source.name, line, f"the docstring {first!r} begins without a subject: write a sentence")
            elif _IS_NONE.search(text):
                yield Finding(source.name, line, f"the docstring {first!r} says 'is none': say what the thing is")
            elif not _is_a_noun(node) and not _has_verb(first):
                yield Finding(
                    source.name, line, f"the docstring {first!r} has no verb: say what {node.name} does or returns"
                )


def comments() -> Iterator[Finding]:
    """Finds comments that begin without a subject; a line that goes on with a comment above is not a beginning."""
    for source in everything():
        last_line = 0
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type != tokenize.COMMENT:
                continue
            goes_on = token.start[0] == last_line + 1
            last_line = token.start[0]
            text = token.string.lstrip("# ")
            if not goes_on and _COMMENT_BEGINS_BADLY.match(text):
                yield Finding(source.name, token.start[0], f"the comment {text!r} begins without a subject: add one")
            elif _IS_NONE.search(text):
                yield Finding(source.name, token.start[0], f"the comment {text!r} says 'is none': say what it is")


RULES = {
    rule.__name__: rule
    for rule in (
        docstrings,
        comments,
        file_cycles,
        room_cycles,
        order_of_rooms,
        torch_at_import,
        crowded_folders,
        modules_named_as_their_folder,
        long_signatures,
        classes_named_twice,
        private_torch_names,
    )
}


def main(below: str = "") -> int:
    """Prints what breaks a rule below a path, and how often each rule is broken; returns the exit status."""
    total = 0
    for name, rule in RULES.items():
        findings = [finding for finding in rule() if finding.path.startswith(below)]
        print(f"{name}: {len(findings)}", *findings, sep="\n  ")
        total += len(findings)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
