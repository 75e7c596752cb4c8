"""From documents to two streams of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import check_data, load_corpus
from parallel3d.data.windows import TokenIds, TokenStream
from parallel3d.errors import ConfigError, DataError
from parallel3d.tools.data.encode import train_bpe


def ids(stream: TokenStream) -> TokenIds:
    return stream.read(np.zeros(1, dtype=np.int64), len(stream))[0]


def test_documents_are_joined_each_with_its_end_of_text(tmp_path: Path) -> None:
    texts = {f"{letter}.txt": letter * 3 for letter in "abcdefgh"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    corpus = load_corpus(DataConfig(source="text", path=str(tmp_path), validation_fraction=0.25))
    streams = (corpus.train, corpus.validation)
    parts = [corpus.tokenizer.decode(ids(stream)).split("<|end_of_text|>") for stream in streams]
    for part in parts:
        assert part.pop() == ""
    for part in parts:
        assert part == sorted(part)
        assert part
    assert sorted(parts[0] + parts[1]) == sorted(texts.values())


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
    decoded = [corpus.tokenizer.decode(ids(part)) for part in (corpus.train, corpus.validation)]
    assert sorted("".join(decoded).split("<|endoftext|>")) == ["", *texts.values()]
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
