"""From files to batches: source -> split -> tokenizer -> corpus -> order -> loader.

The loader's names come lazily, because the loader alone imports torch and a launcher that runs `check_data` must not
pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel3d.data.check import check_data
from parallel3d.data.corpus import Corpus, load_corpus
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from parallel3d.data.loader import Batch, BatchLoader

__all__ = [
    "Batch",
    "BatchLoader",
    "ByteTokenizer",
    "Corpus",
    "Tokenizer",
    "build_tokenizer",
    "check_data",
    "load_corpus",
]


def __getattr__(name: str) -> object:
    if name in ("Batch", "BatchLoader"):
        from parallel3d.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
