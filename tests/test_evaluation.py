"""The sets of `data.evaluation`: all of a text or of files of ids, in order, and what is told where
they do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parallel3d.config.recipe import (
    DataConfig,
    EvaluationConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.data.corpus import load_corpora
from parallel3d.data.evaluation import evaluation_windows
from parallel3d.data.loader import IGNORED
from parallel3d.data.token_files import ShardTokenizer
from parallel3d.errors import ConfigError
from parallel3d.training.worker import build_loaders
from tests.data_files import write_folder
from tests.one_rank import SMALL


def config(of: Path, sequences: int | None = None, **data: object) -> DataConfig:
    chosen = EvaluationConfig(name="wiki", path=str(of), sequences=sequences)
    return DataConfig(evaluation=(chosen,), **data)  # type: ignore[arg-type]


def write_tokens(folder: Path, tokenizer: ShardTokenizer) -> Path:
    """Writes a folder whose parts are 0 to 9 and 10 to 14, each a document with its end 256."""
    return write_folder(folder, [np.arange(10)], [np.arange(10, 15)], tokenizer=tokenizer)


def test_a_text_is_read_whole_and_in_order_whatever_the_run_trains_on(tmp_path: Path) -> None:
    for name, text in (("b.txt", "cdef"), ("a.txt", "ab"), ("other.md", "zzz")):
        (tmp_path / name).write_text(text)
    (windows,) = evaluation_windows(config(tmp_path, source="stdlib"), 3)
    assert windows.windows == 2  # 8 tokens: a b END c d e f END
    assert windows.draw(np.arange(2)).tolist() == [[97, 98, 256, 99], [99, 100, 101, 102]]


def test_a_set_that_does_not_fit_is_told_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "w.txt"
    with pytest.raises(
        ConfigError, match=rf"data.evaluation\[0\].path = {path}: no such file or folder"
    ):
        evaluation_windows(config(path), 4)
    path.write_text("abcdefgh")  # its end is the ninth token
    assert evaluation_windows(config(path, sequences=2), 4)[0].windows == 2
    with pytest.raises(
        ConfigError,
        match=r"data.evaluation\[0\].sequences = 3: .* has only 2 sequences of .*; try 2, or null",
    ):
        evaluation_windows(config(path, sequences=3), 4)
    with pytest.raises(
        ConfigError,
        match=r"train.seq_len = 9: .* data.evaluation\[0\].path = .* has 9; try train",
    ):
        evaluation_windows(config(path), 9)
    assert evaluation_windows(replace(config(path), evaluation=()), 9) == []


def test_a_run_that_never_evaluates_takes_any_batch_and_its_checkpoint_can_be_evaluated(
    tmp_path: Path,
) -> None:
    """5 does not divide the default of train.eval_sequences, which such a run does not read."""
    (tmp_path / "text").write_text("It was the best of times. " * 100)
    recipe = Recipe(
        model=SMALL.model,
        parallel=ParallelConfig(microbatch_size=5),
        train=TrainConfig(steps=1, global_batch_size=10, seq_len=16),
        data=DataConfig(
            source="text",
            path=str(tmp_path / "text"),
            validation_fraction=0.5,
        ),
    )
    _, (validation,) = build_loaders(recipe, load_corpora(recipe.data), 0)
    labels = sum(int((batch.labels != IGNORED).sum()) for batch in validation.batches)
    assert labels == recipe.train.eval_sequences * recipe.train.seq_len
