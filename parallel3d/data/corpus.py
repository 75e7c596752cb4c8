"""A corpus: two streams of token ids, for training and for validation. Text is tokenized at the start, and every
process holds all of it in memory; files of ids (`data.source: tokens`) are read when their windows are drawn."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.source import Document, find_documents
from parallel3d.data.token_files import TokenFiles, open_tokens
from parallel3d.data.tokenizers import Tokenizer, build_tokenizer
from parallel3d.data.windows import TokenIds, TokensInMemory, TokenStream
from parallel3d.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of the documents, one after the other, each followed by the tokenizer's end of text."""

    train: TokenStream
    validation: TokenStream
    make_tokenizer: Callable[[], Tokenizer]  # files of ids are trained on where their tokenizer's library is missing
    document_end: int | None  # the id that ends a document, where attention is to stay within documents

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the ids come from."""
        return self.make_tokenizer()


def load_corpora(data: DataConfig) -> tuple[Corpus, ...]:
    """Reads and tokenizes the corpora that `data` names, one for each of its sources, or a single one."""
    return tuple(load_corpus(each) for each in data.corpora)


def load_corpus(config: DataConfig) -> Corpus:
    """Reads and tokenizes all documents that `config` names, or opens the files of ids. Raises ConfigError and
    DataError as `find_documents` and `open_tokens` do."""
    if config.source == "tokens":
        files = open_token_files(config)
        return Corpus(files.train, files.validation, lambda: tokenizer_of(config, files), document_end(config, files))
    tokenizer = build_tokenizer(config.tokenizer, config.end_of_text)
    train, validation = split_documents(find_documents(config), config.validation_fraction)
    end = tokenizer.end_of_text if config.documents == "mask" else None
    return Corpus(stream_of(train, tokenizer), stream_of(validation, tokenizer), lambda: tokenizer, end)


def open_token_files(config: DataConfig) -> TokenFiles:
    """Opens the files of ids that `data.path` names. Raises DataError where they are not whole."""
    return open_tokens(Path(os.path.expanduser(config.path or "")), config.validation_fraction)


def find_tokenizer(config: DataConfig) -> Tokenizer:
    """Returns the tokenizer of a corpus, without a look at its text. Raises ConfigError and DataError where it is not
    known or not there any more."""
    if config.source == "tokens":
        return tokenizer_of(config, open_token_files(config))
    return build_tokenizer(config.tokenizer, config.end_of_text)


def tokenizer_of(config: DataConfig, files: TokenFiles) -> Tokenizer:
    """Returns the tokenizer that the ids of `files` come from: the folder's own where it has one, else
    `data.tokenizer`. Raises ConfigError where neither says it, or both do."""
    own = None if files.header is None else files.header.tokenizer
    if own is None:
        if config.tokenizer == "bytes":
            raise ConfigError(
                f"data.tokenizer = bytes: data.path = {config.path} does not say what its ids mean, which a sample of "
                "text needs; try data.tokenizer=tokenizer.json, the path of their tokenizer, or train.sample_tokens=0"
            )
        return build_tokenizer(config.tokenizer, config.end_of_text)
    if config.tokenizer != "bytes":
        raise ConfigError(
            f"data.tokenizer = {config.tokenizer}: data.path = {config.path} has a tokenizer of its own; "
            "leave data.tokenizer out"
        )
    if own.file is None:
        return build_tokenizer(own.kind)
    path = os.path.join(os.path.expanduser(config.path or ""), own.file)
    return build_tokenizer(path, config.end_of_text or own.end_of_text, key=f"data.path = {config.path}, {own.file}")


def stream_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokensInMemory:
    """Reads and tokenizes the documents, each followed by the end of text."""
    pieces: list[TokenIds] = []
    for document in documents:
        ids = ids_of(document, tokenizer)
        pieces += [ids, np.full(1, tokenizer.end_of_text, dtype=ids.dtype)]
    return TokensInMemory(np.concatenate(pieces))


def document_end(config: DataConfig, files: TokenFiles) -> int | None:
    """Returns the id that ends a document of `files`, or None where documents are joined. Raises ConfigError where
    attention is to stay within documents and nothing says which id that is."""
    if config.documents == "join":
        return None
    if files.header is not None and files.header.end_of_text is not None:
        return files.header.end_of_text
    if files.header is None and config.tokenizer != "bytes":
        return build_tokenizer(config.tokenizer, config.end_of_text).end_of_text
    would_do = "" if files.header is not None else "data.tokenizer=tokenizer.json, the path of their tokenizer, or "
    raise ConfigError(
        f"data.documents = mask: data.path = {config.path} does not say which id ends a document; "
        f"try {would_do}data.documents=join"
    )


def ids_of(document: Document, tokenizer: Tokenizer) -> TokenIds:
    """Returns the ids of a document. Raises DataError where it cannot be read, or is no text to `tokenizer`."""
    try:
        return tokenizer.encode(document.read())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.path}: is no text in UTF-8 ({error.reason}); convert it or take it out of the corpus, or try "
            "data.tokenizer=bytes"
        ) from None


def check_data(data: DataConfig, *, seq_len: int, vocab: int, samples_text: bool = False) -> None:
    """Raises ConfigError where a run on `data` could not train or validate (nor show a sample of text, where it is to),
    DataError for a file that cannot be read. It is called before any worker starts, and reads only as many files of
    text as fill one window of each part; of files of ids, sizes and what is said of them."""
    for index, corpus in enumerate(data.corpora):
        try:
            _check_corpus(corpus, seq_len=seq_len, vocab=vocab, samples_text=samples_text and not index)
        except ConfigError as error:
            if data.sources:
                raise ConfigError(str(error).replace("data.path", f"data.sources[{index}].path")) from error
            raise
    if data.source == "tokens":
        _refuse_other_tokenizers(data)


def _refuse_other_tokenizers(data: DataConfig) -> None:
    """Raises ConfigError where the ids of two sources come from tokenizers that are known not to be the same, or where
    attention is to stay within documents that end with different ids."""
    opened = [open_token_files(corpus) for corpus in data.corpora]
    headers = [files.header for files in opened]
    ends = [document_end(corpus, files) for corpus, files in zip(data.corpora, opened, strict=True)]
    for index, end in enumerate(ends):
        if end != ends[0]:
            raise ConfigError(
                f"data.sources[{index}].path = {data.sources[index].path}: its documents end with id {end}, and "
                f"those of data.sources[0].path = {data.sources[0].path} with {ends[0]}; try data.documents=join"
            )
    known = [
        (index, (header.tokenizer.kind, header.tokenizer.sha256, header.end_of_text))
        for index, header in enumerate(headers)
        if header and header.tokenizer
    ]
    for index, tokenizer in known[1:]:
        first, own = known[0]
        if tokenizer != own:
            raise ConfigError(
                f"data.sources[{index}].path = {data.sources[index].path}: its ids are from another tokenizer than "
                f"those of data.sources[{first}].path = {data.sources[first].path}; try tokens that one has made"
            )


def _check_corpus(data: DataConfig, *, seq_len: int, vocab: int, samples_text: bool) -> None:
    if data.source == "tokens":
        files = open_token_files(data)
        if files.header is not None and files.header.largest_id >= vocab:
            raise ConfigError(
                f"model.vocab = {vocab}: must be above {files.header.largest_id}, the largest id of data.path = "
                f"{data.path}; try {_multiple_of_8(files.header.vocab_size)}"
            )
        if samples_text:
            _refuse_small_vocabulary(tokenizer_of(data, files), f"the tokenizer of data.path = {data.path}", vocab)
        document_end(data, files)
        tokens_of = len(files.train), len(files.validation)
    else:
        tokenizer = build_tokenizer(data.tokenizer, data.end_of_text)
        _refuse_small_vocabulary(tokenizer, f"data.tokenizer = {data.tokenizer}", vocab)
        train, validation = split_documents(find_documents(data), data.validation_fraction)
        tokens_of = _up_to_a_window(train, tokenizer, seq_len), _up_to_a_window(validation, tokenizer, seq_len)
    for part, tokens, more in (
        ("training", tokens_of[0], "more text"),
        ("validation", tokens_of[1], "more text or a larger data.validation_fraction"),
    ):
        if tokens <= seq_len:
            corpus = "data.source = stdlib" if data.path is None else f"data.path = {data.path}"
            would_do = f"train.seq_len={tokens - 1} or less, or {more}" if tokens > 1 else more
            raise ConfigError(
                f"train.seq_len = {seq_len}: a window is seq_len + 1 = {seq_len + 1} tokens, and {corpus} has {tokens} "
                f"for {part}; try {would_do}"
            )


def _up_to_a_window(documents: Sequence[Document], tokenizer: Tokenizer, seq_len: int) -> int:
    """Returns the number of tokens of `documents`, or of those that fill one window."""
    tokens = 0
    for document in documents:
        tokens += len(ids_of(document, tokenizer)) + 1  # its end_of_text
        if tokens > seq_len:
            break
    return tokens


def _refuse_small_vocabulary(tokenizer: Tokenizer, whose: str, vocab: int) -> None:
    if tokenizer.vocab_size > vocab:
        raise ConfigError(
            f"model.vocab = {vocab}: must be at least {tokenizer.vocab_size}, the size of {whose}; "
            f"try {_multiple_of_8(tokenizer.vocab_size)}"
        )


def _multiple_of_8(ids: int) -> int:
    return -(-ids // 8) * 8  # divides by the usual tp


class TrainValidationSplit(NamedTuple):
    """The documents of a corpus, divided into two parts."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def split_documents(documents: Sequence[Document], validation_fraction: float) -> TrainValidationSplit:
    """Divides `documents` into two parts that are not empty, each in the order of `documents`. The last
    `validation_fraction` of a single document's bytes is for validation. Raises ConfigError where the fraction is not
    between 0 and 1.

    Each file's own name decides (a hash of it against the fraction), so that a file added to a corpus moves no other
    across the border, and a run that is resumed on a larger corpus does not validate on what it was trained on. Where
    few documents leave a part empty, the one whose hash is nearest to the border goes there (the only case where adding
    a file may move another)."""
    if not 0.0 < validation_fraction < 1.0:
        raise ConfigError(f"data.validation_fraction = {validation_fraction}: must lie between 0 and 1; try 0.05")
    if len(documents) == 1:
        (whole,) = documents
        size = whole.stop - whole.start
        border = whole.stop - min(max(round(size * validation_fraction), 1), max(size - 1, 1))
        return TrainValidationSplit((replace(whole, stop=border),), (replace(whole, start=border),))

    def draw(name: str) -> float:
        """Returns a number in [0, 1) that depends on the name alone, and is the same on every machine."""
        digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()  # 48 bits: exact in a float
        return int.from_bytes(digest, "big") / 2**48

    by_draw = sorted((draw(document.name), document.name) for document in documents)
    chosen = sum(drawn < validation_fraction for drawn, _ in by_draw)
    validation = {name for _, name in by_draw[: min(max(chosen, 1), len(documents) - 1)]}
    return TrainValidationSplit(
        tuple(document for document in documents if document.name not in validation),
        tuple(document for document in documents if document.name in validation),
    )
