"""From documents to two streams of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import check_data, load_corpus
from parallel3d.errors import ConfigError, DataError
from parallel3d.tools.data.encode import train_bpe
from tests.data_files import read_all


def test_documents_are_joined_each_with_its_end_of_text(tmp_path: Path) -> None:
    texts = {f"{letter}.txt": letter * 3 for letter in "abcdefgh"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    corpus = load_corpus(DataConfig(source="text", path=str(tmp_path), validation_fraction=0.25))
    found = []
    for stream in (corpus.train, corpus.validation):
        part = corpus.tokenizer.decode(read_all(stream)).split("<|end_of_text|>")
        assert part.pop() == ""
        assert part == sorted(part)
        assert part
        found += part
    assert sorted(found) == sorted(texts.values())


def test_a_corpus_is_read_with_a_tokenizer_of_the_users_own(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizer.json is read by the library tokenizers")
    texts = {f"{letter}.txt": f"the {letter} sat on the mat" for letter in "abcdefgh"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bpe.json").write_text(train_bpe(texts.values(), 265))
    config = DataConfig(
        source="text",
        path=str(tmp_path),
        tokenizer=str(tmp_path / "bpe.json"),
    )
    corpus = load_corpus(config)
    decoded = ""
    for stream in (corpus.train, corpus.validation):
        decoded += corpus.tokenizer.decode(read_all(stream))
    assert sorted(decoded.split("<|endoftext|>")) == ["", *texts.values()]
    check_data(config, seq_len=4, vocab=265)
    with pytest.raises(
        ConfigError, match=r"^model\.vocab = 264: must be at least 265, for the ids of"
    ):
        check_data(config, seq_len=4, vocab=264)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(
        DataError,
        match=r"b\.txt: is no text in UTF-8 \(.*\); convert it .* try data\.tokenizer=bytes",
    ):
        load_corpus(config)
