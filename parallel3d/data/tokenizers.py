"""Tokenizers: text to ids and back. `bytes` is built in, fits any text and needs no vocabulary
file; a tokenizer.json is read by the library `tokenizers`."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallel3d.data.windows import TokenIds
from parallel3d.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tokenizers

# The names that published tokenizers give the end of a text, in the order in which they are looked
# for.
END_OF_TEXT_MARKS = (
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|endofdocument|>"),
    *("</s>", "<eos>", "<|eos|>", "[EOS]"),
)


def ids_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the smallest of uint16 and uint32 that holds the ids 0 to `vocab_size` - 1."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


@dataclass(frozen=True)
class ByteTokenizer:
    """One token for each byte (ids 0 to 255), and `end_of_text` (256)."""

    vocab_size: int = 257
    end_of_text: int = 256
    # how `decode` shows it: a reader of a sample wants to see the border
    end_of_text_mark: str = "<|end_of_text|>"

    def encode(self, text: bytes | str) -> NDArray[np.uint16]:
        """Returns the bytes of `text` as ids; they need not be UTF-8."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of `ids`. Broken UTF-8 and ids that a padded vocabulary adds become
        U+FFFD."""
        flat = np.asarray(ids, dtype=np.int64).ravel()
        is_byte = (flat >= 0) & (flat < 256)
        # 0xFF occurs in no UTF-8 text, so it decodes to U+FFFD
        raw = np.where(is_byte, flat, 0xFF).astype(np.uint8)
        ends = np.flatnonzero(flat == self.end_of_text)
        pieces = np.split(raw, ends)
        # each later piece begins with the end_of_text
        texts = [pieces[0], *(piece[1:] for piece in pieces[1:])]
        return self.end_of_text_mark.join(
            piece.tobytes().decode(errors="replace") for piece in texts
        )

    def files_for_transformers(self) -> dict[str, bytes]:
        """Returns a byte-level BPE without merges, whose ids are the bytes."""
        # Byte-level BPEs spell a byte by a letter that can be printed: itself, or the next one from
        # U+0100 on.
        printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = iter(range(0x100, 0x200))
        vocabulary = {chr(byte if byte in printed else next(others)): byte for byte in range(256)}
        mark = self.end_of_text_mark
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        end = {"id": self.end_of_text, "content": mark, "special": True, "normalized": False}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        return {"tokenizer.json": json.dumps(tokenizer).encode(), **_tokenizer_config(mark)}


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer.json. It adds no special tokens of its own, such as a beginning of text, and cuts
    and pads nothing, whatever the file says of them."""

    path: Path
    vocab_size: int
    end_of_text: int
    sha256: str  # the file's
    library: tokenizers.Tokenizer = field(repr=False, compare=False)

    def encode(self, text: bytes | str) -> TokenIds:
        """Returns the ids of `text`. Parts of a character at either end of bytes, where a file was
        cut in two, are left out. Raises UnicodeDecodeError for other bytes that are no UTF-8."""
        if isinstance(text, bytes):
            whole_from = next((at for at, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)
            text = codecs.getincrementaldecoder("utf-8")().decode(text[whole_from:])
        return np.array(
            self.library.encode(text, add_special_tokens=False).ids,
            dtype=ids_dtype(self.vocab_size),
        )

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Returns the ids of each of `texts`, on all cores unless TOKENIZERS_PARALLELISM=false."""
        dtype = ids_dtype(self.vocab_size)  # np.array refuses an id that does not fit
        found = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=dtype) for each in found]

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of `ids`, special tokens by their names. Ids beyond the vocabulary are
        left out."""
        flat = np.asarray(ids, dtype=np.int64).ravel()
        return self.library.decode(
            flat[(flat >= 0) & (flat < self.vocab_size)].tolist(), skip_special_tokens=False
        )

    def files_for_transformers(self) -> dict[str, bytes]:
        """Returns the file itself and those that published tokenizers have beside it. Raises
        DataError where the file cannot be read."""
        files = _tokenizer_config(self.library.id_to_token(self.end_of_text) or "")
        try:
            beside = (self.path.with_name(name) for name in TOKENIZER_FILES[1:])
            files |= {path.name: path.read_bytes() for path in beside if path.is_file()}
            return files | {"tokenizer.json": self.path.read_bytes()}
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error


# Text to ids and back, whatever made the vocabulary. `vocab_size` is one more than the largest id;
# `end_of_text` ends every document, and `encode` never gives it: text that spells it stays text.
Tokenizer = ByteTokenizer | JsonTokenizer

# A tokenizer.json, and what published tokenizers have next to it, which readers of the slower form
# need.
TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
    ),
    *("merges.txt", "tokenizer.model", "chat_template.jinja"),
)


