"""The row of a spike: eight sequences of the data are nonsense, and all of them are in the batch of one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from parallel3d.config.recipe import DataConfig, Recipe
from parallel3d.data.corpus import load_corpora
from parallel3d.data.order import window_order
from parallel3d.tools.bench.faults.fault import BATCH, SEQ_LEN, Fault, write_corpus

_SPIKED = 30  # the step
_FIRST = (_SPIKED - 1) * BATCH


def _spoil_the_data(folder: Path) -> None:
    """Writes a run's text, in which eight windows are of letters that stand nowhere else."""
    corpus = folder / "corpus.txt"
    write_corpus(corpus)
    (text,) = load_corpora(DataConfig(source="text", path=str(corpus)))
    windows = window_order(np.arange(_FIRST, _FIRST + BATCH), windows=(len(text.train) - 1) // SEQ_LEN, seed=0)
    spoilt = bytearray(corpus.read_bytes())
    for window in windows.tolist():
        spoilt[window * SEQ_LEN : (window + 1) * SEQ_LEN] = b"#$" * (SEQ_LEN // 2)
    corpus.write_bytes(spoilt)


def _rolling_back(recipe: Recipe) -> Recipe:
    train = replace(recipe.train, on_spike="rollback", spike_window=16, spike_steps=1)
    return replace(recipe, train=train, optimizer=replace(recipe.optimizer, lr=1e-2))


SPIKES: tuple[Fault, ...] = (
    Fault(
        name="a spike planted in 8 sequences of the data",
        act=lambda run: None,
        words=(
            rf"warning: step {_SPIKED}: a spike: ",
            f"goes back, and leaves out the sequences {_FIRST} to {_FIRST + BATCH - 1}\n",
            r"goes on from step 20 of ",
        ),
        within_s=5.0,
        goes_on=True,
        at_step=_SPIKED - 2,
        change=_rolling_back,
        prepare=_spoil_the_data,
    ),
)
