"""From documents to two streams of tokens."""

from __future__ import annotations

from pathlib import Path

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import load_corpus
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