def _tokenizer_config(end_of_text: str) -> dict[str, bytes]:
    """Returns the file that tells transformers which class reads a tokenizer.json, and what ends a
    text."""
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_text,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer_config.json": (json.dumps(said, indent=2) + "\n").encode()}


def import_extra(library: str, needed_by: str, or_else: str = "") -> Any:
    """Imports a library of the extra `data`. Raises ConfigError, with the line that installs it,
    where it is missing; `needed_by` begins the error, and `or_else` names a way without the
    library."""
    try:
        return import_module(library)
    except ImportError:
        instead = f", or {or_else}" if or_else else ""
        raise ConfigError(
            f"{needed_by}: needs the library {library.partition('.')[0]}; try pip install "
            f"'parallel3d[data]', in a clone pip install -e '.[data]'{instead}"
        ) from None


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Returns the tokenizer.json of a byte-level BPE (GPT-2's) that is trained on `texts`: 256
    bytes, an end of text, and merges until there are `vocab_size` ids or nothing is left to merge.
    Equal texts give equal files."""
    library = import_extra("tokenizers", "a BPE")
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT_MARKS[0]],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer.to_str()


def build_tokenizer(
    name: str,
    mark: str | None = None,
    *,
    key: str = "data.tokenizer",
    mark_key: str = "data.end_of_text",
) -> Tokenizer:
    """Returns the tokenizer `name`: bytes, or the path of a tokenizer.json. `mark` is the token of
    that file that ends a document; None: the first of END_OF_TEXT_MARKS among its special tokens.
    `key` and `mark_key` are what a user has set, for the errors. Raises ConfigError for a tokenizer
    that is not there, cannot be read, or has no such token."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            f"{key} = {name}: must be bytes or the path of a tokenizer.json, and there is no such "
            f"file{where}; try bytes"
        )
    library_module = import_extra("tokenizers", f"{key} = {name}", or_else="bytes")
    try:
        content = path.read_bytes()
        library = library_module.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(
            f"{key} = {name}: cannot be read as a tokenizer.json ({error}); try the file that "
            "tokenizers saves"
        ) from None
    vocabulary = library.get_vocab(with_added_tokens=True)
    special = {
        token.content for token in library.get_added_tokens_decoder().values() if token.special
    }
    if mark is None:
        mark = next((each for each in END_OF_TEXT_MARKS if each in special), None)
        if mark is None:
            known = ", ".join(sorted(special)[:8]) or "none at all"
            raise ConfigError(
                f"{key} = {name}: its special tokens ({known}) have no end of text that is known, "
                f"which ends every document; try {mark_key}=TOKEN, a token of that file"
            )
    if mark not in vocabulary:
        tries = ", ".join(sorted(special)[:8]) or "one of its tokens"
        raise ConfigError(f"{mark_key} = {mark}: must be a token of {key} = {name}; try {tries}")
    library.add_special_tokens([mark])  # it keeps its id
    library.encode_special_tokens = True  # text that spells a special token stays text
    library.no_truncation()
    library.no_padding()
    return JsonTokenizer(
        path=path,
        vocab_size=max(vocabulary.values()) + 1,
        end_of_text=vocabulary[mark],
        sha256=hashlib.sha256(content).hexdigest(),
        library=library,
    )
