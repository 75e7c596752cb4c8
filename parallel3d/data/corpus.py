"""Loads a corpus: two streams of token IDs, for training and validation.

Text is tokenized when the run starts, and every process keeps all of its tokens in memory. Token
files (`data.source: tokens`) are read on demand, window by window."""

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
    """Training and validation streams of token IDs. Each concatenates the documents of its part."""

    train: TokenStream
    validation: TokenStream
    config: DataConfig
    document_end: int | None  # end-of-text ID, or None if attention crosses documents

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the token IDs. Created on each access, so that training on token files does
        not need its library."""
        return find_tokenizer(self.config)


def load_corpora(data: DataConfig) -> tuple[Corpus, ...]:
    """Loads the corpora in `data`: one for each of `data.sources`, or else a single one."""
    return tuple(load_corpus(each) for each in data.corpora)


def load_corpus(config: DataConfig) -> Corpus:
    """Reads and tokenizes all documents in `config`, or opens its token files. Raises ConfigError,
    or DataError for an unusable file."""
    if config.source == "tokens":
        files = open_token_files(config)
        return Corpus(files.train, files.validation, config, document_end(config, files))
    tokenizer = find_tokenizer(config)
    documents = find_documents(config)
    train, validation = split_documents(documents, config.validation_fraction)
    end = tokenizer.end_of_text if config.documents == "mask" else None
    return Corpus(stream_of(train, tokenizer), stream_of(validation, tokenizer), config, end)


def open_token_files(config: DataConfig) -> TokenFiles:
    """Opens the token files at `config.path`. Raises DataError if they are missing or damaged."""
    return open_tokens(Path(os.path.expanduser(config.path or "")), config.validation_fraction)


def find_tokenizer(config: DataConfig) -> Tokenizer:
    """Returns the tokenizer of a corpus without reading its text: that of its token files, or else
    `data.tokenizer`.

    Raises ConfigError if both or neither name a tokenizer, or if it cannot be read, and DataError
    for unusable token files."""
    own = None
    if config.source == "tokens":
        header = open_token_files(config).header
        if header is not None:
            own = header.tokenizer
        if (own is None) == (config.tokenizer == "bytes"):
            raise ConfigError(
                f"data.tokenizer = {config.tokenizer}: must be a tokenizer.json if data.path = "
                f"{config.path} does not include a tokenizer, and must not be set if it does; or "
                "try train.sample_tokens=0, which needs no tokenizer"
            )
    if own is None:
        return build_tokenizer(config.tokenizer, config.end_of_text)
    if own.file is None:
        return build_tokenizer(own.kind)
    path = os.path.join(os.path.expanduser(config.path or ""), own.file)
    mark = config.end_of_text or own.end_of_text
    return build_tokenizer(path, mark, key=f"data.path = {config.path}, {own.file}")


def stream_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokensInMemory:
    """Reads and tokenizes the documents, and appends the end-of-text token to each."""
    pieces: list[TokenIds] = []
    for document in documents:
        ids = ids_of(document, tokenizer)
        pieces += [ids, np.full(1, tokenizer.end_of_text, dtype=ids.dtype)]
    return TokensInMemory(np.concatenate(pieces))


def document_end(config: DataConfig, files: TokenFiles) -> int | None:
    """Returns the ID that ends a document of `files`, or None if `data.documents` is "join". Raises
    ConfigError if it is "mask" and the ID is unknown."""
    if config.documents == "join":
        return None
    if files.header is None:
        if config.tokenizer != "bytes":
            return build_tokenizer(config.tokenizer, config.end_of_text).end_of_text
    elif files.header.end_of_text is not None:
        return files.header.end_of_text
    raise ConfigError(
        f"data.documents = mask: data.path = {config.path} does not specify the end-of-text ID; "
        "try data.tokenizer=tokenizer.json, the path of its tokenizer, or data.documents=join"
    )


def ids_of(document: Document, tokenizer: Tokenizer) -> TokenIds:
    """Returns the token IDs of a document. Raises DataError if it cannot be read or is not valid
    text for `tokenizer`."""
    try:
        return tokenizer.encode(document.read())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.path}: not valid UTF-8 ({error.reason}); convert it or remove it from the "
            "corpus, or try data.tokenizer=bytes"
        ) from None


def check_data(data: DataConfig, *, seq_len: int, vocab: int, samples_text: bool = False) -> None:
    """Checks, before workers start, that a run can use `data` to train, to validate and, if
    `samples_text`, to print generated text.

    Reads only as much text as fills one window of each part, and only the headers of token files.
    Raises ConfigError, or DataError for an unusable file."""
    for index, corpus in enumerate(data.corpora):
        try:
            _check_corpus(corpus, seq_len, vocab, samples_text=samples_text and index == 0)
        except ConfigError as error:
            key = f"data.sources[{index}].path" if data.sources else "data.path"
            raise ConfigError(str(error).replace("data.path", key)) from error
    if data.source == "tokens":
        _refuse_other_tokenizers(data)


def _refuse_other_tokenizers(data: DataConfig) -> None:
    """Raises ConfigError if two sources have different tokenizers, or if `data.documents` is "mask"
    and their documents end with different IDs."""
    # property -> (its value in the first source that has it, name of that source)
    first: dict[str, tuple[object, str]] = {}
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
                    f"{name}: its tokenizer or end-of-text ID differs from that of "
                    f"{name_of_first}; use tokens from one tokenizer"
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
        fits = -(-needed // 8) * 8  # Divisible by tp = 2, 4 and 8.
        raise ConfigError(
            f"model.vocab = {vocab}: must be at least {needed}, for the IDs of {corpus}; try {fits}"
        )
    for part, tokens in zip(("training", "validation"), tokens_of, strict=True):
        refuse_short(seq_len, tokens, f"{corpus} for {part}")


def refuse_short(seq_len: int, tokens: int, corpus: str) -> None:
    """Raises ConfigError if `tokens` do not fill a window of `seq_len` + 1 tokens."""
    if tokens <= seq_len:
        raise ConfigError(
            f"train.seq_len = {seq_len}: needs windows of seq_len + 1 = {seq_len + 1} tokens, but "
            f"{corpus} has {tokens}; try train.seq_len={max(tokens - 1, 1)}, or more text"
        )


def _up_to_a_window(documents: Sequence[Document], tokenizer: Tokenizer, seq_len: int) -> int:
    """Returns the number of tokens in `documents`. Stops after the one that fills a window."""
    tokens = 0
    for document in documents:
        tokens += len(ids_of(document, tokenizer)) + 1  # One more for the end-of-text token.
        if tokens > seq_len:
            break
    return tokens


def split_documents(
    documents: Sequence[Document], validation_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Splits `documents` into a training and a validation part. Each keeps the order of `documents`
    and has at least one of them.

    A file is for validation if the hash of its name is below `validation_fraction`. So a new file
    does not move others, and a run resumed on a larger corpus does not validate on its training
    data. Exception: an empty part gets the file whose hash is nearest to the threshold. If there is
    only one document, its last `validation_fraction`, at least one byte, is for validation."""
    if len(documents) == 1:
        (only,) = documents
        most = max(only.stop - 1, 1)  # Leave a byte for training, if there are two.
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
    """Returns a hash of `name` in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # A float represents 48 bits exactly.
