"""Mistakes that people make, drawn by chance over recipes, command lines and files, for test_mistakes.py.

A kind of mistake is a row of data: a command, the words after it, and the values or the files that are wrong. Each try
runs the command in a folder of its own.

python -m tests.mistakes [FIRST LAST]      draws and runs all of them, or these; prints what was answered badly
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MISTAKES = 300
SECONDS = 10.0  # within which a mistake is answered
_LINES, _WIDTH = 2, 600  # of an answer, which echoes what was wrong
_TRIES = 3  # a busy machine is asked again

Contents = str | bytes | Callable[[Path], object]

_COMMANDS = {
    "train": "parallel3d.recipes.pretrain",
    "plan": "parallel3d.tools.plan",
    "data": "parallel3d.tools.data",
    "checkpoint": "parallel3d.tools.checkpoint",
    "check-layout": "parallel3d.tools.check_layout",
}


@dataclass(frozen=True)
class Kind:
    """A kind of mistake: a command line in which one of `values` stands for {}, and {at} for the folder of the try; or
    one of `files` is written to `name` in it. It ends with one of `statuses`."""

    words: str
    values: Sequence[str] = ("",)
    files: Sequence[Contents] = ("",)
    name: str = ""
    statuses: tuple[int, ...] = (2,)


@dataclass(frozen=True)
class Mistake:
    """One mistake: the words of its command line, and the file that is made for it."""

    words: tuple[str, ...]
    name: str
    contents: Contents
    statuses: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """How a command ended, and what is bad about it."""

    status: int
    seconds: float
    text: str
    faults: tuple[str, ...]


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


def _config(**changes: object) -> str:
    """Returns a Llama's config.json in which something is wrong."""
    import json

    numbers: dict[str, object] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    more: dict[str, object] = {"intermediate_size": 128, "vocab_size": 1000, "num_key_value_heads": 4}
    return json.dumps({"model_type": "llama", **numbers, **more, **changes})


_DATA = (2, 65)  # the statuses of a mistake in data or a checkpoint, which may be one in the recipe as well
_RECIPE = """
model: {layers: 2, hidden: 32, heads: 2, ffn_hidden: 64, vocab: 264}
train: {steps: 2, global_batch_size: 2, seq_len: 16, device: cpu}
"""
_HUGE = ("1" + "0" * 12, "1000000000", "1e30", "9" * 40, "-9223372036854775809", "1" * 5000)
_NO_COUNT = (
    "0",
    "-1",
    "2.5",
    "many",
    "nan",
    ".inf",
    "[1,2]",
    "{a:1}",
    "true",
    "0x",
    "é",
    "${x}",
    "1e3x",
    "--3",
    "3,000",
)
_NO_NUMBER = ("nan", ".inf", "-.inf", "high", "[1]", "{}", "false", "1e999", "-1", "1e400")
_COUNTS = tuple(
    f"{key}="
    for key in (
        *("model.layers", "model.hidden", "model.heads", "model.vocab", "model.ffn_hidden", "model.kv_heads"),
        *("train.steps", "train.seq_len", "train.global_batch_size", "parallel.tp", "parallel.pp", "parallel.dp_shard"),
        *("parallel.microbatch_size", "parallel.virtual_stages"),
    )
)
_NUMBERS = ("optimizer.lr=", "train.timeout_s=", "train.start_timeout_s=", "model.init_std=", "model.norm_eps=")
_DEEP_YAML = "model: " + "{a: " * 20_000 + "1" + "}" * 20_000
_ANCHORS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
_PLAN = "--gpu h100 --gpus 8 --seq-len 2048 --global-batch 64"
_JSON = "plan --model config.json " + _PLAN

