"""Random trees with runs, exports, folders of tokens and files of other people, and random commands
on them. No file that the commands did not make changes or vanishes; a refused command changes
nothing; none runs code that it only looks at, or ends in a traceback.

python -m tests.test_fuzz_folders FIRST LAST    tries these seeds and prints what is wrong
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from parallel3d.tools.checkpoint import command as checkpoint_command
from parallel3d.tools.data import command as data_command
from parallel3d.tools.launch import command as launch_command
from parallel3d.tools.plan import command as plan_command
from tests.fuzz import RECIPE, Main, call, templates, train

SHORT, LONG = range(12), range(12, 600)
_PLANTED = "from pathlib import Path\nPath(f'{__file__}.ran').touch()\n"
# What torch and others look for beside what is installed: none may come from a folder that is
# looked at.
_MODULES = ("triton.py", "opt_einsum.py", "tabulate.py", "tensorboard.py", "numexpr.py")
_NAMES = (
    *("notes.txt", "config.yaml", "metrics.jsonl", "outcome.json", "config.json", "tokens.json"),
    *("model.safetensors", "manifest.json", "out.idx", "out.bin", "train-00000.bin"),
)
_FOLDERS = (
    *("out", "out.partial", "out.replaced", "run.1", "run.partial", "run/checkpoints", "deep/a"),
)
_STRANGE = ("", ".", "..", "/dev/null", "a\nb", "caf\udce9", "-x", "~", "x" * 300, "new/a/b")
_TEMPLATES = ("run", "export", "tokens", "megatron")
_INJECTED = "x\ntouch PWNED\n#$(touch PWNED)`touch PWNED`'"


def plant(draw: random.Random, here: Path) -> list[Path]:
    """Makes a tree, and returns the paths of the files of other people."""
    here.mkdir()
    for name in draw.sample(_TEMPLATES, draw.randint(1, 4)):
        shutil.copytree(templates() / name, here / draw.choice((name, f"deep/{name}")))
    planted = RECIPE.replace("device: cpu", "device: cpu, callbacks: ['planted:Nothing']")
    texts = {"tiny.yaml": RECIPE, "planted.yaml": planted, "text.txt": "some words\n" * 60}
    texts |= dict.fromkeys((*_MODULES, "planted.py"), _PLANTED)
    for _ in range(draw.randint(0, 6)):
        texts[f"{draw.choice(_FOLDERS)}/{draw.choice(_NAMES)}"] = "precious"
    foreign = []
    for name, text in texts.items():
        path = here / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            foreign.append(path)
    return foreign


def command(draw: random.Random, here: Path) -> tuple[Main, list[str]]:
    """Returns a random command on a tree."""

    def word() -> str:
        """A path as somebody types it."""
        if draw.random() < 0.1:
            return draw.choice(_STRANGE)
        path = draw.choice([here / "new", *sorted(here.rglob("*"))])
        return draw.choice((str(path), os.path.relpath(path, here), f"{path}/"))

    recipe = draw.choice(("tiny.yaml", "planted.yaml", word()))
    kind = draw.choice(("train", "train", "look", "export", "ls", "tokenize", "merge", "plan"))
    if kind == "train":
        resume = draw.choice(("none", "auto", word()))
        return train, ["tiny.yaml", f"run_dir={word()}", f"checkpoint.resume={resume}"]
    if kind == "look":
        looks = ((train, "--print-config"), (launch_command.main, f"--account={_INJECTED}"))
        main, option = draw.choice(looks)
        return main, ["slurm", recipe, option] if main is launch_command.main else [recipe, option]
    if kind == "export":
        more = draw.choice(([], ["--overwrite"]))
        return checkpoint_command.main, ["export", word(), word(), *more]
    if kind == "ls":
        subcommand = draw.choice(("ls", "inspect", "verify", "import"))
        return checkpoint_command.main, [subcommand, word()]
    if kind == "tokenize":
        more = draw.choice(([], ["--format", "megatron"], ["--train-bpe", "270"]))
        inputs = draw.choice(("text.txt", word()))
        return data_command.main, ["tokenize", inputs, "--workers", "1", "--out", word(), *more]
    if kind == "merge":
        return data_command.main, ["merge", word(), "tokens", "--out", word()]
    asked = ["--model", "tiny.yaml", "--gpu", "cpu", "--gpus", "1"]
    return plan_command.main, [*asked, "--emit-recipe", word()]


def snapshot(top: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in top.rglob("*") if path.is_file()}


def faults_of(seed: int) -> list[str]:
    """Returns what is wrong with the answers to the commands of a seed."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-folders-", ignore_cleanup_errors=True) as name:
        here = Path(name).resolve() / "here"
        foreign = plant(draw, here)
        for _ in range(draw.randint(1, 3)):
            main, words = command(draw, here)
            before = snapshot(here)
            with chdir(here):
                answer = call(main, words, encoding=draw.choice(("utf-8", "ascii")))
            after = snapshot(here)
            found = [*answer.faults, *_faults(before, after, foreign, answer.status)]
            if found:
                return [f"seed {seed}: {words} ({answer.status}): {each}" for each in found]
    return []


def _faults(
    before: dict[Path, bytes], after: dict[Path, bytes], foreign: list[Path], status: int
) -> Iterator[str]:
    for path in foreign:
        if after.get(path) != before[path]:
            yield f"changes or loses {path}"
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    ran = [path for path in changed if path.suffix == ".ran"]
    if ran:
        yield f"runs {ran}"
    if status in (2, 3, 65):
        # an outcome.json may say why, and unfinished work of `tokenize` stays
        left = [each for each in changed - set(ran) if ".partial" not in str(each)]
        left = [each for each in left if each.name != "outcome.json" or each in before]
        left = [each for each in left if "__pycache__" not in each.parts]
        if left:
            yield f"is refused and changes {left}"


@pytest.mark.parametrize("seed", SHORT)
def test_commands_touch_nothing_that_they_did_not_make(seed: int) -> None:
    assert faults_of(seed) == []


@pytest.mark.long
def test_commands_touch_nothing_that_they_did_not_make_in_many_trees() -> None:
    assert [fault for seed in LONG for fault in faults_of(seed)] == []


if __name__ == "__main__":
    for each_seed in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
        for each_fault in faults_of(each_seed):
            print(each_fault.replace("\n", " | "), flush=True)
