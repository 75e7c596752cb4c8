"""Token ids in files: what is written is read, whatever the shards, and what is damaged is
found."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import check_data, load_corpus
from parallel3d.data.token_files import (
    FolderWriter,
    ShardTokenizer,
    TokensJson,
    open_tokens,
)
from parallel3d.data.windows import ShuffledWindows, TokenIds, TokensInMemory, TokenStream
from parallel3d.errors import ConfigError, DataError
from parallel3d.tools.data.folders import verify
from tests.data_files import read_all, write_folder, write_megatron

END = 50_000
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, END, length).astype(np.uint16) for length in RNG.integers(1, 60, 100)]


def joined(documents: list[TokenIds]) -> TokenIds:
    ended = [np.append(document, END) for document in documents]
    return np.concatenate(ended).astype(int)


def ids(stream: TokenStream) -> list[int]:
    return read_all(stream).tolist()


def write_all(folder: Path, *, vocab_size: int = END + 1, shard_tokens: int = 300) -> Path:
    train = DOCUMENTS[:90]
    validation = DOCUMENTS[90:]
    sizes = {"vocab_size": vocab_size, "shard_tokens": shard_tokens}
    return write_folder(folder, train, validation, end=END, **sizes)


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, "<u2"), (70_001, "<u4")])
def test_a_folder_has_the_documents_in_shards_and_says_what_they_are(
    tmp_path: Path, vocab_size: int, dtype: str
) -> None:
    header = TokensJson.read(write_all(tmp_path, vocab_size=vocab_size))
    assert json.loads((tmp_path / "tokens.json").read_text())["format"] == 1
    found = []
    for at, shard in enumerate(header.train):
        raw = (tmp_path / shard.file).read_bytes()
        content = np.frombuffer(raw, dtype=dtype)
        assert shard.file == f"train-{at:05}.bin"
        assert shard.tokens == len(content)
        assert shard.crc32 == zlib.crc32(raw)
        assert shard.documents == np.count_nonzero(content == END)
        found.append(content)
    assert len(header.train) > 5
    assert len(header.validation) == 1
    assert np.array_equal(np.concatenate(found), joined(DOCUMENTS[:90]))
    assert header.vocab_size == vocab_size
    assert header.largest_id == END
    assert header.end_of_text == END
    assert list(verify(tmp_path)) == []


def test_windows_of_shards_are_those_of_the_same_ids_in_memory(tmp_path: Path) -> None:
    # windows lie in up to three shards
    files = open_tokens(write_all(tmp_path, shard_tokens=40), 0.05)
    assert ids(files.validation) == joined(DOCUMENTS[90:]).tolist()
    in_memory = TokensInMemory(joined(DOCUMENTS[:90]))
    samples = np.array([0, 5, 3, 77, 10**6, 10**6 + 1, 2])
    drawn = [
        ShuffledWindows(stream, seq_len=70, seed=3).draw(samples)
        for stream in (files.train, in_memory)
    ]
    assert drawn[0].dtype == np.uint16
    assert np.array_equal(*drawn)


def test_an_id_that_the_vocabulary_has_not_is_refused(tmp_path: Path) -> None:
    for wrong in (-1, 10, 65_536):
        folder = FolderWriter(tmp_path, vocab_size=10, end_of_text=9)
        with pytest.raises(DataError, match=f"token ID {wrong}: must be from 0 to 9"), folder:
            folder.add("train", np.array([1, wrong, 9]))
    assert not (tmp_path / "tokens.json").exists()


def test_what_is_damaged_is_found(tmp_path: Path) -> None:
    header = TokensJson.read(write_all(tmp_path))
    shard = tmp_path / "train-00001.bin"
    raw = bytearray(shard.read_bytes())
    raw[10] ^= 1
    shard.write_bytes(raw)
    (fault,) = verify(tmp_path)
    assert fault.startswith(f"{shard}: crc32 is")
    TokensJson.write(replace(header, largest_id=7, vocab_size=8, end_of_text=3), tmp_path)
    faults = "; ".join(verify(tmp_path))
    assert "contains token ID 50000, but tokens.json has largest_id = 7, vocab_size = 8" in faults
    assert "0 document ends, but" in faults


def test_a_file_that_is_cut_is_found_at_the_start_and_one_that_shrinks_when_it_is_read(
    tmp_path: Path,
) -> None:
    files = open_tokens(write_all(tmp_path), 0.05)
    shard = tmp_path / "train-00000.bin"
    os.truncate(shard, 100)
    with pytest.raises(
        DataError, match=r"train-00000\.bin: shrank below 120 bytes while it was read"
    ):
        files.train.read(np.array([0]), 60)
    with pytest.raises(DataError, match=r"train-00000\.bin: has 100 bytes but must have"):
        open_tokens(tmp_path, 0.05)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00000\.bin: cannot be read \(No such file"):
        open_tokens(tmp_path, 0.05)
    (tmp_path / "tokens.json").write_text('{"format": 1, "dtype": "uint16"}')
    with pytest.raises(DataError, match=r"tokens\.json: damaged"):
        open_tokens(tmp_path, 0.05)


@pytest.mark.parametrize("fraction, validating", [(0.05, 5), (0.001, 1)])
def test_the_last_of_megatrons_documents_are_for_validation(
    tmp_path: Path, fraction: float, validating: int
) -> None:
    files = open_tokens(write_megatron(tmp_path / "corpus", DOCUMENTS, end=END), fraction)
    assert ids(files.train) == joined(DOCUMENTS[:-validating]).tolist()
    assert ids(files.validation) == joined(DOCUMENTS[-validating:]).tolist()


def test_what_is_no_data_set_of_megatrons_is_refused(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "corpus", DOCUMENTS, end=END)
    with pytest.raises(DataError, match=r"nothing: not a folder of tokens, and .*nothing\.idx"):
        open_tokens(tmp_path / "nothing", 0.05)
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    for content in (whole[:-1], whole[:-8], b"PK" + whole[2:], whole[:17] + b"\x06" + whole[18:]):
        index.write_bytes(content)
        with pytest.raises(DataError, match=r"not a Megatron index of version 1"):
            open_tokens(prefix, 0.05)
    index.write_bytes(whole)
    Path(f"{prefix}.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"corpus\.bin: has 0 bytes but must have"):
        open_tokens(prefix, 0.05)


def refusal(
    data: DataConfig, *, seq_len: int = 8, vocab: int = 50_008, samples_text: bool = False
) -> str:
    with pytest.raises(ConfigError) as caught:
        check_data(data, seq_len=seq_len, vocab=vocab, samples_text=samples_text)
    return str(caught.value)


def test_a_run_on_tokens_that_could_not_train_is_refused_before_it_starts(tmp_path: Path) -> None:
    data = DataConfig(source="tokens", path=str(write_all(tmp_path)))
    check_data(data, seq_len=8, vocab=END + 1)
    assert refusal(data, vocab=END) == (
        f"model.vocab = 50000: must be at least 50001, for the IDs of data.path = {tmp_path}; try "
        "50008"
    )
    validation = len(joined(DOCUMENTS[90:]))
    check_data(data, seq_len=validation - 1, vocab=END + 1)
    assert f"for validation has {validation}; try train.seq_len={validation - 1}" in refusal(
        data, seq_len=validation
    )
    assert "must be a tokenizer.json if data.path" in refusal(data, samples_text=True)


def test_documents_end_by_the_id_that_the_files_or_their_tokenizer_name(tmp_path: Path) -> None:
    data = DataConfig(source="tokens", path=str(write_all(tmp_path)))
    assert load_corpus(data).document_end is None
    assert load_corpus(replace(data, documents="mask")).document_end == END
    assert load_corpus(DataConfig(documents="mask")).document_end == 256
    megatron = replace(
        data,
        path=str(write_megatron(tmp_path / "theirs", DOCUMENTS, end=END)),
        documents="mask",
    )
    assert refusal(megatron) == (
        f"data.documents = mask: data.path = {megatron.path} does not specify the end-of-text ID; "
        "try data.tokenizer=tokenizer.json, the path of its tokenizer, or "
        "data.documents=join"
    )


def test_the_tokenizer_follows_from_the_folder(tmp_path: Path) -> None:
    text = np.frombuffer(b"some text", dtype=np.uint8)
    write_folder(tmp_path, [text], [text], tokenizer=ShardTokenizer(kind="bytes"))
    data = DataConfig(source="tokens", path=str(tmp_path))
    check_data(data, seq_len=8, vocab=264, samples_text=True)
    corpus = load_corpus(data)
    shown = corpus.tokenizer.decode(corpus.train.read(np.array([0]), 10)[0])
    assert shown == "some text<|end_of_text|>"
    assert "and must not be set if it does" in refusal(
        replace(data, tokenizer="mine.json"), samples_text=True
    )