KINDS: tuple[Kind, ...] = (
    *(Kind(f"train quickstart {key}{{}}", (*_NO_COUNT, *_HUGE)) for key in _COUNTS),
    *(Kind(f"train quickstart {key}{{}}", _NO_NUMBER) for key in _NUMBERS),
    Kind("train quickstart train.timeout_s={}", ("1e30", "0", "1e8", "forever")),
    Kind("train {}", ("", "quickstrat", "/", "/dev/null/x", "no/such.yaml", ".", "é.yaml", "a" * 5000, "--no-such")),
    Kind("train {}", ("quickstart model.layers", "quickstart =3", "quickstart a.b.c=1", "quickstart model=3", "a b c")),
    Kind("train quickstart model.name={}", ("../../etc/passwd", "llama", "gpt-4", "é", "''", "llama3-8b.yaml")),
    Kind(
        "train quickstart parallel.pp=1 parallel.dp_shard=1 parallel.tp=1 model.name={}",
        ("llama3-70b", "llama3.1-405b", "gpt3-175b", "megatron-1008b"),
    ),
    Kind("train quickstart run_dir={}", ("/", "''", "/dev/null", "/proc/x", "/sys/x", "a" * 300, "x/" * 3000)),
    Kind("train quickstart run_dir=file", files=("text",), name="file"),
    Kind("train quickstart run_dir=file/below", files=("text",), name="file"),
    Kind(
        "train quickstart checkpoint.resume={}",
        ("/tmp", "nowhere", "''", "/dev/null", "a" * 300, "/etc/passwd", "x/checkpoints/step_00000001"),
        statuses=_DATA,
    ),
    Kind("train quickstart checkpoint.start_from={}", ("/tmp", "nowhere", "''", "/dev/null"), statuses=_DATA),
    Kind("train quickstart train.device={}", ("cuda", "gpu", "tpu", "cuda:0")),
    Kind("train quickstart data.source=text data.path={}", ("/", "nowhere", "/dev/null", "/dev/zero"), statuses=_DATA),
    Kind(
        "train quickstart data.source=text data.path=bad.txt",
        files=("", "x", b"\xff\xfe" * 9, _sparse, os.mkfifo),
        name="bad.txt",
        statuses=_DATA,
    ),
    Kind("train quickstart data.source=tokens data.path={}", ("/tmp", "nowhere", "/etc/passwd"), statuses=_DATA),
    Kind("train quickstart data.tokenizer={}", ("nowhere.json", "/dev/null", "/", "gpt2"), statuses=_DATA),
    Kind("train quickstart parallel.schedule={}", ("1f2b", "", "3", "[1f1b]", "interleaved_1f1b", "dualpipe_v")),
    Kind(
        "train quickstart parallel.{}", ("tp=5", "pp=5", "dp_shard=3", "sharding=ZERO", "zero_stage=9", "dp=2", "cp=2")
    ),
    Kind("train quickstart parallel.dp_shard={}", ("8192", "1048576", "1099511627776")),
    Kind("train quickstart optimizer.{}", ("name=adam2", "betas=[1,2]", "betas=[0.9]", "lr=-1", "momentum=0.9")),
    Kind(
        "train bad.yaml",
        files=(
            *(
                "",
                "[1, 2]",
                "3",
                "text",
                "a: [",
                "\t",
                "a: b: c",
                "model: 3",
                "model: [1]",
                "{",
                "%YAML 9",
                "--- 1\n--- 2",
            ),
            *(b"\xff\xfe", b"\0" * 100, "!!python/object/apply:os.system [touch pwned]", "a: !!x 1", "? [a]\n: 1"),
            *(_DEEP_YAML, "[" * 100_000, _ANCHORS, _sparse, os.mkfifo, lambda path: path.symlink_to("/dev/zero")),
            *(_RECIPE + "".join(f"key{n}: {n}\n" for n in range(50_000)), lambda path: path.symlink_to(path)),
            *(_RECIPE + "data: {ignore_token_ids: [" + "1, " * 300_000 + "2]}", "a" * 900_000, "a: " + "b" * 900_000),
            *(
                _RECIPE + "optimizer: {betas: [" + "1, " * 300_000 + "2]}",
                "- a\n" * 250_000,
                "x: &x [*x]",
                "a: &a {b: *a}",
            ),
            *(
                _RECIPE + _RECIPE,
                _RECIPE + "data: {sources: [" + "{path: x}, " * 20_000 + "]}",
                "model: {<<: {layers: 2}}",
            ),
            *(_RECIPE + "model.layers: 3", _RECIPE.replace("layers: 2", "layers: two"), _RECIPE.replace("264", "1e30")),
            *(
                _RECIPE + "data: {evaluation: [" + "{name: x, path: y}, " * 10_000 + "]}",
                "train:\n" + " steps: 1\n" * 9,
            ),
            *(
                "a" * 2000 + ": 1",
                '"' + "\\u0000" * 5 + '": 1',
                "é: 1",
                "\U0001f600: 1",
                "model: &m {layers: *m}",
                _RECIPE + 'run_dir: "a\\0b"',
            ),
        ),
        name="bad.yaml",
    ),
    Kind(
        "train here.yaml {}",
        ("model.layer=3", "steps=3", "train.step=3", "optim.lr=1"),
        files=(_RECIPE,),
        name="here.yaml",
    ),
    Kind("train {}", ("evaluate", "evaluate nowhere", "generate /", "replay nowhere wandb"), statuses=(2, 65, 73)),
    Kind("train range-test {}", ("", "nowhere", "quickstart optimizer.lr=-1", "quickstart parallel.tp=7")),
    Kind(
        "train quickstart run_dir=run checkpoint.resume=auto",
        files=("garbage", "[" * 100_000, b"\0", Path.mkdir),
        name="run/checkpoints/step_00000001/manifest.json",
        statuses=_DATA,
    ),
    Kind("plan {}", ("", "recomend", "--no-such", "--model", "--model llama3-8b", "memory", "sweep", "timeline", "0")),
    Kind("plan --model llama3-8b --gpu h100 --seq-len 8192 --global-batch 512 --gpus {}", (*_NO_COUNT, *_HUGE)),
    Kind("plan --model llama3-8b --gpu h100 --gpus 64 --global-batch 512 --seq-len {}", (*_NO_COUNT, *_HUGE)),
    Kind("plan --model llama3-8b --gpu h100 --gpus 64 --seq-len 8192 --global-batch {}", (*_NO_COUNT, *_HUGE)),
    *(
        Kind(f"plan {_PLAN} --layers 32 --hidden 4096 --heads 32 --vocab 32000 --{name} {{}}", (*_NO_COUNT, *_HUGE))
        for name in ("layers", "hidden", "heads", "vocab", "kv-heads", "head-dim", "ffn-hidden")
    ),
    Kind(
        "plan limits {} --model llama3-8b --gpu h100 --gpus 1000000000 --seq-len 8192 --global-batch 512", ("", "model")
    ),
    Kind("plan --model llama3-8b --gpu {} --gpus 8 --seq-len 1024 --global-batch 8", ("h1000", "/", "''", "/dev/zero")),
    Kind(f"plan --model {{}} {_PLAN}", ("gpt5", "/", "nowhere.json", "''", "/dev/zero", "/dev/null", "a" * 5000)),
    Kind(f"plan --model llama3-8b {_PLAN} --fix {{}}", ("tp=3", "tp", "tp=0", "zero=1", "pp=1e9", "tp=2,tp=4", "cp=2")),
    Kind(f"plan --model llama3-8b {_PLAN} {{}}", ("--top 0", "--tokens -1", "--price x", "--risk 2", "--gpu-memory 3")),
    Kind(
        "plan timeline --schedule 1f1b {}",
        ("", "--pp 0", "--pp 1000000000 --microbatches 8", "--pp 4 --microbatches 1e9"),
    ),
    Kind("plan timeline --pp 4 --microbatches 1000000000 --schedule {}", ("1f1b", "gpipe", "zb_h1", "none")),
    Kind("plan sweep --model llama3-8b --gpu h100 --seq-len 8 --global-batch 8 --gpus {}", ("8-4", "x", "1-1e9", "0")),
    Kind(
        f"plan --hardware bad.yaml --model llama3-8b {_PLAN}",
        files=("", "device: 3", _DEEP_YAML, _ANCHORS, _sparse),
        name="bad.yaml",
    ),
    Kind(
        "plan score bad.json",
        files=("", "{}", "[]", "[" * 100_000, '{"cases": 3}', '{"cases": [{}]}', _sparse),
        name="bad.json",
    ),
    Kind(
        _JSON,
        files=(
            *("", "[]", "3", "{", "[" * 100_000, '{"a":' * 100_000, "{}", b"\xff\xfe", _sparse, os.mkfifo),
            *(_config(num_hidden_layers=n) for n in (10**6, 0, -1, 10**30, "2", 2.5, True, None, [2], 1e300)),
            *(_config(hidden_size=n) for n in (10**9, 65, "64")),
            *(_config(vocab_size=n) for n in (10**13, 0, {})),
            *(_config(tie_word_embeddings=word) for word in ("yes", 1, [True])),
            *(_config(rope_theta=word) for word in ("big", -1, True, 0)),
            *(_config(rms_norm_eps=word) for word in ("small", -1)),
            *(_config(num_local_experts=n) for n in (8,)),
            *(_config(max_position_embeddings=n) for n in ("long", -5, {})),
            *(_config(sliding_window=n) for n in ("wide", -5, [], 2.5)),
            *(_config(rope_scaling=word) for word in ("x", [1], {"type": "llama3"}, {"type": "yarn", "factor": "8"})),
            *(_config(model_type=word) for word in ("bert", 3, None, {"a": 1}, "mamba")),
            *(_config(num_key_value_heads=n) for n in (3, 8, "4")),
            *(_config(model_type="mixtral", num_local_experts=word) for word in ("8", None, -1, 2.5)),
            *(_config(model_type="gemma2", num_attention_heads=n) for n in (0, 10**6)),
            *(_config(model_type="qwen3", max_window_layers=word) for word in ("x", [1])),
            *(_config(hidden_act=word) for word in (3, ["silu"])),
        ),
        name="config.json",
    ),
    Kind(
        "data {}",
        ("", "tokenise", "inspect", "inspect nowhere", "inspect /", "check /etc/passwd", "merge a b"),
        statuses=_DATA,
    ),
    Kind("data tokenize nowhere --out {}", ("out", "/", "/proc/x", "", "a" * 300), statuses=_DATA),
    Kind(
        "data tokenize text.txt --out out {}",
        (
            "--train-bpe 1e30",
            "--train-bpe 0",
            "--tokenizer nowhere",
            "--workers 0",
            "--validation-fraction 2",
            "--workers x",
        ),
        files=("some text\n" * 50,),
        name="text.txt",
        statuses=_DATA,
    ),
    Kind(
        "data tokenize lines.jsonl --out out",
        files=("garbage", "[" * 100_000, "{}\n", ""),
        name="lines.jsonl",
        statuses=_DATA,
    ),
    Kind(
        "data inspect tokens",
        files=("", "[]", "3", "[" * 100_000, "{}", _sparse),
        name="tokens/tokens.json",
        statuses=_DATA,
    ),
    Kind("checkpoint {}", ("", "lst", "ls", "ls nowhere", "inspect /", "verify /etc/passwd"), statuses=_DATA),
    Kind(
        "checkpoint export {}",
        ("nowhere out", "/ out", "x", "nowhere out --dtype fp8", "nowhere out --max-shard-size x"),
        statuses=_DATA,
    ),
    Kind("checkpoint import {}", ("nowhere -o x.yaml", "/ -o x.yaml", "nowhere"), statuses=_DATA),
    Kind(
        "checkpoint inspect run",
        files=("", "[]", "3", "[" * 100_000, "{}", b"\xff", Path.mkdir, _sparse, os.mkfifo),
        name="run/checkpoints/step_00000001/manifest.json",
        statuses=_DATA,
    ),
    Kind(
        "check-layout {}", ("", "nowhere", "quickstart --layers 0", "quickstart --steps x", "quickstart --hidden 1e9")
    ),
    Kind(
        "check-layout quickstart {}",
        (
            "parallel.tp=5",
            "parallel.pp=x",
            "model.layers=0",
            "--model nowhere:build",
            "--layers 1000000000",
            "--hidden 100000000",
            "--steps 1000000000000",
        ),
    ),
)


