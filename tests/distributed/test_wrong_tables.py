"""Plausible tables that are wrong: `tensor_parallelize` refuses each, or catches it by its check,
and none is silent.

The tables of five models are right as they are. Each is spoiled in the ways in which people get a
table wrong: a rule that is left out, a column for a row, heads that are not kept together or not
counted, a norm of heads that is taken for one of whole activations, two products in one weight, a
module that enters too early."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.convert.apply import tensor_parallelize
from parallel3d.convert.families import rules_of
from parallel3d.convert.rules import Column, Divide, Enter, Replicate, Row, Rules
from tests.distributed.test_convert import KINDS, build
from tests.distributed.test_convert import PRELOAD as PRELOAD
from tests.distributed.test_families import build as build_family
from tests.test_convert import Lora

DRAWN = 20


PHI3: Rules = {
    "model.embed_tokens": "vocab",
    "**.self_attn.qkv_proj": "column",
    "**.self_attn.o_proj": "row",
    "**.mlp.gate_up_proj": "column",
    "**.mlp.down_proj": "row",
    "lm_head": Column(gather_output=True),
}


def phi3() -> nn.Module:
    return build_family("phi3", torch.float32)


def opt() -> nn.Module:
    return build_family("opt", torch.float32)


def without(table: Rules, *names: str) -> Rules:
    return {name: rule for name, rule in table.items() if not name.endswith(names)}


WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Rules], str]] = {
    "norms of heads without a rule": (
        lambda: build("qwen3"),
        lambda model: without(rules_of(model), "q_norm", "k_norm"),
        "q_norm: no rule says what",
    ),
    "norms of heads taken for whole ones": (
        lambda: build("qwen3"),
        lambda model: {
            **rules_of(model),
            "**.self_attn.q_norm": Replicate(),
            "**.self_attn.k_norm": Replicate(),
        },
        "k_norm.weight: its gradient differs",
    ),
    "q, k and v in one weight": (phi3, lambda _: PHI3, "self_attn"),
    "heads that are not divided": (
        opt,
        lambda model: without(rules_of(model), "self_attn"),
        "split module cannot be computed|output differs",
    ),
    "a whole block entered": (
        lambda: build("llama"),
        lambda model: {**without(rules_of(model), "self_attn", "mlp"), "**.layers.*": Enter()},
        "gradient differs",
    ),
}


def refuse(
    build_model: Callable[[], nn.Module], table: Callable[[nn.Module], Rules], words: str
) -> None:
    tp, model = init_device_mesh("cpu", (get_world_size(),)), build_model()
    with pytest.raises(ValueError, match=words):
        tensor_parallelize(model, tp, table(model))


def refuse_named(name: str) -> None:
    refuse(*WRONG[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_plausible_table_that_is_wrong_is_refused(world: Callable, name: str) -> None:
    world(2).run(refuse_named, name)


def spoiled(draw: random.Random, models: dict[str, nn.Module]) -> tuple[str, Rules, str]:
    """Draws a model and spoils its table in one place. Returns what was done, too."""
    kind = draw.choice(sorted(models))
    table = dict(rules_of(models[kind]))
    name = draw.choice([name for name in table if name != "**.wpe"])
    rule = table[name]
    match rule:
        case Column(gather_output=True):
            table[name] = Row()
        case Column(unit=None):
            table[name] = draw.choice([Row(), Replicate()])
        case Column(parts=3):
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


def refuse_drawn(seed: int) -> list[str]:
    """Returns the drawn tables of this process's that were accepted."""
    draw, tp, silent = random.Random(seed), init_device_mesh("cpu", (get_world_size(),)), []
    models = {kind: build(kind) for kind in KINDS}
    for _ in range(DRAWN):
        kind, table, done = spoiled(draw, models)
        try:
            tensor_parallelize(copy.deepcopy(models[kind]), tp, table)
            silent.append(done)
        except ValueError:
            pass
    return silent


def test_no_table_that_is_spoiled_in_one_place_is_accepted_in_silence(world: Callable) -> None:
    assert world(2).run(refuse_drawn, 0) == [[], []]


def test_a_model_that_tells_no_example_needs_one(world: Callable) -> None:
    world(2).run(ask_for_an_example)


def ask_for_an_example() -> None:
    tp = init_device_mesh("cpu", (get_world_size(),))
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
        assert all(parameter.grad is None for parameter in split.parameters()) and split.training


class NanoAttention(nn.Module):
    """nanoGPT's attention, with the sizes that its forward takes from its whole input, or with
    -1."""

    def __init__(self, features: int, n_head: int, *, is_original: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.n_head, self.n_embd, self.is_original = n_head, features, is_original

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        width, joined = (C // self.n_head, C) if self.is_original else (-1, -1)
        q, k, v = (
            each.view(B, T, self.n_head, width).transpose(1, 2)
            for each in self.c_attn(x).split(self.n_embd, 2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(B, T, joined))
        return z


def split_nanogpt() -> None:
    tp = init_device_mesh("cpu", (get_world_size(),))
    heads = Divide(("n_head", "n_embd"))
    table: Rules = {"0": heads, "0.c_attn": Column(parts=3), "0.c_proj": "row"}
    for is_original in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(NanoAttention(16, 4, is_original=is_original))
        with (
            pytest.raises(ValueError, match=r"C // self.n_head\)\): write -1")
            if is_original
            else nullcontext()
        ):
            tensor_parallelize(model, tp, table, example=torch.randn(2, 3, 16))


def test_nanogpts_original_forward_is_refused_with_its_cause(world: Callable) -> None:
    world(2).run(split_nanogpt)


def add_adapters_after_the_split() -> None:
    tp, x = init_device_mesh("cpu", (get_world_size(),)), torch.ones(2, 4)
    for name in ("0", "2"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        split = tensor_parallelize(model, tp, {"0": "column", "2": "row"}, example=x)
        for changed in (copy.deepcopy(split), split):
            changed.set_submodule(name, Lora(changed.get_submodule(name)))
            with pytest.raises(
                RuntimeError,
                match=rf"^{name}.lora_A.default.weight: was added after {name} was split",
            ):
                changed(x)


def test_adapters_that_are_added_after_the_split_are_refused_in_the_first_forward_pass(
    world: Callable,
) -> None:
    world(2).run(add_adapters_after_the_split)


def stay_in_bfloat16() -> None:
    tp = init_device_mesh("cpu", (get_world_size(),))
    whole = build("llama").to(torch.bfloat16)
    split = tensor_parallelize(copy.deepcopy(whole), tp)
    for (name, ours), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours.full_tensor(), theirs), name  # type: ignore[attr-defined]
    for (name, ours), theirs in zip(split.named_buffers(), whole.buffers(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


def test_a_model_in_16_bits_is_checked_in_float32_and_stays_what_it_was(world: Callable) -> None:
    world(2).run(stay_in_bfloat16)
