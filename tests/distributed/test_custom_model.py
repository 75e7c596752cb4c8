"""The model of docs/how-to/custom-model.md trains in every layout as in one process, and faults
planted in it are found."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.models import shape_cards
from parallel3d.tools.check_layout import conformance
from parallel3d.tools.check_layout.data import TrainingRecord
from tests.distributed.training_cases import Curve, resume_beside

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "custom-model.md"
SEQUENCE = {"tp": 2, "sequence_parallel": True}
BOTH = [
    {"tp": 2, "pp": 2, "sequence_parallel": True},
    {"tp": 2, "dp_shard": 2, "sequence_parallel": True, "recompute": "full"},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, whose model trains a few steps."""
    monkeypatch.setattr(conformance, "STEPS", 2)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for text, name in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / "palm.yaml").write_text(
        re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    )
    return tmp_path


@contextmanager
def known(folder: Path) -> Iterator[None]:
    """Lets a process import from the folder, and forget it after.

    It comes first, because ranks of a pool keep the folder of the test that started them.
    """
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in ("palm", "faulty"):
            sys.modules.pop(name, None)


def in_folder(
    folder: Path, record: Callable[..., TrainingRecord], *arguments: object
) -> TrainingRecord:
    torch.manual_seed(dist.get_rank())  # what depends on it would differ between the ranks
    with known(folder):
        return record(*arguments)


def conform(
    world: Callable, recipe: Recipe | Path, folder: Path, *layouts: Mapping[str, Any]
) -> str:
    def run(
        record: Callable[..., TrainingRecord], *arguments: object, world_size: int
    ) -> TrainingRecord:
        return world(world_size).run(in_folder, folder, record, *arguments)[0]

    with known(folder):
        return conformance.assert_conforms(recipe, layouts=layouts, run=run)


def test_the_model_of_the_page_is_the_same_in_both_layouts(world: Callable, folder: Path) -> None:
    page = conform(world, folder / "palm.yaml", folder, *BOTH).splitlines()
    assert len(page) == 1 + len(BOTH)
    for line in page:
        assert line.endswith("the same model")


FAULTS = {
    "a gradient that is not summed": (
        "from palm import *\n"
        "def forward(self, x):\n"
        "    return x * self.replicated('weight')\n"
        "class Gain(ParallelModule):\n"
        "    forward = forward\n"
        "    def __init__(self, hidden, tp):\n"
        "        super().__init__(tp)\n"
        "        init = lambda tensor, generator: tensor.fill_(0.5)\n"
        "        self.add_parameter('weight', ParameterSpec((hidden,), None, init))\n"
        "class FaultyBlock(ParallelBlock):\n"
        "    def __init__(self, config, placement, *rest, selective):\n"
        "        super().__init__(config, placement, *rest, selective=selective)\n"
        "        self.scale = Gain(config.hidden, placement)\n",
        SEQUENCE,
        r"gradient of layers\.3\.scale\.weight.*\n(.*\n)*.*the ranks hold different gradients",
    ),
    "weights that depend on the rank": (
        "from palm import *\n"
        "class FaultyBlock(ParallelBlock):\n"
        "    def __init__(self, config, placement, *rest, selective):\n"
        "        super().__init__(config, placement, *rest, selective=selective)\n"
        "        init = lambda tensor, generator: tensor.normal_(0.5, 0.1)\n"
        "        self.scale.specs['weight'] = ParameterSpec((config.hidden,), None, init)\n",
        {"dp_shard": 2},  # which cuts them, so that no two ranks hold the same
        r"differs first before training: initial weight of layers\.0\.scale\.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_users_model_is_found(
    world: Callable, folder: Path, fault: str
) -> None:
    text, layout, said = FAULTS[fault]
    (folder / "faulty.py").write_text(
        f"{text}\nclass Faulty(Palm):\n    block_class = FaultyBlock\n"
    )
    recipe = load_recipe(
        folder / "palm.yaml",
        ["model.architecture=faulty:Faulty", "model.options.biases=false"],
        cards=shape_cards(),
    )
    with pytest.raises(AssertionError, match=said):
        conform(world, recipe, folder, layout)


def resumed(
    folder: Path,
    recipe: Recipe,
    other: Recipe,
) -> tuple[Curve, Curve]:
    """Returns the steps after a checkpoint, gone on with and resumed in another layout."""
    with known(folder):
        return resume_beside(recipe, folder / "checkpoint", 2, into=other)


def test_a_checkpoint_of_the_users_model_goes_on_in_another_layout(
    world: Callable, folder: Path
) -> None:
    small = ["train.seq_len=16", "train.global_batch_size=4"]
    recipe, other = (
        load_recipe(folder / "palm.yaml", [*small, *layout], cards=shape_cards())
        for layout in ([], ["parallel.tp=1", "parallel.pp=2"])
    )
    for straight, again in world(2).run(resumed, folder, recipe, other):
        assert again == [pytest.approx(step, rel=1e-5) for step in straight]