def drawn(seed: int = 16, count: int = MISTAKES) -> list[Mistake]:
    """Returns so many different mistakes: one of each kind first, then kinds in proportion to what can be drawn."""
    draw = random.Random(seed)
    all_of = [list(_mistakes(kind)) for kind in KINDS]
    for each in all_of:
        draw.shuffle(each)
    rest = [mistake for each in all_of for mistake in each[1:]]
    return [*(each[0] for each in all_of), *draw.sample(rest, count - len(all_of))]


def _mistakes(kind: Kind) -> Iterator[Mistake]:
    for value in kind.values:
        words = kind.words.split()
        # A {} that is a word of its own stands for all words of the value, any other for the value as it is.
        split = [
            part for word in words for part in (shlex.split(value) if word == "{}" else [word.replace("{}", value)])
        ]
        for contents in kind.files:
            yield Mistake(tuple(split), kind.name, contents, kind.statuses)


def answer(mistake: Mistake) -> Answer:
    """Runs the command of a mistake, on a slow machine more than once, and says what is bad about its answer."""
    for _ in range(_TRIES):
        found = _answer(mistake)
        if not any("s, not" in fault for fault in found.faults):
            break
    return found


def _answer(mistake: Mistake) -> Answer:
    with tempfile.TemporaryDirectory(prefix="mistake-", ignore_cleanup_errors=True) as name:
        at = Path(name)
        (at / "tmp").mkdir()
        if mistake.name:
            _make(at / mistake.name, mistake.contents)
        before = _files(at)
        command, *words = mistake.words
        environ = {**os.environ, "HOME": name, "TMPDIR": f"{name}/tmp", "PYTHONPATH": os.getcwd(), "COLUMNS": "80"}
        began = time.monotonic()
        with (at / "tmp" / "said").open("w+b") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", _COMMANDS[command], *words],
                cwd=at,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                process.wait(1.5 * SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            seconds = time.monotonic() - began
            said.seek(0)
            text = said.read(1 << 16).decode(errors="replace")
        status, after = process.returncode, _files(at)
    faults = [
        f"{seconds:.0f} s, not {SECONDS:.0f}" if seconds > SECONDS else "",
        f"status {status}, not {mistake.statuses}" if status not in mistake.statuses else "",
        "traceback" if "Traceback" in text else "",
        f"{len(text.splitlines())} lines" if not 1 <= len(text.splitlines()) <= _LINES else "",
        f"a line of {max(map(len, text.splitlines()))}" if max(map(len, text.splitlines() or [""])) > _WIDTH else "",
        f"changes {sorted(before ^ after)[:3]}" if before != after else "",
    ]
    return Answer(status, seconds, text, tuple(fault for fault in faults if fault))


def _make(path: Path, contents: Contents) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(contents):
        contents(path)
    else:
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)


