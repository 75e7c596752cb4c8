"""Plausible tables that are wrong: `tensor_parallelize` refuses each, or catches it by its check,
and none is silent.

The tables of seven models are right as they are. Each is spoiled in the ways in which people get a
table wrong: a rule that is left out, a column for a row, heads that are not kept together or not
counted, a norm of heads that is taken for one of whole activations, two products in one weight, a
module that enters too early."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from torch import nn

from parallel3d.convert.apply import tensor_parallelize
from parallel3d.convert.families import rules_of
from parallel3d.convert.rules import Column, Enter, Replicate, Row, Rules
from tests.distributed.layer_cases import tp_mesh
from tests.distributed.test_families import PRELOAD as PRELOAD
from tests.distributed.test_families import build

DRAWN = 24


KINDS = ("llama", "qwen2, tied", "qwen3", "mistral", "gpt2", "phi3", "opt")


def refuse_norms_taken_for_whole_ones() -> None:
    tp = tp_mesh()
    model = build("qwen3")
    table = {**rules_of(model), "**.self_attn.k_norm": Replicate()}
    with pytest.raises(ValueError, match="k_norm.weight: its gradient differs.*partial_gradient"):
        tensor_parallelize(model, tp, table)


def spoiled(draw: random.Random, models: dict[str, nn.Module]) -> tuple[str, Rules, str]:
    """Draws a model and spoils its table in one place. Returns what was done, too."""
    kind = draw.choice(sorted(models))
    table = dict(rules_of(models[kind]))
    name = draw.choice([name for name in table if name != "**.wpe"])
    rule = table[name]
    match rule:
        case Column(gather_output=True):
            table[name] = Row()
        case Column(parts=parts, unit=unit) if parts != 1 and unit:
            table[name] = draw.choice([Column(), Column(unit="head_dim"), Replicate()])
        case Column():
            table[name] = draw.choice([Replicate(), Row()])
        case Row():
            table[name] = draw.choice([Column(), Replicate(), Column(gather_output=True)])
        case Replicate(partial_gradient=True):
            table[name] = Replicate()
        case Enter():
            outer = name.rpartition(".")[0]
            del table[name]
            table[outer] = Enter()
        case _:
            del table[name]
    return kind, table, f"{kind}: {name} as {table.get(name, 'nothing')}"


def refuse_drawn() -> list[str]:
    """Returns the drawn tables of this process's that were accepted."""
    draw = random.Random(0)
    tp = tp_mesh()
    silent = []
    models = {kind: build(kind) for kind in KINDS}
    for _ in range(DRAWN):
        kind, table, done = spoiled(draw, models)
        try:
            tensor_parallelize(copy.deepcopy(models[kind]), tp, table)
            silent.append(done)
        except ValueError:
            pass
    return silent


@pytest.mark.skipif(
    version("torch").startswith("2.11."),
    reason="its attention on CPUs divides by zero heads, which ends the process",
)
def test_no_table_that_is_spoiled_in_one_place_is_accepted_in_silence(world: Callable) -> None:
    assert world(2).run(refuse_drawn) == [[], []]


def ask_for_an_example() -> None:
    tp = tp_mesh()
    torch.manual_seed(0)
    table: Rules = {"0": "column", "2": "row"}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"example=tensor"):
        tensor_parallelize(model, tp, table)
    tensor_parallelize(copy.deepcopy(model), tp, table, check=False)
    x = torch.ones(2, 4)
    for example in (x, (x,), {"input": x}):
        split = tensor_parallelize(copy.deepcopy(model), tp, table, example=example)
        assert split(torch.ones(1, 4)).shape == (1, 3)
        for parameter in split.parameters():
            assert parameter.grad is None
        assert split.training


def stay_in_bfloat16() -> None:
    tp = tp_mesh()
    whole = build("llama", torch.bfloat16)
    split = tensor_parallelize(copy.deepcopy(whole), tp)
    for (name, ours), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours.full_tensor(), theirs), name  # type: ignore[attr-defined]
    for (name, ours), theirs in zip(split.named_buffers(), whole.buffers(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


CASES = {
    "a wrong gradient is refused with its causes": refuse_norms_taken_for_whole_ones,
    "a model that tells no example needs one": ask_for_an_example,
    "a model in 16 bits is checked in float32 and stays what it was": stay_in_bfloat16,
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_is_checked(world: Callable, case: str) -> None:
    world(2).run(CASES[case])
