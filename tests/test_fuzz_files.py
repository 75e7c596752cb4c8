"""Files of every format that is read, changed by chance: each is read, or refused in words. No command ends in a
traceback, runs code, opens or writes a file elsewhere, prints what steers a terminal, or needs memory without bound.

python -m tests.test_fuzz_files FORMAT FIRST [LAST]    tries these seeds of a format and prints what is wrong
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import parallel3d
from parallel3d.config.load import load_recipe
from parallel3d.errors import DamagedCheckpointError, Parallel3dError
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class, shape_cards
from parallel3d.recipes import pretrain
from parallel3d.tools.checkpoint import command as checkpoint_command
from parallel3d.tools.data import command as data_command
from parallel3d.tools.launch import command as launch_command
from parallel3d.tools.plan import command as plan_command
from parallel3d.training.state import load_trainer
from parallel3d.training.trainer import Trainer
from tests.fuzz import Main, call
from tests.test_fuzz_folders import templates

SHORT, LONG = 3, 320  # mutations of each format
_MOST_BYTES = 300 << 20  # that a command may need for such a file
_CANARY = "parallel3d_fuzz_canary"
_PICKLES = (
    f"cposix\nsystem\n(S'touch {_CANARY}'\ntR.".encode(),
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x1ctouch " + _CANARY.encode() + b"\x85R.",
)
_NAMES = (
    *("../x", "/etc/passwd", "a/b", "..", ".", "", "\0", "triton.py", "manifest.json", "x" * 5_000, "\x1b[31m", "a\nb"),
    *("CON", "é", "\ud800", "\u202e", "-x", "{x}", "${HOME}", "%s", "null", "step", "__class__"),
)
_NUMBERS = (-1, 0, 1, 2**31, 2**62, 2**64, 10**30, 10**400, 0.5, 1e308, 1e-320, float("nan"), float("inf"), -0.0)
_VALUES = (*_NAMES, *_NUMBERS, None, True, False, [], {}, [[]], {"a": {}}, "1", "1e9", [None], ["x"], [1, 2], "auto")
_TOKENS = (b'"', b"[", b"]", b"{", b"}", b",", b":", b"\\", b"\0", b"-", b"\n", b"\r", b"#", b"&a ", b"*a", b"\xff\xfe")
_TOKENS += (b"!!python/name:os.system ", b"9" * 5_000, b"1e999", b"NaN", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J")

Command = tuple[Main, tuple[str, ...]]


@dataclass(frozen=True)
class Format:
    """A format of files: `make` writes a good one, with what belongs to it, into a folder and returns its path.
    `commands` read it; in their words {file} and {folder} stand for it, and {out} for an output. `dump` writes a tree
    in the format, and `load` is None for one that is no tree. `seal` mends what only shows that a file has changed."""

    make: Callable[[Path], Path]
    commands: tuple[Command, ...]
    load: Callable[[bytes], Any] | None = json.loads
    dump: Callable[[Any], bytes] = lambda tree: json.dumps(tree, default=str).encode()
    statuses: tuple[int, ...] = (2, 65)
    seal: Callable[[Path], None] = lambda folder: None


# --- mutations


def mutated(draw: random.Random, content: bytes, form: Format) -> bytes:
    """Returns the content of a file, changed: as a tree or as bytes."""
    if form.load is not None and draw.random() < 0.6:
        tree = form.load(content)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            _change_tree(draw, tree)
        return form.dump(tree)
    for _ in range(draw.choice((1, 1, 2, 3))):
        content = _change_bytes(draw, content)
    return content


def _places(tree: object) -> Iterator[tuple[Any, Any]]:
    """Yields each container of a tree with each of its keys."""
    keys: Sequence[Any] = ()
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = range(len(tree))
    for key in keys:
        yield tree, key
        yield from _places(tree[key])  # type: ignore[index]


def _change_tree(draw: random.Random, tree: Any) -> None:
    """Changes, drops, adds, renames, repeats or nests a value of a tree."""
    found = list(_places(tree))
    if not found or len(found) > 10_000:  # made of many already
        return
    inside, key = draw.choice(found)
    kind = draw.choice(("value", "value", "text", "text", "number", "drop", "add", "name", "swap", "many", "nest"))
    if kind == "text":
        texts = [(each, at) for each, at in found if isinstance(each[at], str)] or [(inside, key)]
        inside, key = draw.choice(texts)
        inside[key] = draw.choice(_NAMES)
    elif kind == "value":
        inside[key] = deepcopy(draw.choice(_VALUES))
    elif kind == "number":
        inside[key] = draw.choice(_NUMBERS)
    elif kind == "drop":
        del inside[key]
    elif kind == "add" and isinstance(inside, dict):
        inside[draw.choice(_NAMES)] = deepcopy(draw.choice(_VALUES))
    elif kind == "name" and isinstance(inside, dict):
        inside[draw.choice(_NAMES)] = inside.pop(key)
    elif kind == "swap":
        other, at = draw.choice(found)
        inside[key], other[at] = json.loads(json.dumps([other[at], inside[key]]))
    elif kind == "many":
        inside[key] = [inside[key]] * draw.choice((2, 1_000, 100_000))
    elif kind == "nest":
        inside[key] = _nested(inside[key], draw.choice((3, 50, 200)))


def _nested(value: object, deep: int) -> object:
    for _ in range(deep):
        value = [value]
    return value


def _change_bytes(draw: random.Random, content: bytes) -> bytes:
    """Flips, cuts, inserts or repeats bytes, or puts a pickle or deep nesting among them."""
    at = draw.randint(0, len(content))
    end = min(len(content), at + draw.choice((1, 8, 1_000)))
    kind = draw.choice(("flip", "flip", "cut", "drop", "noise", "token", "token", "pickle", "nest", "repeat", "empty"))
    if kind == "flip" and at < len(content):
        return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "drop":
        return content[:at] + content[end:]
    if kind == "noise":
        return content[:at] + draw.randbytes(draw.randint(1, 20)) + content[end:]
    if kind == "token":
        return content[:at] + draw.choice(_TOKENS) + content[at:]
    if kind == "pickle":
        return draw.choice((b"", content[:at])) + draw.choice(_PICKLES) + content[at:]
    if kind == "nest":
        opening = draw.choice((b"[", b'{"a":', b"- ", b"{a: "))
        return content[:at] + opening * draw.choice((5, 500, 200_000)) + content[at:]
    if kind == "empty":
        return draw.choice((b"", b"\n", b" ", b"null", b"0", b"[]", b"{}", b'""', b"\0" * 64))
    return content[:at] + content[at:end] * draw.choice((2, 100)) + content[end:]


# --- formats


def _copied(template: str, file: str) -> Callable[[Path], Path]:
    """Returns what copies a folder that commands have made, and the file of it that is changed."""

    def make(folder: Path) -> Path:
        shutil.copytree(templates() / template, folder, dirs_exist_ok=True)
        return folder / file

    return make


def _written(name: str, text: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(text())
        return folder / name

    return make


def _tiny() -> bytes:
    return (templates() / "run" / "config.yaml").read_bytes()


def _sealed(tree: Any) -> bytes:
    """Returns a manifest with the checksum that is right for it, so that its other checks are tried."""
    if isinstance(tree, dict):
        tree.pop("crc32", None)
    body = json.dumps(tree).encode()[:-1]
    return body + f',\n"crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def _with_right_checksums(folder: Path) -> None:
    """Writes the manifest that fits the changed files of a checkpoint, so that their contents are tried."""
    tree = json.loads((folder / "manifest.json").read_bytes())
    for name in tree["files"]:
        content = (folder / name).read_bytes()
        tree["files"][name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
        for piece in [each for tensor in tree["tensors"].values() for each in tensor["pieces"] if each["file"] == name]:
            piece["crc32"] = f"{zlib.crc32(content[: piece['at'] + piece['bytes']]):08x}"
    (folder / "manifest.json").write_bytes(_sealed(tree))


def _split_export(folder: Path) -> Path:
    shutil.copytree(templates() / "split", folder, dirs_exist_ok=True)
    return folder / "model.safetensors.index.json"


def _cases() -> bytes:
    path = Path(plan_command.__file__).parents[1] / "cases" / "published.json"
    return json.dumps(random.Random(0).sample(json.loads(path.read_text()), 3)).encode()


def _hardware() -> bytes:
    return (Path(plan_command.__file__).parents[1] / "hardware" / "h100-80gb.yaml").read_bytes()


def _deepspeed() -> bytes:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}}
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
    warmup = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    tree = {**batch, "zero_optimization": zero, "optimizer": adam, "scheduler": warmup, "bf16": {"enabled": True}}
    return json.dumps(tree).encode()


def _schedule() -> bytes:
    return b"0F0,0F1,,0B0,0F2,0B1,0F3,0B2,,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,\n"


def _json_lines() -> bytes:
    return b"".join(json.dumps({"text": f"some words {n}\n", "id": n}).encode() + b"\n" for n in range(20))


def _metrics(folder: Path) -> Path:
    shutil.copytree(templates() / "run", folder, dirs_exist_ok=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    more = [{**lines[-1], "step": step} for step in range(3, 9)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, *more]))
    return folder / "metrics.jsonl"


def _lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def _as_lines(tree: Any) -> bytes:
    rows = tree if isinstance(tree, list) else [tree]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _as_safetensors(tree: Any) -> bytes:
    header = json.dumps(tree).encode()
    return (
        len(header).to_bytes(8, "little")
        + header
        + (templates() / "export" / "model.safetensors").read_bytes()[-40_000:]
    )


def _header(content: bytes) -> Any:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


@cache
def _trainer() -> Trainer:
    """Returns what resumes the run of the templates."""
    recipe = load_recipe(templates() / "run" / "config.yaml", cards=shape_cards())
    store = Path(tempfile.mkdtemp(prefix="fuzz-files-")) / "store"
    place = Rendezvous(rank=0, local_rank=0, world_size=1, local_world_size=1, init_method=f"file://{store}")
    group = process_group(recipe, place)
    device = group.__enter__()
    mesh = build_mesh(recipe.parallel, "cpu")
    _open_groups.append(group)
    return Trainer(recipe, mesh=mesh, device=device, model_class=model_class(recipe.model.architecture))


_open_groups: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def _closed_groups() -> Iterator[None]:
    yield
    while _open_groups:
        _open_groups.pop().__exit__(None, None, None)
        _trainer.cache_clear()


def _saved(file: str, folder: Path) -> Path:
    _trainer()
    return _copied("run/checkpoints/step_00000002", file)(folder)


def _resume(words: Sequence[str]) -> int:
    """Resumes from a checkpoint, as a command that tells its errors."""
    try:
        load_trainer(_trainer(), Path(words[0]))
    except Parallel3dError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _checkpoint(words: str) -> Command:
    return checkpoint_command.main, tuple(words.split())


def _data(words: str) -> Command:
    return data_command.main, tuple(words.split())


def _plan(words: str) -> Command:
    return plan_command.main, tuple(words.split())


def _train(words: str) -> Command:
    return pretrain.main, tuple(words.split())


_MANIFEST = tuple(map(_checkpoint, ("inspect {folder}", "verify {folder}", "ls {folder}/..", "export {folder} {out}")))
_TOKENS_JSON = tuple(map(_data, ("inspect {folder}", "check {folder}", "merge {folder} {folder} --out {out}")))
_CONFIG = ("models {file}", "memory --model {file} --gpu h100 --layout tp=2 --seq-len 128 --global-batch 8")
FORMATS: dict[str, Format] = {
    "recipe": Format(
        _written("recipe.yaml", _tiny),
        (
            _train("{file} --print-config"),
            (launch_command.main, ("slurm", "{file}")),
            (launch_command.main, ("k8s", "{file}")),
        ),
        load=yaml.safe_load,
    ),
    "manifest": Format(partial(_saved, "manifest.json"), (*_MANIFEST, (_resume, ("{folder}",))), dump=_sealed),
    "shard": Format(partial(_saved, "__0_0.distcp"), ((_resume, ("{folder}",)),), None, seal=_with_right_checksums),
    "metadata": Format(partial(_saved, ".metadata"), ((_resume, ("{folder}",)),), None, seal=_with_right_checksums),
    "tokens.json": Format(_copied("bpe", "tokens.json"), _TOKENS_JSON),
    "megatron index": Format(
        _copied("megatron", "prefix.idx"), (_data("inspect {folder}/prefix"), _data("check {folder}/prefix")), load=None
    ),
    "safetensors index": Format(
        _split_export, (_checkpoint("import {folder}"), _checkpoint("import {folder} -o {out}"))
    ),
    "safetensors": Format(
        _copied("export", "model.safetensors"), (_checkpoint("import {folder}"),), load=_header, dump=_as_safetensors
    ),
    "config.json": Format(
        _copied("export", "config.json"), (_checkpoint("import {folder}"), *map(_plan, _CONFIG)), statuses=(2, 3, 65)
    ),
    "cases": Format(_written("cases.json", _cases), (_plan("score {file}"),)),
    "schedule": Format(
        _written("s.csv", _schedule), (_plan("timeline --schedule-file {file}"),), load=None, statuses=(2, 70)
    ),
    "hardware": Format(
        _written("h.yaml", _hardware),
        (
            _plan("hardware {file}"),
            _plan("memory --model gpt2 --hardware {file} --layout tp=2 --seq-len 128 --global-batch 8"),
        ),
        load=yaml.safe_load,
        statuses=(2, 3),
    ),
    "metrics.jsonl": Format(
        _metrics,
        (_plan("compare {folder} --gpu cpu"), _train("replay {folder} tensorboard")),
        _lines,
        _as_lines,
        (2, 65, 73),
    ),
    "deepspeed": Format(_written("ds.json", _deepspeed), (_train("--from-deepspeed {file}"),)),
    "tokenizer.json": Format(
        _copied("bpe", "tokenizer.json"),
        (
            _data("check {folder}"),
            _data("tokenize {folder}/tokens.json --input-format text --tokenizer {file} --workers 1 --out {out}"),
        ),
    ),
    "jsonl": Format(
        _written("x.jsonl", _json_lines), (_data("tokenize {file} --workers 1 --out {out}"),), _lines, _as_lines
    ),
    "gz": Format(
        _written("x.txt.gz", lambda: gzip.compress(_json_lines())),
        (_data("tokenize {file} --workers 1 --out {out}"),),
        load=None,
    ),
}


# --- what must hold


_IMPORTED = (sys.prefix, sys.base_prefix, str(Path(parallel3d.__file__).parents[1]), "/proc/", "/sys/", "/dev/")


class Watch:
    """Hears from Python itself, by an audit hook, which files are opened or changed and what is run."""

    def __init__(self) -> None:
        self.folders: tuple[str, ...] = ()  # what may be touched; none: nothing is watched
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folders:
            return
        if event.startswith(("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "socket.connect")):
            self.seen.append(event)
        elif event == "open" or event.startswith(("os.rem", "os.rename", "os.mkdir", "os.link", "os.symlink")):
            path = arguments[0]
            allowed = (*self.folders, *_IMPORTED) if event == "open" else self.folders
            if event in ("open", "os.mkdir") and os.path.isdir(path):
                return  # fsync of a folder, and mkdir(exist_ok=True)
            if not isinstance(path, int) and not os.path.abspath(os.fsdecode(path)).startswith(allowed):
                self.seen.append(f"{event} {path!r}")

    @contextmanager
    def only(self, *folders: Path) -> Iterator[None]:
        self.folders, self.seen = tuple(map(str, folders)), []
        try:
            yield
        finally:
            self.folders = ()


@cache
def _watch() -> Watch:
    return Watch()


def faults_of(name: str, seed: int) -> list[str]:
    """Returns what is wrong with the answers to the mutation of a seed."""
    form, draw = FORMATS[name], random.Random(f"{name} {seed}")
    with tempfile.TemporaryDirectory(prefix="fuzz-files-") as at:
        folder = Path(at).resolve() / "step_00000002"
        folder.mkdir()
        (folder.parent / "x").write_text("somebody's own\n")  # what the name ../x means
        file = form.make(folder)
        trick = _trick(draw, file) if name == "manifest" and draw.random() < 0.1 else ""
        if not trick and draw.random() < 0.02:
            file.unlink()
            draw.choice((file.mkdir, partial(os.mkfifo, file), partial(file.symlink_to, file)))()
        elif not trick:
            file.write_bytes(mutated(draw, file.read_bytes(), form))
            form.seal(folder)
        return [f"{name} {seed}: {fault}" for fault in _faults(form, folder, file, trick)]


def _trick(draw: random.Random, manifest: Path) -> str:
    """Changes a manifest so that only its meaning is wrong, and returns how."""
    tree = json.loads(manifest.read_bytes())
    kind = draw.choice(("a later version's key", "a later version's format", "a file that no save writes"))
    if kind.endswith("key"):
        draw.choice((tree, tree["progress"]))["invented_later"] = 1
    elif kind.endswith("format"):
        tree["format"] = 2
    else:
        content = b"print()\n"
        manifest.with_name("triton.py").write_bytes(content)
        tree["files"]["triton.py"] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    manifest.write_bytes(_sealed(tree))
    return kind


def _faults(form: Format, folder: Path, file: Path, trick: str) -> Iterator[str]:
    out, around = folder.with_name("out"), _files(folder.parent)
    for main, words in form.commands:
        filled = [word.format(file=file, folder=folder, out=out) for word in words]
        before = _reset_peak()
        with chdir(folder), _watch().only(folder, out):
            answer = call(main, filled)
        faults = [*answer.faults, *(f"does {each}" for each in _watch().seen)]
        if answer.status not in (0, *form.statuses) and not answer.faults:
            faults.append(f"ends with status {answer.status}")
        if (needed := _peak_bytes() - before) > _MOST_BYTES:
            faults.append(f"needs {needed >> 20} MiB")
        if trick and words[0] != "ls" and (answer.status == 0 or DamagedCheckpointError.__name__ in answer.err):
            faults.append(f"takes {trick} for {'damage' if answer.status else 'right'}")
        yield from (f"{' '.join(words)} ({answer.status}): {each}" for each in faults)
        for left in folder.parent.glob("out*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    if _files(folder.parent) != around:
        yield "changes what it reads, or what is around it"


def _files(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file() and not each.is_symlink()}


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_read_or_refused_in_words(name: str) -> None:
    assert [fault for seed in range(SHORT) for fault in faults_of(name, seed)] == []


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_many_changed_files_are_read_or_refused_in_words(name: str) -> None:
    assert [fault for seed in range(SHORT, LONG) for fault in faults_of(name, seed)] == []


if __name__ == "__main__":
    for each_name in FORMATS if sys.argv[1] == "all" else [sys.argv[1]]:
        for each_seed in range(int(sys.argv[2]), int(sys.argv[-1]) + 1):
            for each_fault in faults_of(each_name, each_seed):
                print(each_fault.replace("\n", " | "), flush=True)
