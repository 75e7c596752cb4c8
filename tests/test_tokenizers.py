"""Bytes to ids and back, and what a sample shows where ids are not text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data.tokenizers import ByteTokenizer, JsonTokenizer, build_tokenizer
from parallel3d.errors import ConfigError
from parallel3d.tools.data.encode import train_bpe

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


@pytest.mark.parametrize(
    "ids, text",
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


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    """A small BPE with 275 ids, of English and a little Greek."""
    pytest.importorskip("tokenizers", reason="tokenizer.json is read by the library tokenizers")
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(
        train_bpe(["the cat sat on the mat, then the other cat sat there ", "αβγ αβγ"] * 4, 275)
    )
    found = build_tokenizer(str(path))
    assert isinstance(found, JsonTokenizer)
    return found


def edited(bpe: JsonTokenizer, folder: Path, **changes: object) -> Path:
    """Writes the file of `bpe` with some of its sections replaced."""
    path = folder / "edited.json"
    path.write_text(json.dumps(json.loads(bpe.path.read_text()) | changes))
    return path


@given(st.text())
def test_any_text_comes_back_from_a_bpe(bpe: JsonTokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert np.array_equal(bpe.encode(text.encode()), ids)


def test_text_that_spells_a_special_token_stays_text(bpe: JsonTokenizer) -> None:
    spelled = bpe.encode("<|endoftext|>")
    assert bpe.end_of_text not in spelled
    assert len(spelled) > 5
    assert bpe.decode([*spelled, bpe.end_of_text]) == "<|endoftext|>" * 2


def test_a_file_that_is_cut_inside_a_character_loses_that_character_alone(
    bpe: JsonTokenizer,
) -> None:
    raw = "αβγ".encode()
    assert bpe.decode(bpe.encode(raw[:3])) == "α"
    assert bpe.decode(bpe.encode(raw[3:])) == "γ"
    with pytest.raises(UnicodeDecodeError):
        bpe.encode(b"caf\xe9 au lait")


def test_what_a_file_says_of_cutting_padding_and_first_tokens_is_not_done(
    bpe: JsonTokenizer, tmp_path: Path
) -> None:
    library = bpe.library.from_file(str(bpe.path))
    library.enable_truncation(2)
    library.enable_padding(length=64)
    template = pytest.importorskip("tokenizers.processors").TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    library.post_processor = template
    library.save(str(tmp_path / "tokenizer.json"))
    assert len(library.encode("the cat sat").ids) == 64
    text = "the cat sat on the mat"
    assert (
        build_tokenizer(str(tmp_path / "tokenizer.json")).encode(text).tolist()
        == bpe.encode(text).tolist()
    )


def test_the_end_of_a_text_is_found_by_its_name_or_told(bpe: JsonTokenizer, tmp_path: Path) -> None:
    added = json.loads(bpe.path.read_text())["added_tokens"]
    path = edited(bpe, tmp_path, added_tokens=[{**added[0], "special": False}])
    with pytest.raises(ConfigError, match=r"must be the token .* special tokens are none at all"):
        build_tokenizer(str(path))
    told = build_tokenizer(str(path), "<|endoftext|>")
    assert told.end_of_text == 0
    assert 0 not in told.encode("a<|endoftext|>b")
    words = r"^data\.end_of_text = </s>: must be the token of .* tokens are <\|endoftext\|>$"
    with pytest.raises(ConfigError, match=words):
        build_tokenizer(str(bpe.path), "</s>")


def test_tokenizers_are_built_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizer.json is read by the library tokenizers")
    assert build_tokenizer("bytes") == TOKENIZER
    with pytest.raises(
        ConfigError, match=r"^data\.tokenizer = bpe: must be bytes or the path of .* try bytes$"
    ):
        build_tokenizer("bpe")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read \(.*\); try bytes$"):
        build_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_missing_library_is_said_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = (
        "the library tokenizers; try pip install 'parallel3d[data]', or in a clone pip install -e "
        "'.[data]'"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_tokenizer(str(tmp_path / "tokenizer.json"))
