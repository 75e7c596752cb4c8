"""Random trees with parts of runs, checkpoints, exports, folders of tokens and files of other people, and random
commands on them. No file that the commands did not make changes, vanishes or moves; a refused command changes nothing;
none loses a checkpoint or tokens, runs code that it only looks at, or ends in a traceback.

python -m tests.test_fuzz_folders FIRST [LAST]    tries these seeds and prints what is wrong
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path

import pytest

from parallel3d.recipes import pretrain
from parallel3d.tools.checkpoint import command as checkpoint_command
from parallel3d.tools.data import command as data_command
from parallel3d.tools.launch import command as launch_command
from parallel3d.tools.plan import command as plan_command
from tests.fuzz import Answer, Main, call

SHORT, LONG = range(16), range(16, 800)
_RECIPE = """\
model: {layers: 1, hidden: 16, heads: 2, ffn_hidden: 32, vocab: 264}
train: {steps: 2, global_batch_size: 2, seq_len: 16, device: cpu}
optimizer: {warmup_steps: 1}
data: {source: text, path: text.txt}
checkpoint: {every: 1, keep: 9}
logging: {every: 1}
"""
_PLANTED = "from pathlib import Path\nPath(f'{__file__}.ran').touch()\n"
_CALLBACKS = """\
from parallel3d import Callback
class Nothing(Callback):
    pass
class Quits(Callback):
    def __init__(self):
        raise SystemExit(0)
