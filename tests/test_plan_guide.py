"""The cell of the guide that applies, and that every cell's options are a plan's."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from parallel3d.tools.plan import guide
from tests.plan_json import Said, plan_json

CLUSTERS = tomllib.loads(Path(guide.__file__).with_suffix(".toml").read_text())["clusters"]


@pytest.mark.parametrize(
    ("asked", "cell"),
    [
        ("gpt2 --seq-len 1024 --gpu rtx4090 --gpus 1", ["one GPU", "the model fits"]),
        ("llama3-8b --gpus 8", ["one node, fast links", "only a layer fits"]),
        ("llama3-8b --gpus 9", ["many nodes, fast links", "only a layer fits"]),
        ("llama3-8b --gpu l4 --gpus 8", ["one node, slow links", "only a layer fits"]),
        ("llama3-405b --gpu rtx4090 --gpus 64", ["many nodes, slow links", "no layer fits"]),
        ("llama3-8b --gpus 8 --gpu-memory 200GB", ["one node, fast links", "the model fits"]),
    ],
)
def test_the_cell_is_that_of_the_model_and_the_cluster(
    asked: str, cell: list[str], capsys: Said
) -> None:
    assert plan_json(f"guide --model {asked}", capsys)["cell"] == cell


@pytest.mark.parametrize("place", CLUSTERS)
def test_the_options_of_each_cell_give_a_plan(place: str, capsys: Said) -> None:
    gpus = {"one GPU": 1, "one node": 8}.get(place.partition(",")[0], 16)
    for _, flags in CLUSTERS[place].values():
        if not flags.startswith("("):
            asked = f"--model llama3.2-1b --gpu h100 --gpus {gpus} {flags}"
            tree = plan_json(f"{asked} --seq-len 4096 --global-batch 64", capsys)
            assert tree["strategies"]
