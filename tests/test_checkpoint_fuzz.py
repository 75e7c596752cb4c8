"""Checkpoints and recipes that somebody has forged: whatever stands in them, a resume either loads numbers or says in
words what is wrong. No code runs, no file outside the folder is opened, and memory stays what it was.

A mutation that leaves the checksums as they were is found by them, so most mutations here set them right."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parallel3d
from parallel3d import recipes
from parallel3d.checkpoint.manifest import MANIFEST_FILE
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import CheckpointConfig, LoggingConfig, ModelConfig, OptimizerConfig, Recipe, TrainConfig
from parallel3d.errors import CheckpointError, ConfigError, Parallel3dError
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.launch.run_dir import locked
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class, shape_cards
from parallel3d.training.state import load_trainer
from parallel3d.training.trainer import Trainer

RECIPE = Recipe(
    model=ModelConfig(layers=1, hidden=16, heads=2, ffn_hidden=32, vocab=264),
    train=TrainConfig(steps=2, global_batch_size=2, seq_len=16, device="cpu"),
    optimizer=OptimizerConfig(warmup_steps=1),
    checkpoint=CheckpointConfig(every=2),
    logging=LoggingConfig(every=1),
)
# `make test-long` tries 10,000 mutations.
IS_LONG = settings.default.max_examples > 100
OF_CHECKPOINTS, OF_CONFIGS = (
    settings(max_examples=8_000 if IS_LONG else 40),
    settings(max_examples=2_000 if IS_LONG else 20),
)
MOST_BYTES = 500 << 20
CANARY = "parallel3d_fuzz_canary"
PICKLES = [
    f"cposix\nsystem\n(S'touch {CANARY}'\ntR.".encode(),
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x1ctouch " + CANARY.encode() + b"\x85R.",
    b'cbuiltins\neval\n(S\'__import__("os").mkdir("' + CANARY.encode() + b"\")'\ntR.",
]
NAMES = ["../x", "/etc/passwd", "a/b", "..", ".", "\0", "", "x" * 5_000, "\x1b[31m", "\n", "CON", "é", "manifest.json"]
NUMBERS = [-1, 0, 2**31, 2**62 - 1, -(2**62) + 1, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"), float("inf")]
TOKENS = [
    *(bytes([each]) for each in b'[]{},:"\\0-\n'),
    b"9" * 5_000,
    b"1e999",
    b"&a ",
    b"*a",
    b"!!python/name:os.system ",
]
LEAVES = st.sampled_from([*NAMES, *NUMBERS, None, True, "[]", "model.embedding.weight", "ffffffff", "float64", "int64"])
VALUES = st.recursive(
    st.one_of(LEAVES, st.integers(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.sampled_from([*NAMES, "step"]), inner)),
    max_leaves=10,
)


_IMPORTED = (sys.prefix, sys.base_prefix, str(Path(parallel3d.__file__).parents[1]))  # modules, which Python opens late


class Watch:
    """Hears from Python itself, by an audit hook, which files are opened or changed and what is run."""

    def __init__(self) -> None:
        self.folder: str | None = None  # what may be touched; None: nothing is watched
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open" and not str(arguments[0]).startswith((self.folder, *_IMPORTED)):
            self.seen.append(f"{event} {arguments[0]}")
        elif event.startswith(("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "socket.connect")):
            self.seen.append(event)
        elif event.startswith(("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "shutil")):
            self.seen.append(f"{event} {arguments[0]}")

    @contextmanager
    def only(self, folder: Path) -> Iterator[None]:
        self.folder, self.seen = str(folder), []
        try:
            yield
        finally:
            self.folder = None
        assert self.seen == []


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with its checkpoint."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    recipe = replace(RECIPE, run_dir=str(folder))
    with locked(folder):
        recipes.work(recipe, _place(folder.parent / "store"))
    return folder


def _place(store: Path) -> Rendezvous:
    return Rendezvous(rank=0, local_rank=0, world_size=1, local_world_size=1, init_method=f"file://{store}")


@pytest.fixture(scope="module")
def trainer(run_dir: Path) -> Iterator[Trainer]:
    """What resumes."""
    with process_group(RECIPE, _place(run_dir.parent / "another_store")) as device:
        mesh = build_mesh(RECIPE.parallel, "cpu")
        yield Trainer(RECIPE, mesh=mesh, device=device, model_class=model_class(RECIPE.model.architecture))


def places(tree: object) -> Iterator[tuple[Any, Any]]:
    """Yields each container of a tree with each of its keys."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])  # type: ignore[index]


def mutate_tree(tree: Any, data: st.DataObject) -> None:
    """Changes a value of a tree, or a key, or swaps two values, or drops one; a few times."""
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(tree))
        if not found:
            return
        inside, key = data.draw(st.sampled_from(found))
        kind = data.draw(st.sampled_from(["value", "value", "number", "drop", "name", "swap", "many"]))
        if kind == "value":
            inside[key] = data.draw(VALUES)
        elif kind == "number":
            inside[key] = data.draw(st.sampled_from(NUMBERS))
        elif kind == "drop":
            del inside[key]
        elif kind == "name" and isinstance(inside, dict):
            inside[data.draw(st.sampled_from(NAMES))] = inside.pop(key)
        elif kind == "swap":
            other, at = data.draw(st.sampled_from(found))
            inside[key], other[at] = json.loads(json.dumps([other[at], inside[key]]))
        elif kind == "many":
            value = inside[key]
            inside[key] = [value] * data.draw(st.sampled_from([2, 1_000, 100_000]))
            return


