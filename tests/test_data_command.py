"""`parallel3d-data`: text of any form becomes the same tokens, whoever stops it, and a damaged
folder is told."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.data.token_files import TokensJson, open_tokens
from parallel3d.data.tokenizers import build_tokenizer
from parallel3d.tools.data import encode, inputs, job
from parallel3d.tools.data.command import main
from parallel3d.tools.data.encode import train_bpe
from tests.data_files import read_all
from tests.plan_json import Said, error_line

pytest.importorskip("tokenizers", reason="a BPE is trained and read by the library tokenizers")
WORDS = ["the", "of", "and", "to", "in", "that", "was", "with", "not", "αβγ", *map(str, range(30))]
SEPARATOR = "<|endoftext|>"


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) for _ in range(count)]


def write_lines(path: Path, documents: Sequence[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(documents))
    )
    return path


def run(*words: object) -> int:
    return main([str(word) for word in words])


def tokenize(*words: object) -> int:
    """Runs `tokenize` in this process."""
    return run("tokenize", *words, "--workers", 1)


def tokenized(out: Path, *words: object) -> Path:
    """Runs `tokenize` in this process and returns its folder."""
    assert tokenize(*words, "--out", out) == 0
    assert not out.with_name(f"{out.name}.partial").exists()
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(folder: Path, part: str) -> list[str]:
    """Decodes all documents of a part, by the folder's own words on its tokenizer."""
    header = TokensJson.read(folder)
    assert header.tokenizer is not None
    file = header.tokenizer.file
    tokenizer = build_tokenizer(
        "bytes" if file is None else str(folder / file), header.tokenizer.end_of_text
    )
    stream = getattr(open_tokens(folder, 0.0), part)
    ids = read_all(stream)
    borders = np.flatnonzero(ids == tokenizer.end_of_text)
    assert borders[-1] == len(ids) - 1
    pieces = np.split(ids, borders + 1)[:-1]
    return [tokenizer.decode(piece[:-1]) for piece in pieces]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a few documents, so that small texts have many."""
    monkeypatch.setattr(inputs, "PIECE_CHARACTERS", 2_000)


def test_each_document_comes_once_and_equal_texts_go_to_the_same_part(tmp_path: Path) -> None:
    originals = [*texts(60), *texts(20)]  # the last 20 are there twice
    source = write_lines(tmp_path / "a.jsonl", originals)
    folder = tokenized(tmp_path / "tokens", source, "--validation-fraction", "0.3")
    train = documents(folder, "train")
    validation = documents(folder, "validation")
    assert sorted(train + validation) == sorted(originals)
    assert not set(train) & set(validation)
    assert 8 < len(validation) < 40
    assert train == [text for text in originals if text in set(train)]  # in the order of the input
    assert run("check", folder) == 0


def test_all_forms_of_the_same_text_give_the_same_files(tmp_path: Path) -> None:
    originals = texts(80)
    plain = write_lines(tmp_path / "a.jsonl", originals)
    expected = content(tokenized(tmp_path / "lines", plain))
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(originals):
        (tmp_path / "folder" / f"{number:03}.md").write_text(text)
    raw = plain.read_bytes()
    half = raw.index(b"\n", len(raw) // 2) + 1
    (tmp_path / "a.JSONL.GZ").write_bytes(gzip.compress(raw[:half]) + gzip.compress(raw[half:]))
    for name in ("folder", "a.JSONL.GZ"):
        assert content(tokenized(tmp_path / f"tokens-{name}", tmp_path / name)) == expected, name
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": range(80), "text": originals})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=13)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    with arrow.ipc.new_stream(str(tmp_path / "saved" / "data-0.arrow"), table.schema) as stream:
        stream.write_table(table, 13)
    frames = [bytes(arrow.compress(part, "zstd")) for part in (raw[:half], raw[half:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    for name in ("a.parquet", "saved", "a.jsonl.zst"):
        assert content(tokenized(tmp_path / f"tokens-{name}", tmp_path / name)) == expected, name


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bpe_is_trained_on_the_text_and_encodes_as_its_library_does(
    tmp_path: Path, workers: int
) -> None:
    originals = texts(60)
    source = write_lines(tmp_path / "a.jsonl", originals)
    words = (
        "tokenize",
        source,
        "--train-bpe",
        300,
        "--out",
        tmp_path / "tokens",
        "--validation-fraction",
        0,
    )
    assert run(*words, "--workers", workers) == 0
    assert (tmp_path / "tokens" / "tokenizer.json").read_text() == train_bpe(originals, 300)
    header = TokensJson.read(tmp_path / "tokens")
    assert header.vocab_size == 300
    assert header.dtype == "uint16"
    assert header.validation == ()
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(
        str(tmp_path / "tokens" / "tokenizer.json")
    )
    expected = [id for found in library.encode_batch(originals) for id in (*found.ids, 0)]
    stream = open_tokens(tmp_path / "tokens", 0.0).train
    assert read_all(stream).tolist() == expected


def test_a_long_text_is_encoded_in_slices_with_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(texts(100)) + "\n\n  indented\n\n\n" + "\n".join(texts(100, seed=1))
    (tmp_path / "tokenizer.json").write_text(train_bpe([text], 400))
    choice = encode.TokenizerChoice(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(encode, "_MOST_CHARACTERS", 500)
    slices = encode._slices(text, choice)
    assert "".join(slices) == text
    assert 20 < len(slices) < len(text) / 500
    tokenizer = choice.build()
    ids = np.concatenate([tokenizer.encode(each) for each in slices])
    assert np.array_equal(ids, tokenizer.encode(text))


# What an interruption leaves.


def test_a_job_goes_on_after_what_was_done_and_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(100))
    whole = content(tokenized(tmp_path / "whole", source, "--train-bpe", 300))
    encoded: list[Path] = []
    limit = 4
    changed = source.stat().st_mtime_ns

    def encode_or_stop(*piece: Any) -> None:
        if len(encoded) == limit:
            raise KeyboardInterrupt
        encoded.append(piece[-1])
        encode.encode_piece(*piece)

    command = (source, "--out", tmp_path / "cut", "--train-bpe", 300)
    monkeypatch.setattr(job, "encode_piece", encode_or_stop)
    assert tokenize(*command) == 130
    assert not (tmp_path / "cut").exists()
    # a worker was killed while writing
    (tmp_path / "cut.partial" / "chunks" / "00000007.unfinished").write_bytes(b"half")
    capsys.readouterr()
    assert tokenize(*command, "--validation-fraction", 0.2) == 2
    assert "the unfinished work of another command" in capsys.readouterr().err
    os.utime(source, (1, 1))  # an input that has changed since
    assert tokenize(*command) == 2
    os.utime(source, ns=(changed, changed))
    limit = 1000
    assert tokenize(*command) == 0
    assert content(tmp_path / "cut") == whole
    assert len(set(encoded)) == len(encoded) > 4


@pytest.mark.long
def test_killed_at_20_random_moments_the_files_are_the_same(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(20_000))
    whole = content(tokenized(tmp_path / "whole", source, "--train-bpe", 500))
    program = (
        "import sys\nfrom parallel3d.tools.data import command, inputs\nif __name__ == "
        "'__main__':\n    inputs.PIECE_CHARACTERS = 20_000\n    sys.exit(command.main())\n"
    )
    (tmp_path / "program.py").write_text(program)
    words = ["tokenize", source, "--train-bpe", 500, "--out", tmp_path / "cut", "--workers", 2]
    command = [sys.executable, str(tmp_path / "program.py"), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    draw = random.Random(0)
    kills = 0
    ends = 0
    while kills < 20 or not ends:
        process = subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert process.wait(timeout=draw.uniform(0.3, 4)) == 0
            assert (tmp_path / "cut").exists()
        except subprocess.TimeoutExpired:
            if draw.random() < 0.5:
                process.kill()  # the command alone: its workers have to end by themselves
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
        if (tmp_path / "cut").exists():  # A kill may come after the last file.
            assert content(tmp_path / "cut") == whole
            assert not (tmp_path / "cut.partial").exists()
            shutil.rmtree(tmp_path / "cut")  # the next one starts anew
            ends += 1


# What is refused.


@pytest.mark.parametrize(
    "name, raw, says",
    [
        (
            "a.txt",
            b"\x89PNG\r\n\x1a\n\x00",
            "a.txt: not text (byte 0 is not UTF-8); convert it or leave it out",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            "a.jsonl, line 2: not valid JSON (Expecting value",
        ),
        (
            "a.jsonl",
            b'{"body": "a"}\n',
            "a.jsonl, line 1: has no field text, but body; try --field body",
        ),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl, line 1: text must be text, but is null"),
        (
            "a.jsonl",
            b'{"text": "\\ud800"}\n',
            "a.jsonl, line 1: text contains an unpaired surrogate",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n', mtime=0)[:-9],
            "a.jsonl.gz: cannot be read (",
        ),
        ("a.parquet", b"no parquet", "a.parquet: cannot be read ("),
    ],
)
def test_an_input_that_is_not_what_it_should_be_is_told_with_its_place(
    tmp_path: Path, capsys: Said, name: str, raw: bytes, says: str
) -> None:
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(raw)
    assert tokenize(tmp_path / name, "--out", tmp_path / "tokens") == 65
    assert says in error_line(capsys)


@pytest.mark.parametrize(
    "words, says",
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (
            ["a.jsonl", "--train-bpe", "200"],
            "--train-bpe 200: must be at least 257 and",
        ),
        (
            ["a.jsonl", "--validation-fraction", "1"],
            "--validation-fraction 1: leaves no training data; try 0.05",
        ),
        (
            [".", "--pattern", "*.rst"],
            "none of its 1 files has a known format or matches --pattern *.rst; try --pattern '*'",
        ),
        (
            ["a.jsonl", "--out", "a.jsonl"],
            "--out a.jsonl: exists already; try another name, or delete it",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", texts(5))
    out = [] if "--out" in words else ["--out", "tokens"]
    assert tokenize(*words, *out) == 2
    assert says in error_line(capsys)
    assert not (tmp_path / "tokens").exists()


# What is in a folder.


def test_inspect_tells_what_a_folder_holds(tmp_path: Path, capsys: Said) -> None:
    originals = texts(40)
    folder = tokenized(tmp_path / "tokens", write_lines(tmp_path / "a.jsonl", originals))
    capsys.readouterr()
    assert run("inspect", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    tokens = sum(len(text.encode()) + 1 for text in originals)
    assert found["tokens"] == tokens == sum(part["tokens"] for part in found["parts"].values())
    assert found["documents"] == 40
    assert found["mean_document_tokens"] == tokens / 40
    assert found["vocab_size"] == 257
    assert found["end_of_text"] == 256
    assert found["dtype"] == "uint16"
    assert run("inspect", folder) == 0
    assert f"{tokens:,} tokens in 40 documents" in capsys.readouterr().out


def test_check_shows_three_documents_and_finds_what_is_damaged(
    tmp_path: Path, capsys: Said
) -> None:
    originals = texts(40)
    source = write_lines(tmp_path / "a.jsonl", originals)
    folder = tokenized(tmp_path / "tokens", source, "--train-bpe", 300)
    capsys.readouterr()
    assert run("check", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == []
    assert found["samples"]
    starts = [sample.partition(SEPARATOR)[0] for sample in found["samples"]]
    for start in starts:
        assert any(text.startswith(start) for text in originals)
    shard = folder / "train-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[10] ^= 1
    shard.write_bytes(raw)
    assert run("check", folder) == 65
    assert "train-00000.bin: crc32 is" in capsys.readouterr().out
    raw[10] ^= 1
    shard.write_bytes(raw[:-2])
    assert run("check", folder) == 65
    assert "train-00000.bin: has" in capsys.readouterr().out
    shard.write_bytes(raw)
    (folder / "tokenizer.json").write_text(train_bpe(["other text"], 260))
    assert run("check", folder) == 65
    assert (
        "tokenizer.json: does not match the tokenizer that produced these"
        in capsys.readouterr().out
    )
    assert run("check", tmp_path) == 65


def test_folders_of_one_tokenizer_are_joined(tmp_path: Path, capsys: Said) -> None:
    sources = [write_lines(tmp_path / f"{n}.jsonl", texts(30, seed=n)) for n in range(2)]
    first = tokenized(tmp_path / "first", sources[0], "--train-bpe", 280)
    # told, and found in the first
    told = ("--tokenizer", first / "tokenizer.json", "--end-of-text", SEPARATOR)
    second = tokenized(tmp_path / "second", sources[1], *told)
    assert run("merge", first, second, "--out", tmp_path / "both") == 0
    for part in ("train", "validation"):
        assert documents(tmp_path / "both", part) == documents(first, part) + documents(
            second, part
        )
    assert run("check", tmp_path / "both") == 0
    assert run("merge", first, second, "--out", tmp_path / "both") == 2
    other = tokenized(tmp_path / "other", sources[1])
    capsys.readouterr()
    assert run("merge", first, other, "--out", tmp_path / "all") == 2
    assert f"{other}: tokenizer is bytes, but " in capsys.readouterr().err
    (first / "train-00000.bin").write_bytes(bytes((first / "train-00000.bin").stat().st_size))
    assert run("merge", first, second, "--out", tmp_path / "all") == 65
    assert not (tmp_path / "all").exists()


# What files of strangers may do, and what an error leaves behind.


def test_text_that_is_not_utf_8_is_refused_or_repaired_if_asked(
    tmp_path: Path, capsys: Said
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("\ufeffa good text")
    (folder / "b.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (folder / "c.txt").write_bytes(b"text\0text")
    assert tokenize(folder, "--out", tmp_path / "tokens") == 65
    assert "b.txt: not text (byte 3 is not UTF-8)" in capsys.readouterr().err
    # which would refuse the command that the error advises
    assert not (tmp_path / "tokens.partial").exists()
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b'{"text": "x\xff"}\n\n{"text": "good"}\n')
    options = ("--errors", "replace", "--validation-fraction", 0)
    repaired = tokenized(tmp_path / "lines", lines, folder, *options)
    expected = ["x\ufffd", "good", "a good text", "caf\ufffd", "text\ufffdtext"]
    assert documents(repaired, "train") == expected


def test_a_document_without_an_end_is_refused_with_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setattr(inputs, "_MOST_BYTES", 4_000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 200 + b'{"text": "' + b"a" * 9_000))
    assert tokenize(path, "--out", tmp_path / "tokens") == 65
    assert "a.jsonl.gz, line 201: longer than" in capsys.readouterr().err
