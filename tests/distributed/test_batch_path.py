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


def files_of_a_step() -> tuple[set[str], set[str]]:
    """Returns the project's files of which a function runs while a trainer is built, and in its second step."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name != "<module>" and ROOT in path.parents:
            files.add(path.resolve().relative_to(ROOT).as_posix())

    sys.setprofile(note)
    trainer = make_trainer(load_recipe(find_recipe("quickstart"), cards={}))
    sys.setprofile(None)
    loader = make_loader(trainer.recipe, 0)
    trainer.train_step(loader.batch(0))
    batch = loader.batch(1)
    built, files = files, set()
    sys.setprofile(note)
    trainer.train_step(batch)
    sys.setprofile(None)
    return built, {file for file in files if not file.startswith("tests/")}


def test_the_path_of_a_batch_is_what_the_quickstarts_step_runs(world: Callable[[int], World]) -> None:
    ran = set().union(*(step for _, step in world(8).run(files_of_a_step)))
    assert ran == set(BATCH_PATH), f"gone from the path: {set(BATCH_PATH) - ran}; new on it: {ran - set(BATCH_PATH)}"
