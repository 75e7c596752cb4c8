"""A table of rules: what each module becomes, and what is refused before anything is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel3d.convert.apply import ModulePlan, plan_modules, split_dims
from parallel3d.convert.families import rules_of
from parallel3d.convert.parallel_modules import (
    ColumnParallel,
    EnterRegion,
    PackedColumnParallel,
    Replicated,
    RowParallel,
    VocabParallel,
)
from parallel3d.convert.rules import Column, Enter, Rules


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = 4
        self.num_key_value_groups = heads // kv_heads
        self.q = nn.Linear(16, heads * 4)
        self.k = nn.Linear(16, kv_heads * 4)
        self.o = nn.Linear(heads * 4, 16)
        self.packed = Conv1D(48, 16)


class Model(nn.Module):
    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.attn = Attention(heads, kv_heads)
        self.norm = nn.LayerNorm(16)


RULES: Rules = {
    "embed": "vocab",
    "**.attn": Enter(),
    "attn.q": Column(unit="head_dim"),
    "attn.k": Column(unit="head_dim", shared="num_key_value_groups"),
    "attn.packed": Column(unit="head_dim", parts=3),
    "**.o": "row",
}


def packed(parts: int | tuple[int | str, ...]) -> Rules:
    return {"attn.packed": Column(unit="head_dim", parts=parts)}


def plans(module: nn.Module, rules: Rules, tp: int = 2) -> dict[str, ModulePlan]:
    return {plan.name: plan for plan in plan_modules(module, rules, tp)}


def test_a_rule_chooses_the_class_and_the_dims_of_a_module() -> None:
    found = plans(Model(), RULES)
    assert {name: (plan.parallel_class, dict(plan.dims)) for name, plan in found.items()} == {
        "": (None, {}),
        "embed": (VocabParallel, {"weight": 0}),
        "attn": (EnterRegion, {}),
        "attn.q": (ColumnParallel, {"weight": 0, "bias": 0}),
        "attn.k": (ColumnParallel, {"weight": 0, "bias": 0}),
        "attn.packed": (PackedColumnParallel, {"weight": 0, "bias": None}),
        "attn.o": (RowParallel, {"weight": 1, "bias": None}),
        "norm": (Replicated, {"weight": None, "bias": None}),
    }
    assert found["attn.q"].settings["is_entered"] is True


def test_fewer_heads_than_ranks_are_shared_and_their_group_shrinks() -> None:
    found = plans(Model(heads=12, kv_heads=2), {**RULES, "attn.packed": "replicate"}, tp=4)
    assert found["attn.k"].dims == {"weight": 1, "bias": None}
    # Half of the 6 query heads to a key head are on each of its ranks.
    assert list(found["attn.k"].counts.values()) == [3]


@pytest.mark.parametrize(
    "change, tp, message",
    [
        ({"*.atn.q": "column"}, 2, r"rule '\*.atn.q': matches no module; the names are"),
        ({"attn.*": "column"}, 2, r"attn.q: matches two rules, 'attn.q' and 'attn.\*'"),
        (
            {"norm": "colum"},
            2,
            r"rule 'norm': unknown style 'colum'; use one of column, row, vocab",
        ),
        (
            {"norm": "column"},
            2,
            "norm: is a LayerNorm, but column and row need nn.Linear or Conv1D",
        ),
        ({"norm": "vocab"}, 2, "norm: is a LayerNorm, but vocab needs nn.Embedding without"),
        ({}, 3, r"attn.q: 4 heads \(.*head_dim\) cannot be split over tp = 3; try tp = 1, 2 or 4"),
        (
            packed((4, "heads", 1)),
            2,
            r"packed: its rule needs Attention.heads >= 1, but it is None",
        ),
        (packed((4, 1, 1)), 2, r"48 output features do not match parts of \[4, 1, 1\] units of 4"),
        (
            packed((5, 6, 1)),
            2,
            "packed: 5 units in one of the parts .* cannot be split over tp = 2",
        ),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(change: Rules, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plans(Model(), {**RULES, **change}, tp)


def test_a_linear_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match='0: this Linear has no rule; add one, for example "repl'):
        plans(nn.Sequential(nn.Linear(4, 4)), {})


def test_tied_parameters_must_be_split_alike() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    assert set(split_dims(plan_modules(model, {"0": "vocab", "1": "column"}, 2)).values()) == {0}
    with pytest.raises(ValueError, match="1.weight: tied to a parameter that another rule"):
        split_dims(plan_modules(model, {"0": "vocab", "1": "row"}, 2))


def test_a_model_without_a_table_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"Linear with .*: no built-in rules, only for arcee, "):
        rules_of(nn.Linear(2, 2))
