"""Tokenizers, which convert text to token IDs and back. `bytes` is built in and encodes any bytes.
A tokenizer.json is read by Hugging Face's library `tokenizers`."""

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

# Common end-of-text tokens. The first that is a special token of the tokenizer is used.
END_OF_TEXT_MARKS = (
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|endofdocument|>"),
    *("</s>", "<eos>", "<|eos|>", "[EOS]"),
)


def ids_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns uint16 if it can represent the IDs 0 to `vocab_size` - 1, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte (IDs 0 to 255), and an end-of-text token (ID 256)."""

    vocab_size: int = 257
    end_of_text: int = 256

    def encode(self, text: bytes | str) -> NDArray[np.uint16]:
        """Returns the bytes of `text` as token IDs. Bytes need not be valid UTF-8."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of `ids`. Invalid UTF-8 and IDs above 256 become U+FFFD."""
        # 0xFF, for unknown IDs, is invalid in UTF-8 and so decodes to U+FFFD.
        known = {byte: bytes([byte]) for byte in range(256)}
        known[self.end_of_text] = b"<|end_of_text|>"  # Visible in generated text.
        flat = np.asarray(ids, dtype=np.int64).ravel().tolist()
        return b"".join(known.get(each, b"\xff") for each in flat).decode(errors="replace")


@dataclass(frozen=True)
class JsonTokenizer:
    """Tokenizer of a tokenizer.json. It adds no special tokens, such as a beginning-of-text token,
    and does not truncate or pad, regardless of the settings in the file."""

    path: Path
    vocab_size: int
    end_of_text: int
    sha256: str
    library: tokenizers.Tokenizer = field(repr=False, compare=False)

    def encode(self, text: bytes | str) -> TokenIds:
        """Returns the token IDs of `text`.

        If `text` is bytes, incomplete characters at its ends, where a file may have been split, are
        dropped. Raises UnicodeDecodeError for other invalid UTF-8."""
        if isinstance(text, bytes):
            whole_from = next((at for at, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)
            text = codecs.getincrementaldecoder("utf-8")().decode(text[whole_from:])
        (found,) = self.library.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, dtype=ids_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of `ids`, including special tokens. IDs outside the vocabulary are
        dropped."""
        flat = np.asarray(ids, dtype=np.int64).ravel()
        return self.library.decode(
            flat[(flat >= 0) & (flat < self.vocab_size)].tolist(), skip_special_tokens=False
        )


# `vocab_size` is the largest ID + 1. `end_of_text` is the ID that ends a document. `encode` never
# returns it, even for text that looks like the token.
Tokenizer = ByteTokenizer | JsonTokenizer


def import_extra(library: str, needed_by: str) -> Any:
    """Imports a library of the extra `parallel3d[data]`. If it is missing, raises a ConfigError
    with the installation command. `needed_by` is the setting that requires it."""
    try:
        return import_module(library)
    except ImportError:
        raise ConfigError(
            f"{needed_by}: requires the library {library.partition('.')[0]}; try pip install "
            "'parallel3d[data]', or in a clone pip install -e '.[data]'"
        ) from None


def build_tokenizer(
    name: str,
    mark: str | None = None,
    *,
    key: str = "data.tokenizer",
    mark_key: str = "data.end_of_text",
) -> Tokenizer:
    """Builds a tokenizer.

    Args:
        name: `bytes`, or the path of a tokenizer.json.
        mark: Token of the file that ends a document. Default: the first of END_OF_TEXT_MARKS among
            its special tokens.
        key: Setting of `name`, for error messages.
        mark_key: Setting of `mark`, for error messages.

    Raises:
        ConfigError: The file cannot be read or has no such token, or the library is missing.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(name))
    module = import_extra("tokenizers", f"{key} = {name}")
    try:
        content = path.read_bytes()
        library = module.Tokenizer.from_str(content.decode())
    except Exception as error:  # The library raises plain Exceptions.
        raise ConfigError(
            f"{key} = {name}: must be bytes or the path of a tokenizer.json, but "
            f"{path.absolute()} cannot be read ({error}); try bytes"
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
    library.add_special_tokens([mark])  # The token exists and keeps its ID.
    library.encode_special_tokens = True  # Encode special tokens in the text as text.
    library.no_truncation()
    library.no_padding()
    return JsonTokenizer(
        path=path,
        vocab_size=max(vocabulary.values()) + 1,
        end_of_text=vocabulary[mark],
        sha256=hashlib.sha256(content).hexdigest(),
        library=library,
    )