def mutate_bytes(content: bytes, data: st.DataObject) -> bytes:
    """Flips, cuts, inserts or repeats bytes, or puts a pickle or deep nesting among them."""
    at = data.draw(st.integers(0, len(content)))
    end = min(len(content), at + data.draw(st.sampled_from([1, 8, 1_000])))
    kind = data.draw(st.sampled_from(["flip", "cut", "drop", "noise", "insert", "pickle", "nest", "repeat"]))
    if kind == "flip" and at < len(content):
        return content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "drop":
        return content[:at] + content[end:]
    if kind == "noise":
        return content[:at] + data.draw(st.binary(max_size=20)) + content[end:]
    if kind == "insert":
        token = data.draw(st.sampled_from(TOKENS))
        return content[:at] + token + content[at:]
    if kind == "pickle":
        return data.draw(st.sampled_from([b"", content[:at]])) + data.draw(st.sampled_from(PICKLES)) + content[at:]
    if kind == "nest":
        opening = data.draw(st.sampled_from([b"[", b'{"a":', b"- ", b"{a: "]))
        return content[:at] + opening * data.draw(st.sampled_from([5, 500, 20_000])) + content[at:]
    return content[:at] + content[at:end] * data.draw(st.sampled_from([2, 100])) + content[end:]


def sealed(text: bytes) -> bytes:
    """Returns a manifest's text with the checksum that is right for it."""
    body = text.rpartition(b',\n"crc32"')[0] or text
    return body + f',\n"crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def forge(folder: Path, data: st.DataObject) -> None:
    """Mutates one file of a checkpoint."""
    manifest = folder / MANIFEST_FILE
    text = manifest.read_bytes()
    kind = data.draw(st.sampled_from(["tree", "tree", "text", "file", "damage", "neighbour"]))
    if kind == "tree":
        tree = json.loads(text)
        del tree["crc32"]
        mutate_tree(tree, data)
        manifest.write_bytes(sealed(json.dumps(tree).encode()[:-1]))
        return
    if kind == "text":
        manifest.write_bytes(sealed(mutate_bytes(text.rpartition(b',\n"crc32"')[0], data)))
        return
    if kind == "neighbour":
        name = data.draw(st.sampled_from(["extra", "__9_0.distcp", ".metadata.1"]))
        (folder / name).write_bytes(data.draw(st.sampled_from(PICKLES)))
        return
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    file.write_bytes(mutate_bytes(file.read_bytes(), data))
    if kind == "file" and file != manifest:  # with a size and checksums that are right for it
        tree, content = json.loads(text), file.read_bytes()
        del tree["crc32"]
        entry = tree["files"].get(file.name)
        entry |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
        for tensor in tree["tensors"].values():
            for piece in tensor["pieces"]:
                if piece["file"] == file.name:
                    piece["crc32"] = f"{zlib.crc32(content[: piece['at'] + piece['bytes']]):08x}"
        manifest.write_bytes(sealed(json.dumps(tree).encode()[:-1]))


def says_in_words(error: Parallel3dError) -> None:
    """Refuses a message that is empty, floods a terminal, or steers it."""
    message = str(error)
    assert 0 < len(message) < 5_000
    assert all(line.isprintable() for line in message.split("\n")), repr(message)


@OF_CHECKPOINTS
@given(data=st.data())
def test_a_forged_checkpoint_is_loaded_or_refused_in_words(
    run_dir: Path, trainer: Trainer, watch: Watch, data: st.DataObject
) -> None:
    saved, forged = run_dir / "checkpoints" / "step_00000002", run_dir.parent / "forged" / "step_00000002"
    if not forged.exists():  # the first time what is imported late is imported
        shutil.copytree(saved, forged)
        load_trainer(trainer, forged)
    shutil.rmtree(forged)
    shutil.copytree(saved, forged)
    forge(forged, data)
    before = _peak_bytes()
    try:
        with watch.only(forged):
            load_trainer(trainer, forged)
    except CheckpointError as error:
        says_in_words(error)
    assert _peak_bytes() - before < MOST_BYTES
    assert not Path(CANARY).exists()


@OF_CONFIGS
@given(data=st.data())
def test_a_forged_config_of_a_run_is_read_or_refused_in_words(run_dir: Path, watch: Watch, data: st.DataObject) -> None:
    forged, cards = run_dir.parent / "config" / "config.yaml", shape_cards()
    forged.parent.mkdir(exist_ok=True)
    text = (run_dir / "config.yaml").read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        text = mutate_bytes(text, data)
    forged.write_bytes(text)
    before = _peak_bytes()
    try:
        with watch.only(forged.parent):
            load_recipe(forged, cards=cards)
    except ConfigError as error:
        says_in_words(error)
    assert _peak_bytes() - before < MOST_BYTES
    assert not Path(CANARY).exists()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
