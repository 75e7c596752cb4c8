"""The check of the data before a run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import check_data, load_corpus
from parallel3d.errors import ConfigError, DataError


def text_data(tmp_path: Path, content: bytes, name: str = "corpus.txt") -> DataConfig:
    path = tmp_path / name
    path.write_bytes(content)
    return DataConfig(source="text", path=str(path))


def refusal(data: DataConfig, *, seq_len: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        check_data(data, seq_len=seq_len, vocab=264)
    return str(caught.value)


def test_text_one_token_short_of_a_window_is_refused_and_its_suggestion_is_accepted(
    tmp_path: Path,
) -> None:
    data = text_data(tmp_path, b"x" * 1000)  # 950 and 50 bytes, each with an end_of_text
    check_data(data, seq_len=50, vocab=264)
    assert refusal(data, seq_len=51) == (
        f"train.seq_len = 51: needs windows of seq_len + 1 = 52 tokens, but "
        f"data.path = {data.path} for validation has 51; try train.seq_len=50, or more text"
    )
    check_data(replace(data, validation_fraction=0.1), seq_len=51, vocab=264)


def test_the_check_counts_the_tokens_that_loading_gives(tmp_path: Path) -> None:
    for index in range(6):
        text_data(tmp_path, b"x" * (index + 1), f"{index}.txt")
    data = DataConfig(
        source="text",
        path=str(tmp_path),
        validation_fraction=0.3,
    )
    corpus = load_corpus(data)
    shorter = min(len(corpus.train), len(corpus.validation))
    check_data(data, seq_len=shorter - 1, vocab=264)
    assert f" has {shorter}; try" in refusal(data, seq_len=shorter)


def test_a_file_that_cannot_be_read_is_found_though_the_window_is_full_before_it(
    tmp_path: Path,
) -> None:
    for index in range(20):
        text_data(tmp_path, b"x" * 100, f"{index:02}.txt")
    (tmp_path / "zz.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"zz\.txt: cannot be read \(No such file or directory\)"):
        check_data(DataConfig(source="text", path=str(tmp_path)), seq_len=8, vocab=264)
