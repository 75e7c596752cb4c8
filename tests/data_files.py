"""Writes small data sets of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parallel3d.data.token_files import FolderWriter, MegatronWriter, ShardTokenizer

END = 256  # ends each document


def ended(document: ArrayLike, end: int = END) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Returns what a writer adds for a document: its ids with the end of text, and their number."""
    ids = np.append(document, end)
    return ids, np.array([len(ids)])


def write_folder(
    folder: Path,
    train: Sequence[ArrayLike],
    validation: Sequence[ArrayLike],
    *,
    end: int = END,
    vocab_size: int = END + 1,
    shard_tokens: int = 300,
    tokenizer: ShardTokenizer | None = None,
) -> Path:
    """Writes a folder of tokens with these documents."""
    with FolderWriter(
        folder,
        vocab_size=vocab_size,
        end_of_text=end,
        tokenizer=tokenizer,
        shard_tokens=shard_tokens,
    ) as writer:
        for document in train:
            writer.add("train", *ended(document, end))
        for document in validation:
            writer.add("validation", *ended(document, end))
    return folder


def write_megatron(
    prefix: Path, documents: Sequence[ArrayLike], dtype: str = "uint16", end: int = END
) -> Path:
    """Writes Megatron's files with these documents, and returns their prefix."""
    with MegatronWriter(Path(f"{prefix}.bin"), dtype=dtype, vocab_size=1 << 16) as writer:
        for document in documents:
            writer.add(*ended(document, end))
    return prefix
