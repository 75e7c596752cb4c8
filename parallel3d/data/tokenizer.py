"""Text to token ids and back. One tokenizer is built in: bytes, which needs no vocabulary file and fits any text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parallel3d.errors import ConfigError

TokenIds = NDArray[np.integer]  # uint16, or uint32 where a vocabulary needs it


class Tokenizer(Protocol):
    """A tokenizer as the rest of the project uses it."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` gives, `end_of_text` included."""
        ...

    @property
    def end_of_text(self) -> int:
        """The id that ends every document; `encode` never gives it."""
        ...

    def encode(self, text: bytes | str) -> TokenIds: ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One token for each byte (ids 0 to 255), and `end_of_text` (256)."""

    vocab_size: int = 257
    end_of_text: int = 256
    end_of_text_mark: str = "<|end_of_text|>"  # how `decode` shows it: a reader of a sample wants to see the border

    def encode(self, text: bytes | str) -> NDArray[np.uint16]:
        """Returns the bytes of `text` (UTF-8 where it is a str) as ids, `[bytes]`. Text that spells the mark stays
        text."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Returns the text of `ids`. Broken UTF-8 and ids that a padded vocabulary adds become U+FFFD: a sample always
        prints."""
        flat = np.asarray(ids, dtype=np.int64).ravel()
        is_byte = (flat >= 0) & (flat < 256)
        raw = np.where(is_byte, flat, 0xFF).astype(np.uint8)  # 0xFF occurs in no UTF-8 text, so it decodes to U+FFFD
        ends = np.flatnonzero(flat == self.end_of_text)
        pieces = np.split(raw, ends)
        texts = [pieces[0], *(piece[1:] for piece in pieces[1:])]  # each later piece begins with the end_of_text
        return self.end_of_text_mark.join(piece.tobytes().decode(errors="replace") for piece in texts)


TOKENIZERS: Mapping[str, type[ByteTokenizer]] = MappingProxyType({"bytes": ByteTokenizer})  # by DataConfig.tokenizer


def build_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names. Raises ConfigError for a name that is not in `TOKENIZERS`."""
    if name not in TOKENIZERS:
        raise ConfigError(f"data.tokenizer = {name}: no such tokenizer; try {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()
