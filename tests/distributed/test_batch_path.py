"""The path of a batch: the files that a training step runs are those that `tests/house_lines.py` counts for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from parallel3d.config.load import load_recipe
from parallel3d.recipes import find_recipe
from tests.distributed.training_cases import make_loader, make_trainer
from tests.distributed.world import World
from tests.house import ROOT
from tests.house_lines import BATCH_PATH

PROJECT = ("parallel3d", "models", "recipes", "tools")  # a virtual environment may lie in the same folder


def files_of_a_step() -> set[str]:
    """Returns the project's files of which a function runs in a trainer's second step."""
    ran: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name != "<module>":
            ran.add(frame.f_code.co_filename)

    trainer = make_trainer(load_recipe(find_recipe("quickstart"), cards={}))
    loader = make_loader(trainer.recipe, 0)
    trainer.train_step(loader.batch(0))
    batch = loader.batch(1)
    sys.setprofile(note)
    trainer.train_step(batch)
    sys.setprofile(None)
    paths = [Path(file).resolve() for file in ran if Path(file).is_relative_to(ROOT)]
    files = [path.relative_to(ROOT) for path in paths]
    return {file.as_posix() for file in files if file.parts[0] in PROJECT}


def test_the_path_of_a_batch_is_what_the_quickstarts_step_runs(world: Callable[[int], World]) -> None:
    ran = set().union(*world(8).run(files_of_a_step))
    assert ran == set(BATCH_PATH), f"gone from the path: {set(BATCH_PATH) - ran}; new on it: {ran - set(BATCH_PATH)}"
