"""A mixture of experts trains the same model in every layout: losses, norms, choices and loads of
eight clipped steps beside one process, and the layer beside a plain loop over its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe
from parallel3d.data.loader import IGNORED
from parallel3d.layers import experts, router
from parallel3d.layers.experts import ParallelExperts
from parallel3d.layers.parameter import (
    ParallelContext,
    initial_weights,
    initialize,
    set_fused_gradients,
)
from parallel3d.layers.router import choose_experts
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.models.llama import Llama
from parallel3d.training.state import load_trainer
from tests.distributed.training_cases import (
    GROUPED,
    Curve,
    assert_follows,
    label,
    long,
    make_loader,
    make_recipe,
    make_trainer,
    save_trainer,
    train,
)

STEPS = 5
EXPERTS = ExpertsConfig(
    count=8,
    per_token=2,
    hidden=24,
)
MIXTURE = replace(GROUPED, experts=EXPERTS)
SHARED = replace(
    GROUPED,
    experts=replace(
        EXPERTS,
        shared_hidden=16,
        shared_gate=True,
        dense_layers=1,
        score="sigmoid",
        scale=1.5,
        bias_rate=0.01,
    ),
)
DEEP = replace(MIXTURE, layers=4)
EP2 = {
    "dp_shard": 2,
    "ep": 2,
}
INTERLEAVED = {
    "schedule": "interleaved_1f1b",
    "virtual_stages": 2,
}

LAYOUTS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (
        MIXTURE,
        {
            **EP2,
            "microbatch_size": 1,
        },
    ),
    (
        MIXTURE,
        {
            "dp_shard": 4,
            "ep": 2,
            "sharding": "SHARD_OPTIMIZER",
            "recompute": "selective",
        },
    ),
    (
        SHARED,
        {
            "tp": 2,
            **EP2,
            "ep": 4,
            "sequence_parallel": True,
        },
    ),
    (
        MIXTURE,
        {
            "cp": 2,
            "dp_shard": 2,
            "ep": 4,
        },
    ),
    (
        MIXTURE,
        {
            "tp": 2,
            "pp": 2,
            **EP2,
            "ep": 4,
            "schedule": "zb_h1",
        },
    ),
]
LONG: list[tuple[ModelConfig, dict[str, Any]]] = [
    (
        DEEP,
        {
            "pp": 2,
            **EP2,
            **INTERLEAVED,
            "recompute": "full",
        },
    ),
    (
        MIXTURE,
        {
            "dp_replicate": 2,
            **EP2,
        },
    ),
    (
        SHARED,
        {
            "dp_shard": 4,
            "ep": 4,
            "sharding": "NO_SHARD",
        },
    ),
    (
        SHARED,
        {
            "dp_shard": 4,
            "ep": 2,
            "recompute": "full",
        },
    ),
]
MUON = OptimizerConfig(
    name="muon",
    lr=1e-3,
    min_lr_ratio=1.0,
    ns_dtype="fp32",
)


def case(model: ModelConfig, layout: dict[str, Any], **sections: Any) -> ParameterSet:
    parallel = ParallelConfig(**{"microbatch_size": 2, **layout})
    recipe = replace(make_recipe(model, parallel, seed=1), **sections)
    kind = "shared" if model.experts == SHARED.experts else "plain"
    name = "-".join([label(parallel, model), f"ep{parallel.expert_ranks}", kind, *sections])
    return pytest.param(recipe, id=name)


# As many experts as ranks, and all of them for each token.
ALL = replace(
    GROUPED,
    experts=ExpertsConfig(
        count=4,
        per_token=4,
        hidden=24,
    ),
)
CASES = [case(*each) for each in LAYOUTS]
CASES += [long(case(*each)) for each in LONG]
CASES += [
    case(SHARED, {"dp_shard": 4, "ep": 2}, optimizer=MUON),
    long(case(ALL, {"dp_shard": 4, "ep": 4})),
]


Loads = dict[str, list[int]]  # tokens of each expert, by router and step


def run(recipe: Recipe) -> tuple[Curve, Loads, bool]:
    """Returns the curve, the loads of this rank's layers, and whether this rank starts from its
    parts of the weights of one process."""
    trainer = make_trainer(recipe)
    weights = initial_weights(Llama(recipe.model, device="meta"), recipe.train.seed)
    is_equal = True
    for parameter in trainer.parameters:
        full = parameter.part.distributed(parameter.local.detach())
        full = full.full_tensor() if hasattr(full, "full_tensor") else full
        is_equal = is_equal and torch.equal(full, weights[parameter.name])
    loader = make_loader(recipe, dist.get_rank())
    curve = []
    loads: Loads = {}
    for step in range(STEPS):
        result = trainer.train_step(loader.batch(step))
        curve.append((result.loss, result.grad_norm))
        assert trainer.experts is not None
        loads |= {f"{step} {name}": load.tolist() for name, load in trainer.experts.loads.items()}
    return curve, loads, is_equal


@pytest.fixture(scope="module")
def alone(world: Callable) -> Callable[[Recipe], tuple[Curve, Loads]]:
    known: dict[Recipe, Any] = {}

    def reference(recipe: Recipe) -> tuple[Curve, Loads]:
        single = replace(recipe, parallel=ParallelConfig(microbatch_size=8))
        if single not in known:
            known[single] = world(1).run(run, single)[0]
        curve, loads, _ = known[single]
        return curve, loads

    return reference


@pytest.mark.parametrize("recipe", CASES)
def test_layout_trains_as_one_process_does(
    world: Callable, alone: Callable, recipe: Recipe
) -> None:
    reference, loads = alone(recipe)
    ranks = world(recipe.parallel.world_size).run(run, recipe)
    for curve, own_loads, is_equal in ranks:
        assert is_equal
        assert curve == ranks[0][0], "the ranks do not agree on what they did"
        assert own_loads.items() <= loads.items(), "tokens have other experts"
    assert_follows(ranks[0][0], reference)


@pytest.mark.parametrize("precision", ["bf16", long("fp16")])
def test_16_bits_choose_nearly_the_same_experts(
    world: Callable, alone: Callable, precision: Any
) -> None:
    settings = {"precision": precision, "seed": 1}
    apart = replace(MIXTURE, init_std=0.2)  # With the usual weights, most scores are nearly equal.
    recipe = make_recipe(apart, ParallelConfig(**EP2, microbatch_size=4), **settings)
    reference, loads = alone(recipe)
    (curve, own_loads, _), *_ = world(2).run(run, recipe)
    assert curve[-1][0] == pytest.approx(reference[-1][0], rel=1e-2)
    moved = sum(
        abs(a - b)
        for name, load in own_loads.items()
        for a, b in zip(load, loads[name], strict=True)
    )
    # A token that moves from one expert to another changes two loads.
    assert moved / 2 < 0.01 * sum(sum(load) for load in loads.values())


def without_labels(recipe: Recipe) -> tuple[float, float, list[int]]:
    """Returns the loss and norm of a step whose first half of the sequences has no labels, and the
    load of an expert that no token chooses."""
    trainer = make_trainer(recipe)
    assert trainer.experts is not None
    for each in trainer.experts.routers.values():
        each.bias = torch.tensor([-1e9] + [0.0] * 7)
    batch = make_loader(recipe, dist.get_rank()).batch(0)
    batch.labels[: len(batch.labels) // 2] = IGNORED
    result = trainer.train_step(batch)
    return result.loss, result.grad_norm, [int(x[0]) for x in trainer.experts.loads.values()]


def test_microbatches_without_labels_and_experts_without_tokens(world: Callable) -> None:
    (alone,) = world(1).run(without_labels, make_recipe(SHARED, ParallelConfig()))
    ranks = world(2).run(without_labels, make_recipe(SHARED, ParallelConfig(tp=2)))
    for loss, norm, load in ranks:
        assert (loss, norm) == pytest.approx(alone[:2], rel=1e-6)
        assert load == alone[2] == [0, 0]


D, F_HIDDEN = 8, 6
LAYERS = st.fixed_dictionaries(
    {
        "count": st.sampled_from([4, 8]),
        "per_token": st.integers(1, 4),
        "tokens": st.integers(1, 9),
        "case": st.sampled_from(["random", "one expert", "ties"]),
        "score": st.sampled_from(["softmax", "sigmoid"]),
        "normalize": st.booleans(),
    }
)


def plain_loop(weights: dict[str, Tensor], x: Tensor, chosen: Tensor, gate: Tensor) -> Tensor:
    """Computes a mixture token by token in the order of experts."""
    y = torch.zeros_like(x)
    count = len(weights["router.weight"])
    g, u, d = (
        weights[f"experts.{name}"].unflatten(0, (count, -1)) for name in ("gate", "up", "down")
    )
    for token in range(len(x)):
        for expert, factor in zip(chosen[token].tolist(), gate[token], strict=True):
            h = F.silu(g[expert] @ x[token]) * (u[expert] @ x[token])
            y[token] = y[token] + factor * (d[expert] @ h)
    return y


def layer_errors(ep: int, drawn: dict[str, Any]) -> list[float]:
    """Returns the errors of a layer's output and gradients, whose tokens are divided over ranks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("rest", "ep"))
    how = {
        key: drawn[key]
        for key in (
            "score",
            "normalize",
        )
    }
    sizes = (
        D,
        F_HIDDEN,
        drawn["count"],
        drawn["per_token"],
    )
    alone, layer = (
        ParallelExperts(*sizes, tp=ParallelContext(ep=axis), **how) for axis in (None, mesh["ep"])
    )
    for each in (alone, layer):
        initialize(each, 0, "cpu")
        each.double()
    x, grad = torch.randn(2, ranks, drawn["tokens"], D, dtype=torch.float64)
    dist.broadcast(x, 0)
    dist.broadcast(grad, 0)
    if drawn["case"] != "random":
        for each in (alone, layer):
            weight = each.router.weight
            weight.data.zero_()
            if drawn["case"] == "one expert":
                x = x.abs()
                weight.data[-1] = 1.0
    weights = {name: p.detach().requires_grad_() for name, p in alone.named_parameters()}
    whole = x.flatten(0, 1).requires_grad_()
    logits = F.linear(whole, weights["router.weight"])
    scores = logits.softmax(-1) if how["score"] == "softmax" else logits.sigmoid()
    chosen = choose_experts(scores.detach(), drawn["per_token"])
    gate = scores.gather(1, chosen)
    if how["normalize"]:
        gate = gate / gate.sum(-1, keepdim=True)
    reference = plain_loop(weights, whole, chosen, gate)
    reference.backward(grad.flatten(0, 1))
    own_x = x[dist.get_rank()].unsqueeze(0).requires_grad_()
    y = layer(own_x)
    y.backward(grad[dist.get_rank()].unsqueeze(0))
    pairs = [(y[0], reference.view_as(x)[dist.get_rank()])]
    assert own_x.grad is not None
    assert whole.grad is not None
    pairs.append((own_x.grad[0], whole.grad.view_as(x)[dist.get_rank()]))
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        own = local_tensor(parameter.grad).clone()
        group = mesh["rest"].get_group() if name.startswith("experts") else dist.group.WORLD
        dist.all_reduce(own, group=group)
        wanted = weights[name].grad
        assert wanted is not None
        if name.startswith("experts"):
            wanted = wanted.chunk(ep)[mesh["ep"].get_local_rank()]
        pairs.append((own, wanted))
    return [((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs]


@pytest.mark.parametrize("ranks, ep", [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_the_layer_is_a_plain_loop_over_its_experts(world: Callable, ranks: int, ep: int) -> None:
    pool = world(ranks)

    @settings(
        max_examples=8,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(LAYERS)
    def check(drawn: dict[str, Any]) -> None:
        for errors in pool.run(layer_errors, ep, drawn):
            assert max(errors) < 1e-10, errors

    check()


@pytest.mark.parametrize("fused", [False, True])
def test_grouped_matmuls_equal_the_loop(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 over two microbatches, so that the second is added to the first. The last expert
    has no tokens."""
    found = []
    for is_grouped in (False, True):
        monkeypatch.setattr(experts, "uses_grouped", lambda _, on=is_grouped: on)
        layer = ParallelExperts(16, 24, 4, 2)
        initialize(layer, 0, "cpu")
        layer.bfloat16()
        layer.router.bias = torch.tensor([0.0, 0.0, 0.0, -9.0])
        set_fused_gradients(layer, fused)
        generator = torch.Generator().manual_seed(0)
        microbatches = torch.randn(2, 2, 1, 9, 16, generator=generator).bfloat16()
        leaves = [x.requires_grad_() for x, _ in microbatches]
        for x, (_, grad) in zip(leaves, microbatches, strict=True):
            y = layer(x)
            y.backward(grad)
        gradients = [tensor.grad for tensor in (*leaves, *layer.parameters())]
        found.append([y.detach(), *gradients])
    for grouped, looped in zip(found[1], found[0], strict=True):
        assert looped is not None
        assert (grouped - looped).abs().max() <= 2.0**-6 * looped.abs().max()


def test_a_tie_goes_to_the_lower_expert() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert choose_experts(scores, 2).tolist() == [[1, 2], [0, 1]]


def routed(recompute: Any) -> int:
    """Returns how often the routers of a step order their scores."""
    recipe = make_recipe(MIXTURE, ParallelConfig(dp_shard=2, ep=2, recompute=recompute))
    trainer = make_trainer(recipe)
    batch = make_loader(recipe, dist.get_rank()).batch(0)
    calls = 0
    sort = Tensor.sort

    def count(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += kwargs.get("stable", False) and self.shape[-1] == EXPERTS.count
        return sort(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.Tensor, "sort", count)
        load = trainer.train_step(batch).expert_load
    assert load is not None
    return calls


def test_a_recomputed_block_does_not_route_again(world: Callable) -> None:
    (none, *_) = world(2).run(routed, "none")
    assert none == MIXTURE.layers * 4  # microbatches of a rank
    assert world(2).run(routed, "full") == [none, none]


def straight(recipe: Recipe, path: Path) -> tuple[Curve, dict[str, list[float]]]:
    trainer = make_trainer(recipe)
    train(trainer, 3)
    save_trainer(trainer, path)
    curve = train(trainer, 3)
    assert trainer.experts is not None
    return curve, {name: bias.tolist() for name, bias in trainer.experts.biases.items()}


def resumed(recipe: Recipe, path: Path) -> tuple[Curve, dict[str, list[float]]]:
    trainer = make_trainer(recipe, initialize=False)
    load_trainer(trainer, path)
    curve = train(trainer, 3)
    assert trainer.experts is not None
    return curve, {name: bias.tolist() for name, bias in trainer.experts.biases.items()}


@pytest.fixture(scope="module")
def saved(world: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("experts") / "step_00000003"
    return path, world(2).run(straight, make_recipe(SHARED, ParallelConfig(**EP2)), path)[0]


@pytest.mark.parametrize(
    "layout",
    [
        EP2,
        {"dp_shard": 4, "ep": 4},
        {"tp": 2},
        *map(long, ({}, {"dp_shard": 2}, {"pp": 2, **EP2})),
    ],
    ids=str,
)
def test_a_mixture_is_resumed_in_any_layout(
    world: Callable, saved: tuple[Path, Any], layout: dict[str, int]
) -> None:
    path, (reference, biases) = saved
    recipe = make_recipe(SHARED, ParallelConfig(**layout))  # type: ignore[arg-type]
    found: dict[str, list[float]] = {}
    for curve, own in world(recipe.parallel.world_size).run(resumed, recipe, path):
        found |= own
        if layout == EP2:
            assert curve == reference
        else:
            assert_follows(curve, reference, last=None)
    assert found == biases
