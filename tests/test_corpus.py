"""From documents to two streams of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import load_corpus


def test_documents_are_joined_each_with_its_end_of_text(tmp_path: Path) -> None:
    texts = {f"{letter}.txt": letter * 3 for letter in "abcdefgh"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    corpus = load_corpus(DataConfig(source="text", path=str(tmp_path), validation_fraction=0.25))
    parts = [corpus.tokenizer.decode(stream).split("<|end_of_text|>") for stream in (corpus.train, corpus.validation)]
    assert all(part.pop() == "" for part in parts)
    assert all(part == sorted(part) and part for part in parts)
    assert sorted(parts[0] + parts[1]) == sorted(texts.values())


def test_a_single_file_keeps_its_end_for_validation(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("0123456789")
    corpus = load_corpus(DataConfig(source="text", path=str(tmp_path / "one.txt"), validation_fraction=0.3))
    assert corpus.tokenizer.decode(corpus.train) == "0123456<|end_of_text|>"
    assert corpus.tokenizer.decode(corpus.validation) == "789<|end_of_text|>"


def test_bytes_that_are_no_utf8_are_kept(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(256)))
    corpus = load_corpus(DataConfig(source="text", path=str(tmp_path / "one.txt"), validation_fraction=0.5))
    assert corpus.train.tolist() == [*range(128), 256]


def test_the_standard_library_makes_a_corpus_of_some_megabytes_the_same_each_time() -> None:
    first, second = load_corpus(DataConfig()), load_corpus(DataConfig())
    assert first.train.dtype == first.validation.dtype == np.uint16
    assert len(first.train) > 5_000_000
    assert 0.01 < len(first.validation) / len(first.train) < 0.2
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.validation, second.validation)
