"""Reads the sets of `data.evaluation`: entire corpora or their first sequences, not shuffled."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.config.recipe import DataConfig, EvaluationConfig
from parallel3d.data.corpus import find_tokenizer, open_token_files, refuse_short, stream_of
from parallel3d.data.source import find_documents
from parallel3d.data.token_files import FileTokens
from parallel3d.data.windows import ShuffledWindows, TokenStream
from parallel3d.errors import ConfigError


def evaluation_windows(config: DataConfig, seq_len: int) -> list[ShuffledWindows]:
    """Returns the windows of each evaluation set, in the order of its text.

    Raises ConfigError if a set does not exist, is shorter than a window, has fewer sequences than
    requested or a different tokenizer, and DataError for an unusable file."""
    windows = []
    for index, chosen in enumerate(config.evaluation):
        key = f"data.evaluation[{index}]"
        try:
            stream = _whole_stream(config, chosen)
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.path", f"{key}.path")) from error
        refuse_short(seq_len, len(stream), f"{key}.path = {chosen.path}")
        found = ShuffledWindows(stream, seq_len=seq_len, seed=None)
        if chosen.sequences is not None and chosen.sequences > found.windows:
            raise ConfigError(
                f"{key}.sequences = {chosen.sequences}: {chosen.path} has only {found.windows} "
                f"sequences of train.seq_len = {seq_len} tokens; try {found.windows}, or null"
            )
        windows.append(found)
    return windows


def _whole_stream(config: DataConfig, chosen: EvaluationConfig) -> TokenStream:
    """Returns all tokens of a set: both parts of token files, or all documents of a text corpus.
    Raises ConfigError if token files have a different tokenizer from the first training corpus."""
    if config.source != "tokens":
        own = replace(config, source="text", path=chosen.path)
        return stream_of(find_documents(own), find_tokenizer(own))
    files = open_token_files(replace(config, path=chosen.path))
    trained = config.corpora[0]
    trained_on = open_token_files(trained).header
    if files.header and trained_on and files.header.tokenizer != trained_on.tokenizer:
        words = f"its tokenizer differs from that of {trained.path}"
        raise ConfigError(f"data.path = {chosen.path}: {words}; tokenize both with one tokenizer")
    return FileTokens([*files.train.slices, *files.validation.slices], files.train.dtype)
