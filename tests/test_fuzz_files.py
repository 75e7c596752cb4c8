"""Files of every format that is read, changed by chance: each is read, or refused in words. No
command ends in a traceback, runs code from a file, changes what it reads, or prints what steers a
terminal.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel3d.tools.checkpoint import command as checkpoint_command
from parallel3d.tools.data import command as data_command
from parallel3d.tools.launch import command as launch_command
from parallel3d.tools.plan import command as plan_command
from tests.fuzz import Main, call, templates, train

# mutations of each format
SHORT = 3
LONG = 200
_PICKLE = b"cposix\nsystem\n(S'touch canary'\ntR."
_VALUES = (
    *(
        "../x",
        "/etc/passwd",
        "..",
        "",
        "\0",
        "x" * 5_000,
        "\x1b[31m",
        "a\nb",
        "\ud800",
        "triton.py",
    ),
    *(-1, 0, 2**31, 2**64, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *(None, True, [], {}, [[]], {"a": {}}, "1e9", [None], ["x"] * 1000),
)
_BYTES = (
    *(b'"', b"[" * 200_000, b'{"a":' * 500, b"\0", b"\n", b"&a *a ", b"!!python/name:os.system "),
    *(b"9" * 5_000, b"NaN", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J", _PICKLE),
)


def _text_of(tree: Any) -> bytes:
    return json.dumps(tree, default=str).encode()


@dataclass(frozen=True)
class Format:
    """A format of files: one of the `templates`, and the commands that read it. In their words
    {file} and {folder} stand for it, and {out} for an output. `load` and `dump` turn it into a
    tree."""

    file: str
    commands: tuple[tuple[Main, str], ...]
    load: Callable[[bytes], Any] | None = json.loads
    dump: Callable[[Any], bytes] = _text_of


def _checkpoint(*words: str) -> tuple[tuple[Main, str], ...]:
    return tuple((checkpoint_command.main, each) for each in words)


def _data(*words: str) -> tuple[tuple[Main, str], ...]:
    return tuple((data_command.main, each) for each in words)


_TOKENIZE = "tokenize {file} --workers 1 --out {out}"
_STEP = "run/checkpoints/step_00000002"
_MEMORY = "memory --model {file} --gpu h100 --layout tp=2 --seq-len 128 --global-batch 8"
FORMATS: dict[str, Format] = {
    "recipe": Format(
        "tiny.yaml",
        ((train, "{file} --print-config"), (launch_command.main, "k8s {file}")),
        yaml.safe_load,
    ),
    "manifest": Format(
        f"{_STEP}/manifest.json",
        _checkpoint("inspect {folder}", "verify {folder}", "export {folder} {out}"),
    ),
    "tokens.json": Format(
        "tokens/tokens.json",
        _data("inspect {folder}", "check {folder}", "merge {folder} {folder} --out {out}"),
    ),
    "tokenizer.json": Format("tokens/tokenizer.json", _data("check {folder}")),
    "safetensors index": Format(
        "export/model.safetensors.index.json", _checkpoint("import {folder}")
    ),
    "config.json": Format(
        "export/config.json", (*_checkpoint("import {folder}"), (plan_command.main, _MEMORY))
    ),
    "metrics": Format(
        "run/metrics.jsonl",
        ((plan_command.main, "compare {folder} --gpu cpu"),),
        None,
    ),
    "text": Format("text.txt", _data(_TOKENIZE), None),
    "gz": Format("text.txt.gz", _data(_TOKENIZE), None),
    "jsonl": Format("lines.jsonl", _data(_TOKENIZE), None),
}


def _mutate(draw: random.Random, content: bytes, form: Format) -> bytes:
    """Returns the content of a file, changed as a tree or as bytes."""
    if form.load is not None and draw.random() < 0.6:
        tree = form.load(content)
        for _ in range(draw.choice((1, 1, 2))):
            places = list(_places(tree))
            inside, key = draw.choice(places) if places else (None, None)
            kind = draw.choice(("value", "value", "drop", "name", "nest"))
            if inside is None:
                break
            if kind == "drop":
                del inside[key]
            elif kind == "name" and isinstance(inside, dict):
                inside[str(draw.choice(_VALUES))] = inside.pop(key)
            elif kind == "nest":
                inside[key] = [[[inside[key]]]]
            else:
                inside[key] = deepcopy(draw.choice(_VALUES))
        return form.dump(tree)
    at = draw.randint(0, len(content))
    end = at + draw.choice((0, 1, 8, 1_000))
    middle = draw.choice((b"", draw.randbytes(3), draw.choice(_BYTES), content[at:end] * 3))
    return content[:at] + middle + draw.choice((content[end:], content[end:], b""))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each container of a tree with each of its keys."""
    keys: Any = ()
    if isinstance(tree, dict | list):
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _templates() -> Path:
    made = templates()
    text = (made / "text.txt").read_bytes()
    (made / "text.txt.gz").write_bytes(gzip.compress(text))
    (made / "lines.jsonl").write_bytes(b'{"text": "some words", "id": 1}\n' * 20)
    return made


def faults_of(name: str, seed: int) -> list[str]:
    """Returns what is wrong with the answers to the mutation of a seed."""
    form = FORMATS[name]
    draw = random.Random(f"{name} {seed}")
    with tempfile.TemporaryDirectory(prefix="fuzz-files-") as at:
        original = _templates() / form.file
        folder = Path(at).resolve() / "step_00000002"
        if original.parent == templates():
            folder.mkdir()
            shutil.copy(original, folder)
        else:
            shutil.copytree(original.parent, folder)
        file = folder / original.name
        file.write_bytes(_mutate(draw, file.read_bytes(), form))
        return [f"{name} {seed}: {fault}" for fault in _faults(form, folder, file)]


def _faults(form: Format, folder: Path, file: Path) -> Iterator[str]:
    out = folder.with_name("out")
    before = _files(folder)
    for main, words in form.commands:
        with chdir(folder):
            filled = words.format(file=file, folder=folder, out=out).split()
            answer = call(main, filled)
        for fault in answer.faults:
            yield f"{words} ({answer.status}): {fault}"
        shutil.rmtree(out, ignore_errors=True)
    if _files(folder) != before:
        yield "changes what it reads"


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_read_or_refused_in_words(name: str) -> None:
    assert [fault for seed in range(SHORT) for fault in faults_of(name, seed)] == []


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_many_changed_files_are_read_or_refused_in_words(name: str) -> None:
    assert [fault for seed in range(SHORT, LONG) for fault in faults_of(name, seed)] == []