"""
# What torch and others look for beside what is installed: none of them may come from a folder that is looked at.
_MODULES = ("triton.py", "opt_einsum.py", "tabulate.py", "tensorboard.py", "numexpr.py")
_FILES = (
    *("notes.txt", "config.yaml", "metrics.jsonl", "outcome.json", "checkpoints", "run.lock", "config.json"),
    *("model.safetensors", "tokens.json", "tokenizer.json", "manifest.json", "train-00000.bin", "plan.yaml"),
    *("job.sbatch", "out", "out.bin", "out.idx", "out.tokenizer.json", "out.1", "wandb.id", "range_test.json"),
    *(".metrics.jsonl.partial", "nccl_flight_record_rank_0", "tokens.json.partial", "new.svg"),
)
_FOLDERS = (
    *("checkpoints", "tensorboard", "profile", "out", "out.1", "out.partial", "out.replaced", "out.merging"),
    *("run.partial", "run.replaced", "run.merging", "run.1", "tokens.partial", "export.partial", "export.replaced"),
)
_PARENTS = ("a", "b", "a/b", "out", "run.1", "with space", "a/deep/er")
_STRANGE = ("", ".", "..", "/dev/null", "a\nb", "caf\udce9", "-x", "~", "x" * 300, "new/a/b", "é")
_INJECTED = "x\ntouch PWNED\n#$(touch PWNED)`touch PWNED`'"


@dataclass(frozen=True)
class Entry:
    """A file, link or folder: its kind and what it holds."""

    kind: str
    content: str


@dataclass(frozen=True)
class Command:
    """A command, and the words that it is called with. `output`: the folder that it writes into."""

    name: str
    main: Main
    words: tuple[str, ...]
    output: str = ""


@dataclass
class Tree:
    """A folder that commands are run in, `here`, within a folder that is watched, `top`. `foreign` are the paths that
    no command has made."""

    top: Path
    draw: random.Random
    foreign: set[Path] = field(default_factory=set)

    @property
    def here(self) -> Path:
        return self.top / "here"

    def add(self, path: Path, text: str) -> None:
        """Adds a file of other people, unless something is there already."""
        if not _can_be_made(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.foreign.add(Path(os.path.realpath(path)))

    def path(self) -> Path:
        """Returns a path in the tree: of something that is there, or beside it."""
        there = sorted(self.here.rglob("*"))
        drawn = self.draw.random()
        if drawn < 0.1 or not there:
            return self.here
        chosen = self.draw.choice(there)
        if drawn < 0.3:
            marks = [
                each for each in there if each.name in ("config.json", "metrics.jsonl", "config.yaml", "tokens.json")
            ]
            return self.draw.choice(marks).parent if marks else self.here
        if drawn < 0.4:
            beside = [each for each in there if each.suffix in (".partial", ".replaced", ".merging", ".idx", ".1")]
            return self.draw.choice(beside).with_suffix("") if beside else self.here
        if drawn < 0.6:
            folders = [each for each in there if each.is_dir() and "step_" not in str(each)]
            chosen = self.draw.choice(folders or [self.here])
        return chosen / self.draw.choice(("new", "out", "run")) if drawn > 0.8 and chosen.is_dir() else chosen

    def word(self) -> str:
        """Returns a path as somebody types it."""
        if self.draw.random() < 0.1:
            return self.draw.choice(_STRANGE)
        path = self.path()
        relative = os.path.relpath(path, self.here)
        return self.draw.choice((relative, relative, str(path), f"./{relative}", f"{relative}/"))


def _can_be_made(path: Path) -> bool:
    above = [each for each in path.parents if os.path.lexists(each)]
    return not os.path.lexists(path) and above[0].is_dir()


def snapshot(top: Path) -> dict[Path, Entry]:
    """Returns what is in a folder, by its path."""
    found = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                found[path] = Entry("link", os.readlink(path))
            elif path.is_dir():
                found[path] = Entry("folder", "")
            else:
                found[path] = Entry("file", blake2b(path.read_bytes()).hexdigest())
    return found


# --- what a tree has


def plant(seed: int, top: Path) -> Tree:
    """Makes the tree of a seed."""
    tree = Tree(top, random.Random(seed))
    tree.here.mkdir(parents=True)
    tree.add(top / "outside" / "notes.txt", "outside\n")
    tree.add(top / "notes.txt", "above\n")
    for name, text in _recipes().items():
        tree.add(tree.here / name, text)
    tree.add(tree.here / "text.txt", "some words of a text\n" * 60)
    tree.add(tree.here / "planted.py", _PLANTED + _CALLBACKS)
    for name in _MODULES:
        tree.add(tree.here / name, _PLANTED)
    for number in range(tree.draw.randint(2, 9)):
        tree.draw.choice(_INGREDIENTS)(tree, number)
    return tree


def _recipes() -> dict[str, str]:
    other = _RECIPE.replace("hidden: 16", "hidden: 24").replace("warmup_steps: 1", "warmup_steps: 1, name: sgd")
    return {
        "tiny.yaml": _RECIPE,
        "other.yaml": other,
        "planted.yaml": _RECIPE.replace("device: cpu", "device: cpu, callbacks: ['planted:Nothing']"),
        "quits.yaml": _RECIPE.replace("device: cpu", "device: cpu, callbacks: ['planted:Quits']"),
    }


def _place(tree: Tree, names: tuple[str, ...]) -> Path:
    parents = (tree.here, tree.here, *(tree.here / each for each in _PARENTS))
    folders = sorted(each for each in tree.here.rglob("*") if each.is_dir() and "step_" not in str(each))
    parent = tree.draw.choice((*parents, *folders))
    return parent / tree.draw.choice(names)


def _foreign_file(tree: Tree, number: int) -> None:
    tree.add(_place(tree, _FILES), f"somebody's own {number}\n")


def _foreign_folder(tree: Tree, number: int) -> None:
    folder = _place(tree, _FOLDERS)
    tree.add(folder / tree.draw.choice(_FILES), f"somebody's own {number}\n")
    tree.add(folder / "deep" / "notes.txt", f"somebody's own {number}, deeper\n")


def _link(tree: Tree, number: int) -> None:
    path = _place(tree, (*_FILES, *_FOLDERS, "link"))
    if not _can_be_made(path):
        return
    there = sorted(tree.here.rglob("*"))
    target = tree.draw.choice([*there, tree.top / "outside", tree.top / "outside" / "notes.txt", path, Path("nowhere")])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    tree.foreign.add(Path(os.path.realpath(path.parent), path.name))


def _made(tree: Tree, number: int) -> None:
    """Adds what a command has made: all of it, in a folder of its own or among others' files, or parts."""
    template = tree.draw.choice(sorted(templates().iterdir()))
    target = _place(tree, (template.name, "out", "run", "run.1", "."))
    files = [each for each in sorted(template.rglob("*")) if each.is_file()]
    if tree.draw.random() < 0.3:
        files = tree.draw.sample(files, tree.draw.randint(1, len(files)))
    for file in files:
        copy = target / file.relative_to(template)
        if _can_be_made(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _damaged_run(tree: Tree, number: int) -> None:
    """Adds a run whose newest checkpoint has lost its manifest, or is a later version's."""
    run = _place(tree, ("run", "out"))
    if not _can_be_made(run):
        return
    shutil.copytree(templates() / "run", run)
    manifest = run / "checkpoints" / "step_00000002" / "manifest.json"
    if tree.draw.random() < 0.5:
        manifest.unlink()
        return
    body = manifest.read_bytes().rpartition(b',\n"crc32"')[0]
    body = body.replace(b'"progress": {', b'"progress": {"invented_later": 1, ')
    manifest.write_bytes(body + f',\n"crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())


_INGREDIENTS = (
    _foreign_file,
    _foreign_file,
    _foreign_folder,
    _foreign_folder,
    _link,
    _made,
    _made,
    _made,
    _damaged_run,
)


@cache
def templates() -> Path:
    """Returns a folder of what the commands make: runs, an export, folders of tokens."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-folders-"))
    made = folder / "made"
    made.mkdir()
    (folder / "text.txt").write_text("some words of a text\n" * 60)
    for name, text in _recipes().items():
        (folder / name).write_text(text)
    with chdir(folder):
        for words in (("tiny.yaml", "run_dir=made/run"), ("other.yaml", "run_dir=made/other")):
            _expect(call(train, words))
        for export in (("made/export",), ("made/split", "--max-shard-size", "0.01MB")):
            _expect(call(checkpoint_command.main, ("export", "made/run", *export)))
        for more in (("made/tokens",), ("made/bpe", "--train-bpe", "270"), ("made/prefix", "--format", "megatron")):
            _expect(call(data_command.main, ("tokenize", "text.txt", "--workers", "1", "--out", *more)))
    for file in made.glob("prefix.*"):
        (made / "megatron").mkdir(exist_ok=True)
        file.rename(made / "megatron" / file.name)
    return made


def _expect(answer: Answer) -> None:
    assert answer.status == 0, answer


# --- commands


def train(words: tuple[str, ...]) -> int:
    """Runs `parallel3d-train` as the single worker of a launcher, in this process."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    hook = sys.excepthook
    try:
        return pretrain.main(words)
    finally:
        sys.excepthook = hook  # a process group puts its own there
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(tree: Tree) -> Command:
    recipe = tree.draw.choice(("tiny.yaml", "tiny.yaml", "tiny.yaml", "other.yaml", "planted.yaml", "quits.yaml"))
    run_dir = tree.word()
    resume = tree.draw.choice(("none", "none", "auto", "auto", tree.word(), _checkpoint(tree)))
    words = [recipe, f"run_dir={run_dir}", f"checkpoint.resume={resume}"]
    more = ("train.steps=3", "checkpoint.start_from=" + _checkpoint(tree), "checkpoint.every=null", "optimizer.lr=1")
    words += tree.draw.sample(more, tree.draw.choice((0, 0, 1, 2)))
    return Command("train", train, tuple(words), run_dir)


def _checkpoint(tree: Tree) -> str:
    """Returns a checkpoint or a run of the tree, or another path."""
    found = sorted(tree.here.rglob("manifest.json")) + sorted(tree.here.rglob("metrics.jsonl"))
    return str(tree.draw.choice(found).parent) if found and tree.draw.random() < 0.8 else tree.word()


def _evaluate(tree: Tree) -> Command:
    kind = tree.draw.choice(("evaluate", "generate", "replay"))
    more = {"evaluate": (), "generate": ("--tokens", "3"), "replay": ("tensorboard",)}[kind]
    return Command(kind, train, (kind, _checkpoint(tree), *more))


def _checkpoints(tree: Tree) -> Command:
    kind = tree.draw.choice(("ls", "inspect", "verify", "export", "export", "import"))
    words = [kind, tree.word() if kind == "import" else _checkpoint(tree)]
    output = ""
    if kind == "export":
        output = tree.word()
        words += [output, *tree.draw.choice(((), ("--overwrite",)))]
    if kind == "import":
        configs = sorted(tree.here.rglob("config.json"))
        words[1] = str(tree.draw.choice(configs).parent) if configs else words[1]
        words += tree.draw.choice(((), ("-o", tree.word())))
    return Command(kind, checkpoint_command.main, tuple(words), output)


def _data(tree: Tree) -> Command:
    kind = tree.draw.choice(("tokenize", "tokenize", "merge", "merge", "inspect", "check"))
    found = [str(each.parent) for each in sorted(tree.here.rglob("tokens.json"))] or [tree.word()]
    if kind in ("inspect", "check"):
        return Command(kind, data_command.main, (kind, tree.draw.choice((tree.word(), *found))))
    output = tree.word()
    words = ["merge", *tree.draw.choices(found, k=2), "--out", output]
    if kind == "tokenize":
        more = (("--format", "megatron"), ("--train-bpe", "270"), ("--train-bpe", "270", "--format", "megatron"), ())
        inputs = tree.draw.choice(("text.txt", "text.txt", tree.word()))
        words = ["tokenize", inputs, "--workers", "1", "--out", output, *tree.draw.choice(more)]
    return Command(kind, data_command.main, tuple(words), output)


def _plan(tree: Tree) -> Command:
    recipe = tree.draw.choice(("tiny.yaml", "planted.yaml"))
    asked = ("--model", recipe, "--gpu", "cpu", "--gpus", "1")
    kind = tree.draw.choice(("recommend", "timeline", "verify", "compare"))
    words: tuple[str, ...]
    if kind == "recommend":
        launcher = tree.draw.choice(((), ("--emit-launch", "slurm"), ("--emit-launch", "k8s", tree.word())))
        words = (*asked, "--emit-recipe", tree.word(), *launcher, *tree.draw.choice(((), ("--html", tree.word()))))
    elif kind == "timeline":
        output = tree.draw.choice(("--csv", "--svg", "--trace"))
        words = ("timeline", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2", output, tree.word())
    else:
        words = ("verify", recipe) if kind == "verify" else ("compare", _checkpoint(tree), "--gpu", "cpu")
    return Command(f"plan {kind}", plan_command.main, words)


def _launch(tree: Tree) -> Command:
    kind = tree.draw.choice(("slurm", "slurm", "k8s", "k8s", "torchrun", "torchx"))
    recipe = tree.draw.choice(("tiny.yaml", "planted.yaml"))
    options: tuple[str, ...] = {"slurm": ("partition", "account", "time"), "k8s": ("image", "claim")}.get(kind, ())
    words = [kind, recipe]
    if options and tree.draw.random() < 0.7:
        words.append(f"--{tree.draw.choice(options)}={_INJECTED}")
    if tree.draw.random() < 0.5:
        words.append(f"run_dir={tree.word()}")
    return Command(f"launch {kind}", launch_command.main, tuple(words))


def _look(tree: Tree) -> Command:
    recipe = tree.draw.choice(("planted.yaml", "quits.yaml", "tiny.yaml", tree.word()))
    return Command("print-config", train, (recipe, "--print-config", f"run_dir={tree.word()}"))


_COMMANDS = (_train, _train, _train, _train, _evaluate, _checkpoints, _checkpoints, _data, _data, _plan, _launch, _look)


# --- what must hold


def faults_of(seed: int) -> list[str]:
    """Returns what is wrong with the answers to the commands of a seed."""
    templates()
    with tempfile.TemporaryDirectory(prefix="fuzz-folders-", ignore_cleanup_errors=True) as name:
        tree = plant(seed, Path(name).resolve() / "top")
        for _ in range(tree.draw.randint(1, 4)):
            command = tree.draw.choice(_COMMANDS)(tree)
            encoding = tree.draw.choice(("utf-8", "utf-8", "ascii"))
            before = snapshot(Path(name))
            with chdir(tree.here):
                answer = call(command.main, command.words, encoding=encoding, shows_text=command.name == "generate")
            after = snapshot(Path(name))
            _forget_modules(name)
            if found := [*answer.faults, *_faults(tree, command, answer, before, after)]:
                said = " ".join(map(repr, command.words))
                return [f"seed {seed}: {said} ({answer.status}): {each}" for each in found]
    return []


def _forget_modules(folder: str) -> None:
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


def _faults(
    tree: Tree, command: Command, answer: Answer, before: dict[Path, Entry], after: dict[Path, Entry]
) -> Iterator[str]:
    for path in sorted(tree.foreign):
        if after.get(path) != before[path]:
            yield f"{'changes' if path in after else 'loses'} {path.relative_to(tree.top)}"
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    changed = [path for path in changed if "__pycache__" not in path.parts]
    ran = {path.name for path in changed if path.suffix == ".ran"}
    if ran - {"planted.py.ran"} or (ran and command.name != "train"):
        yield f"runs {', '.join(sorted(ran))}"
    if answer.status in (2, 3, 65):
        left = [path for path in changed if not (command.name == "tokenize" and ".partial" in str(path))]
        left = [path for path in left if path.suffix != ".ran"]
        if command.output:  # what may be new: folders above the output, and an outcome.json that says why
            outcome = _real(tree, command.output) / "outcome.json"
            left = [path for path in left if path in before or not outcome.is_relative_to(path)]
        if left:
            names = [os.path.relpath(path, tree.top) for path in left[:3]]
            yield f"is refused ({answer.err.strip()[:150]}) and changes {names}"
    yield from _lost(tree, command, before, after)
    if command.name == "train" and answer.status == 0:
        yield from _not_trained(tree, command, before, after)
    if command.name in ("verify", "inspect", "export") and answer.status == 0:
        yield from _passed_over(tree, command, answer)
    if command.name.startswith("launch") and answer.status == 0:
        yield from _injected(tree, command, answer)


def _lost(tree: Tree, command: Command, before: dict[Path, Entry], after: dict[Path, Entry]) -> Iterator[str]:
    """Yields the checkpoints and tokens that are gone. A run may delete checkpoints of its own."""
    kept = {path: entry for path, entry in before.items() if path.suffix in (".distcp", ".bin")}
    kept = {path: entry for path, entry in kept.items() if path not in tree.foreign}
    if command.name == "train":
        own = _real(tree, command.output)
        kept = {path: entry for path, entry in kept.items() if not path.is_relative_to(own)}
    gone = Counter(entry.content for entry in kept.values()) - Counter(entry.content for entry in after.values())
    for path, entry in kept.items():
        if entry.content in gone and path not in after:
            yield f"deletes {path.relative_to(tree.top)}"
            return


def _real(tree: Tree, word: str) -> Path:
    return Path(os.path.realpath(tree.here / word))


def _not_trained(tree: Tree, command: Command, before: dict[Path, Entry], after: dict[Path, Entry]) -> Iterator[str]:
    run, steps = _real(tree, command.output), 3 if "train.steps=3" in command.words else 2
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
    last = json.loads(lines[-1])["step"] if lines else 0
    resumed = any(each.startswith("checkpoint.resume=") and not each.endswith("=none") for each in command.words)
    if not resumed and last != steps:
        yield f"ends well after step {last} of {steps}"
    resume = next(each for each in command.words if each.startswith("checkpoint.resume=")).partition("=")[2]
    folder = run / "checkpoints"
    if resume not in ("none", "auto") and not _real(tree, resume).is_relative_to(run):
        mixed = [p for p in before if p.name == "manifest.json" and p.parent.parent == folder and p in after]
        if mixed and after[mixed[0]] == before[mixed[0]]:
            yield f"mixes two runs: {mixed[0].relative_to(tree.top)} stays beside what was resumed"


def _passed_over(tree: Tree, command: Command, answer: Answer) -> Iterator[str]:
    run = tree.here / command.words[1]
    if (run / "manifest.json").exists():
        return
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    steps = sorted(each for each in folder.glob("step_????????") if any(each.glob("*")))
    is_told = command.name != "verify" and steps and steps[-1].name in answer.out + answer.err
    if steps and not (steps[-1] / "manifest.json").is_file() and not is_told:
        yield f"passes over {steps[-1].name}, which has no manifest, without a word"


def _injected(tree: Tree, command: Command, answer: Answer) -> Iterator[str]:
    """Yields whether a script, run with stand-ins for all programs, runs what somebody gave as a name."""
    script = answer.out
    if command.name == "launch k8s":
        import yaml

        try:
            documents = list(yaml.safe_load_all(script))
        except yaml.YAMLError as error:
            yield f"writes no YAML: {error}"
            return
        if [each["kind"] for each in documents] != ["ConfigMap", "Service", "Job"]:
            yield "writes other objects than a ConfigMap, a Service and a Job"
        script = documents[2]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("srun", "torchrun", "torchx", "python", "scontrol", "head", "sleep"):
            Path(folder, name).symlink_to("/bin/true")
        Path(folder, "touch").symlink_to(shutil.which("touch") or "/bin/touch")
        Path(folder, "script").write_text(script)
        settings = {"PATH": folder, "SLURM_JOB_NODELIST": "a", "HEAD": "a"}
        subprocess.run(["/bin/bash", "script"], cwd=folder, env=settings, capture_output=True, timeout=20, check=False)
        if Path(folder, "PWNED").exists():
            yield "writes a script that runs what stands in a name"


@pytest.mark.parametrize("seed", SHORT)
def test_commands_touch_nothing_that_they_did_not_make(seed: int) -> None:
    assert faults_of(seed) == []


@pytest.mark.long
def test_commands_touch_nothing_that_they_did_not_make_in_many_trees() -> None:
    assert [fault for seed in LONG for fault in faults_of(seed)] == []


if __name__ == "__main__":
    first, last = int(sys.argv[1]), int(sys.argv[-1])
    for each_seed in range(first, last + 1):
        for each_fault in faults_of(each_seed):
            print(each_fault.replace("\n", " | "), flush=True)
