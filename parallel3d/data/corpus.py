"""A corpus: two streams of token ids, for training and for validation. Text is tokenized at the
start, and every process holds all of it in memory; files of ids (`data.source: tokens`) are read
when their windows are drawn."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.source import Document, find_documents
from parallel3d.data.token_files import TokenFiles, open_tokens
from parallel3d.data.tokenizers import Tokenizer, build_tokenizer
from parallel3d.data.windows import TokenIds, TokensInMemory, TokenStream
from parallel3d.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of the documents, one after the other, each followed by the end of text."""

    train: TokenStream
    validation: TokenStream
    config: DataConfig
    document_end: int | None  # the id that ends a document, if attention stays within documents

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the ids come from. A run on files of ids works without its library."""
        return find_tokenizer(self.config)


def load_corpora(data: DataConfig) -> tuple[Corpus, ...]:
    """Loads the corpora that `data` names: one for each of its sources, or a single one."""
    return tuple(load_corpus(each) for each in data.corpora)


def load_corpus(config: DataConfig) -> Corpus:
    """Reads and tokenizes all documents that `config` names, or opens the files of ids. Raises
    ConfigError and DataError as `find_documents` and `open_tokens` do."""
    if config.source == "tokens":
        files = open_token_files(config)
        return Corpus(files.train, files.validation, config, document_end(config, files))
    tokenizer = find_tokenizer(config)
    documents = find_documents(config)
    train, validation = split_documents(documents, config.validation_fraction)
    end = tokenizer.end_of_text if config.documents == "mask" else None
    return Corpus(stream_of(train, tokenizer), stream_of(validation, tokenizer), config, end)


def open_token_files(config: DataConfig) -> TokenFiles:
    """Opens the files of ids that `data.path` names. Raises DataError where they are not whole."""
    return open_tokens(Path(os.path.expanduser(config.path or "")), config.validation_fraction)


def find_tokenizer(config: DataConfig) -> Tokenizer:
    """Returns the tokenizer of a corpus, without a look at its text: the own one of a folder of ids
    if it has one, else `data.tokenizer`. Raises ConfigError or DataError if neither or both name it
    or it cannot be read."""
    own = None
    if config.source == "tokens":
        header = open_token_files(config).header
        if header is not None:
            own = header.tokenizer
        if (own is None) == (config.tokenizer == "bytes"):
            raise ConfigError(
                f"data.tokenizer = {config.tokenizer}: must be a tokenizer.json if data.path = "
                f"{config.path} has no tokenizer, and left out if it has; train.sample_tokens=0 "
                "needs none"
            )
    if own is None:
        return build_tokenizer(config.tokenizer, config.end_of_text)
    if own.file is None:
        return build_tokenizer(own.kind)
    path = os.path.join(os.path.expanduser(config.path or ""), own.file)
    mark = config.end_of_text or own.end_of_text
    return build_tokenizer(path, mark, key=f"data.path = {config.path}, {own.file}")


def stream_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokensInMemory:
    """Reads and tokenizes the documents, each followed by the end of text."""
    pieces: list[TokenIds] = []
    for document in documents:
        ids = ids_of(document, tokenizer)
        pieces += [ids, np.full(1, tokenizer.end_of_text, dtype=ids.dtype)]
    return TokensInMemory(np.concatenate(pieces))


def document_end(config: DataConfig, files: TokenFiles) -> int | None:
    """Returns the id that ends a document of `files`, or None if documents are joined. Raises
    ConfigError if attention stays within documents and nothing names that id."""
    if config.documents == "join":
        return None
    if files.header is None:
        if config.tokenizer != "bytes":
            return build_tokenizer(config.tokenizer, config.end_of_text).end_of_text
    elif files.header.end_of_text is not None:
        return files.header.end_of_text
    raise ConfigError(
        f"data.documents = mask: data.path = {config.path} does not say which id ends a document; "
        "try data.tokenizer=tokenizer.json, the path of their tokenizer, or data.documents=join"
    )


def ids_of(document: Document, tokenizer: Tokenizer) -> TokenIds:
    """Returns the ids of a document. Raises DataError where it cannot be read, or is no text to
    `tokenizer`."""
    try:
        return tokenizer.encode(document.read())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.path}: is no text in UTF-8 ({error.reason}); convert it or take it out of "
            "the corpus, or try data.tokenizer=bytes"
        ) from None


def check_data(data: DataConfig, *, seq_len: int, vocab: int, samples_text: bool = False) -> None:
    """Raises ConfigError if a run on `data` could not train, validate or show a sample of text, and
    DataError for a file that cannot be read. It is called before any worker starts. It reads only
    as many files of text as fill a window of each part, and of files of ids only headers."""
    for index, corpus in enumerate(data.corpora):
        try:
            _check_corpus(corpus, seq_len, vocab, samples_text=samples_text and index == 0)
        except ConfigError as error:
            key = f"data.sources[{index}].path" if data.sources else "data.path"
            raise ConfigError(str(error).replace("data.path", key)) from error
    if data.source == "tokens":
        _refuse_other_tokenizers(data)


def _refuse_other_tokenizers(data: DataConfig) -> None:
    """Raises ConfigError if the ids of two sources are known to come from different tokenizers, or
    if attention stays within documents that end with different ids."""
    first: dict[str, tuple[object, str]] = {}  # by what is compared: the first source's, its name
    for index, corpus in enumerate(data.corpora):
        name = f"data.sources[{index}].path = {corpus.path}"
        files = open_token_files(corpus)
        compared: dict[str, object] = {"end": document_end(corpus, files)}
        if files.header and files.header.tokenizer:
            own = files.header.tokenizer
            compared["tokenizer"] = own.kind, own.sha256, files.header.end_of_text
        for key, value in compared.items():
            value_of_first, name_of_first = first.setdefault(key, (value, name))
            if value != value_of_first:
                raise ConfigError(
                    f"{name}: its tokenizer or the id that ends a document is another than that "
                    f"of {name_of_first}; try tokens that one tokenizer has made"
                )


def _check_corpus(data: DataConfig, seq_len: int, vocab: int, *, samples_text: bool) -> None:
    corpus = "data.source = stdlib" if data.path is None else f"data.path = {data.path}"
    if data.source == "tokens":
        files = open_token_files(data)
        document_end(data, files)
        needed = files.header.largest_id + 1 if files.header else 0
        if samples_text:
            needed = max(needed, find_tokenizer(data).vocab_size)
        tokens_of = [len(files.train), len(files.validation)]
    else:
        tokenizer = find_tokenizer(data)
        needed = tokenizer.vocab_size
        parts = split_documents(find_documents(data), data.validation_fraction)
        tokens_of = [_up_to_a_window(part, tokenizer, seq_len) for part in parts]
    if needed > vocab:
        fits = -(-needed // 8) * 8  # divides by the usual tp
        raise ConfigError(
            f"model.vocab = {vocab}: must be at least {needed}, for the ids of {corpus}; try {fits}"
        )
    for part, tokens in zip(("training", "validation"), tokens_of, strict=True):
        refuse_short(seq_len, tokens, f"{corpus} for {part}")


def refuse_short(seq_len: int, tokens: int, corpus: str) -> None:
    """Raises ConfigError if the tokens of a corpus do not fill a window."""
    if tokens <= seq_len:
        raise ConfigError(
            f"train.seq_len = {seq_len}: a window is seq_len + 1 = {seq_len + 1} tokens, and "
            f"there are {tokens} in {corpus}; try train.seq_len={max(tokens - 1, 1)}, or more text"
        )


def _up_to_a_window(documents: Sequence[Document], tokenizer: Tokenizer, seq_len: int) -> int:
    """Returns the number of tokens of `documents`, or of those that fill one window."""
    tokens = 0
    for document in documents:
        tokens += len(ids_of(document, tokenizer)) + 1  # its end_of_text
        if tokens > seq_len:
            break
    return tokens


def split_documents(
    documents: Sequence[Document], validation_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Divides `documents` into two parts that are not empty, each in the order of `documents`. The
    last `validation_fraction` of a single document's bytes is for validation.

    Each file's own name decides (a hash of it against the fraction), so that a file added to a
    corpus moves no other across the border, and a run that is resumed on a larger corpus does not
    validate on what it was trained on. Where few documents leave a part empty, the one whose hash
    is nearest to the border goes there (the only case where adding a file may move another)."""
    if len(documents) == 1:
        (only,) = documents
        most = max(only.stop - 1, 1)  # a byte stays for training
        border = only.stop - min(max(round(only.stop * validation_fraction), 1), most)
        return [replace(only, stop=border)], [replace(only, start=border)]
    draws = {document.name: _draw(document.name) for document in documents}
    by_draw = sorted(draws, key=lambda name: (draws[name], name))
    chosen = sum(draw < validation_fraction for draw in draws.values())
    chosen = min(max(chosen, 1), len(documents) - 1)
    held_out = set(by_draw[:chosen])
    train = [document for document in documents if document.name not in held_out]
    validation = [document for document in documents if document.name in held_out]
    return train, validation


def _draw(name: str) -> float:
    """Returns a number in [0, 1) that depends only on the name, and is equal on every machine."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits are exact in a float
