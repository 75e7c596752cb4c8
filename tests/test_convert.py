"""A table of rules: the modules that it means, and what is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import utils

from parallel3d.convert.apply import ModulePlan, plan_modules, split_dims
from parallel3d.convert.families import FAMILIES
from parallel3d.convert.forms import ColumnForm, EmbeddingForm, EnterForm, ReplicatedForm, RowForm
from parallel3d.convert.rules import Column, Divide, Enter, Replicate, Row, Rules, Vocab


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
        self.head_dim, self.num_key_value_groups = 4, heads // kv_heads
        self.q = nn.Linear(16, heads * 4)
        self.k = nn.Linear(16, kv_heads * 4)
        self.o = nn.Linear(heads * 4, 16)


class Model(nn.Module):
    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": Attention(heads, kv_heads)}) for _ in range(2))
        self.norm = nn.LayerNorm(16)


class Lora(nn.Module):
    """A linear with an adapter, as peft wraps it."""

    def __init__(self, base_layer: nn.Module, rank: int = 2) -> None:
        super().__init__()
        features = base_layer.out_features, base_layer.in_features
        if isinstance(base_layer.weight, DTensor):
            features = base_layer.weight.to_local().shape
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(features[1], rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, features[0], bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        return y + self.lora_B["default"](self.lora_A["default"](x))


def add_adapters(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.set_submodule(name, Lora(module.get_submodule(name)))
    return module


RULES: Rules = {
    "embed": "vocab",
    "**.attn": Enter(),
    "blocks.*.attn.q": Column(unit="head_dim"),
    "blocks.*.attn.k": Column(unit="head_dim", shared="num_key_value_groups"),
    "**.o": "row",
}


def plans(module: nn.Module, rules: Rules, tp: int = 2) -> dict[str, ModulePlan]:
    return {plan.part.name: plan for plan in plan_modules(module, rules, tp)}


def test_patterns_choose_modules_and_their_parameters_dims() -> None:
    found = plans(Model(), RULES)
    assert found["embed"].form is EmbeddingForm and found["embed"].dims == {"weight": 0}
    for i in range(2):
        assert found[f"blocks.{i}.attn"].form is EnterForm
        assert found[f"blocks.{i}.attn.q"].form is ColumnForm
        assert found[f"blocks.{i}.attn.q"].dims == {"weight": 0, "bias": 0}
        assert found[f"blocks.{i}.attn.q"].settings["entered"] is True
        assert found[f"blocks.{i}.attn.o"].form is RowForm
        assert found[f"blocks.{i}.attn.o"].dims == {"weight": 1, "bias": None}
    assert found["norm"].form is ReplicatedForm and found["norm"].dims == {"weight": None, "bias": None}
    assert found["blocks"].form is None


def test_fewer_heads_than_ranks_are_shared_and_their_group_shrinks() -> None:
    found = plans(Model(heads=8, kv_heads=2), RULES, tp=4)["blocks.0.attn.k"]
    assert found.dims == {"weight": None, "bias": None} and found.settings["shared_heads"] == 2
    ((owner, attribute),) = found.counts
    assert isinstance(owner, Attention) and attribute == "num_key_value_groups"
    assert found.counts[owner, attribute] == 2  # half of the 4 query heads to a key head are on each of its ranks


def test_a_transposed_pack_is_kept_split_by_its_inputs() -> None:
    model = nn.ModuleDict({"attn": nn.ModuleDict({"c_attn": Conv1D(48, 16), "c_proj": Conv1D(16, 16)})})
    model["attn"].head_dim = 4  # type: ignore[assignment]
    found = plans(model, {"attn.c_attn": Column(unit="head_dim", parts=3), "attn.c_proj": Row()})
    assert found["attn.c_attn"].dims == {"weight": 0, "bias": None}
    assert found["attn.c_proj"].dims == {"weight": 0, "bias": None}


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"blocks.*.atn.q": "column"}, 2, r"rule 'blocks.\*.atn.q': matches no module; the nearest name is 'blocks.\d"),
        ({"blocks.0.attn.q": "column"}, 2, r"blocks.0.attn.q: matched by two rules, 'blocks.\*.attn.q' and"),
        ({"norm": "colum"}, 2, r"rule 'norm': 'colum' is no style; try one of column, row, vocab, replicate"),
        ({"norm": "column"}, 2, r"norm: is a LayerNorm; only nn.Linear and Conv1D can be split so"),
        ({"norm": "vocab"}, 2, r"norm: is a LayerNorm; only nn.Embedding can be split by rows"),
        ({}, 3, r"blocks.0.attn.q: 4 heads \(.*head_dim\) cannot be split over tp = 3; try tp = 1, 2 or 4"),
        ({"blocks.*": Divide(("heads",))}, 2, r"blocks.0: its rule needs ModuleDict.heads, and that is None"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(change: Rules, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plans(Model(), {**RULES, **change}, tp)


def test_a_linear_without_a_rule_is_refused_by_name() -> None:
    rules = {pattern: rule for pattern, rule in RULES.items() if pattern != "**.o"}
    with pytest.raises(ValueError, match=r'blocks.0.attn.o: no rule says how to split this Linear; try "replicate"'):
        plans(Model(), rules)
    assert plans(Model(), {**rules, "**.o": "replicate"})["blocks.0.attn.o"].form is ReplicatedForm


def test_a_linear_of_another_forward_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2.0 * super().forward(input)

    with pytest.raises(ValueError, match="0: is a Scaled; only nn.Linear and Conv1D can be split so"):
        plans(nn.Sequential(Scaled(4, 4)), {"0": "column"})


def test_a_linear_that_is_wrapped_before_the_split_is_refused_with_rules_for_the_linears_inside_it() -> None:
    model = add_adapters(Model(), *(f"blocks.{i}.attn.{name}" for i in range(2) for name in "qo"))
    with pytest.raises(ValueError, match=r"^blocks.0.attn.q: is a Lora around several linears") as caught:
        plans(model, RULES)
    found = plans(model, eval(str(caught.value).partition("for example ")[2], {**globals(), "rules": RULES}))
    forms = {name.partition("attn.")[2]: plan.form for name, plan in found.items() if name.startswith("blocks.0.attn.")}
    assert forms["q.base_layer"] is forms["q.lora_B.default"] is ColumnForm
    assert forms["o.base_layer"] is forms["o.lora_A.default"] is RowForm
    assert forms["q.lora_A.default"] is forms["o.lora_B.default"] is ReplicatedForm
    assert found["blocks.0.attn.q.lora_A.default"].settings["partial_gradient"] is True  # the attention sums dx


@pytest.mark.parametrize("norm", [utils.weight_norm, utils.spectral_norm, utils.parametrizations.weight_norm])
def test_a_weight_that_is_computed_in_each_forward_pass_is_refused(norm: Callable) -> None:
    model = nn.Sequential(norm(nn.Linear(4, 8)))
    with pytest.raises(ValueError, match=r"^0: computes its weight in each forward pass, by weight_norm"):
        plans(model, {"0": "column"})


def test_an_embedding_that_looks_at_all_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="0: max_norm"):
        plans(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), {"0": Vocab()})


def test_tied_parameters_must_be_split_alike() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    assert set(split_dims(plan_modules(model, {"0": "vocab", "1": "column"}, 2)).values()) == {0}
    with pytest.raises(ValueError, match="1.weight: is tied to a parameter that another rule splits along dim 0"):
        split_dims(plan_modules(model, {"0": "vocab", "1": "row"}, 2))


def test_the_norms_of_heads_have_partial_gradients() -> None:
    assert FAMILIES["qwen3"]["**.self_attn.q_norm"] == Replicate(partial_gradient=True)
    assert set(FAMILIES["llama"]) < set(FAMILIES["qwen3"])
