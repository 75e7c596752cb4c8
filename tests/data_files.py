"""Writes small data sets of token ids, and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from parallel3d.data.token_files import FolderWriter, ShardTokenizer
from parallel3d.data.windows import TokenIds, TokenStream
from parallel3d.tools.bench import data_loading

END = 256  # ends each document


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
            writer.add("train", np.append(document, end))
        for document in validation:
            writer.add("validation", np.append(document, end))
    return folder


def write_megatron(
    prefix: Path,
    documents: Sequence[ArrayLike],
    end: int = END,
) -> Path:
    """Writes Megatron's files with these documents, and returns their prefix."""
    ended = [np.append(document, end).astype(np.uint16) for document in documents]
    data_loading.write_megatron(prefix, ended)
    return prefix


def read_all(stream: TokenStream) -> TokenIds:
    """Returns all ids of a stream."""
    return stream.read(np.zeros(1, dtype=np.int64), len(stream))[0]