def _files(at: Path) -> set[str]:
    """Returns the files of a try, and those directly below the root; without what its command has printed, torch's own
    cache, and the folder with which `parallel3d-data tokenize` goes on."""
    own = {str(path.relative_to(at)) for path in at.rglob("*")}
    own = {name for name in own if not name.startswith(("tmp/said", "tmp/torchinductor", "out.partial"))}
    return own | {str(path) for path in Path("/").iterdir()}


def told(number: int, mistake: Mistake, found: Answer) -> str:
    """Returns a line for people: the mistake, and what is bad about its answer."""
    words = shlex.join(word if len(word) < 100 else f"{word[:40]}..." for word in mistake.words)
    contents = f" [{mistake.name}: {str(mistake.contents)[:60]!r}]" if mistake.name else ""
    return (
        f"{number}: {words}{contents}: {', '.join(found.faults) or 'good'}; {found.seconds:.1f} s; {found.text[:300]}"
    )


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:3]) if sys.argv[1:] else (0, MISTAKES)
    answers = [(number, each, answer(each)) for number, each in enumerate(drawn()) if first <= number < last]
    bad = [each for each in answers if each[2].faults]
    print("\n".join(told(*each) for each in bad))
    slowest = max(each[2].seconds for each in answers)
    print(f"{len(bad)} of {len(answers)} answered badly; the slowest took {slowest:.1f} s")
