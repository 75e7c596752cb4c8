"""Tokenizers: text to ids and back. `bytes` is built in, fits any text and needs no vocabulary
file; a tokenizer.json is read by the library `tokenizers`."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallel3d.data.windows import TokenIds
from parallel3d.errors import ConfigError

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

    def encode(self, text: bytes | str) -> NDArray[np.uint16]:
        """Returns the bytes of `text` as ids; they need not be UTF-8."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of `ids`. Broken UTF-8 and ids that a padded vocabulary adds become
        U+FFFD."""
        # 0xFF occurs in no UTF-8 text, so it decodes to U+FFFD
        known = {byte: bytes([byte]) for byte in range(256)}
        known[self.end_of_text] = b"<|end_of_text|>"  # a reader of a sample wants to see the border
        flat = np.asarray(ids, dtype=np.int64).ravel().tolist()
        return b"".join(known.get(each, b"\xff") for each in flat).decode(errors="replace")


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
        (found,) = self.library.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, dtype=ids_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of `ids`, special tokens by their names. Ids beyond the vocabulary are
        left out."""
        flat = np.asarray(ids, dtype=np.int64).ravel()
        return self.library.decode(
            flat[(flat >= 0) & (flat < self.vocab_size)].tolist(), skip_special_tokens=False
        )


# Text to ids and back, whatever made the vocabulary. `vocab_size` is one more than the largest id;
# `end_of_text` ends every document, and `encode` never gives it: text that spells it stays text.
Tokenizer = ByteTokenizer | JsonTokenizer


def import_extra(library: str, needed_by: str) -> Any:
    """Imports a library of the extra `data`, which `needed_by` needs. Raises ConfigError, with the
    line that installs it, if it is missing."""
    try:
        return import_module(library)
    except ImportError:
        raise ConfigError(
            f"{needed_by}: needs the library {library.partition('.')[0]}; try pip install "
            "'parallel3d[data]', in a clone pip install -e '.[data]'"
        ) from None


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
    module = import_extra("tokenizers", f"{key} = {name}")
    try:
        content = path.read_bytes()
        library = module.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(
            f"{key} = {name}: must be bytes or the path of a tokenizer.json, and {path.absolute()} "
            f"cannot be read ({error}); try bytes"
        ) from None
    vocabulary = library.get_vocab(with_added_tokens=True)
    added = library.get_added_tokens_decoder().values()
    special = sorted(token.content for token in added if token.special)
    if mark is None:
        mark = next((each for each in END_OF_TEXT_MARKS if each in special), None)
    if mark not in vocabulary:
        known = ", ".join(special[:8]) or "none at all"
        raise ConfigError(
            f"{mark_key} = {mark}: must be the token of {key} = {name} that ends a document; its "
            f"special tokens are {known}"
        )
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
