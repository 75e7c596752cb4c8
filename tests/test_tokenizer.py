"""Bytes to ids and back, and what a sample shows where ids are not text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data.corpus import ByteTokenizer, build_tokenizer
from parallel3d.errors import ConfigError

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == len(text.encode())


@given(st.binary())
def test_ids_are_the_bytes_and_never_end_of_text(raw: bytes) -> None:
    ids = TOKENIZER.encode(raw)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(raw)


@given(st.lists(st.integers(-1, 300)))
def test_any_ids_print(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids).count("<|end_of_text|>") >= ids.count(TOKENIZER.end_of_text)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([256], "<|end_of_text|>"),
        ([97, 256, 98, 256], "a<|end_of_text|>b<|end_of_text|>"),
        ([97, 0xC3], "a\ufffd"),  # half of a character
        ([0xC3, 0xA9], "é"),
        ([97, 257, 263, 98], "a\ufffd\ufffdb"),  # ids of a padded vocabulary
    ],
)
def test_decoding(ids: list[int], text: str) -> None:
    assert TOKENIZER.decode(ids) == text


def test_text_that_spells_the_mark_is_not_an_end_of_text() -> None:
    assert TOKENIZER.end_of_text not in TOKENIZER.encode("<|end_of_text|>")


def test_end_of_text_is_the_last_id() -> None:
    assert TOKENIZER.end_of_text == TOKENIZER.vocab_size - 1 == 256


def test_tokenizers_are_built_by_name() -> None:
    assert build_tokenizer("bytes") == TOKENIZER
    with pytest.raises(ConfigError, match=r"^data\.tokenizer = bpe: no such tokenizer; try bytes$"):
        build_tokenizer("bpe")
