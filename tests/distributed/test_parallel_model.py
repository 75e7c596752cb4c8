"""`parallelize`: the loop of its docstring is plain PyTorch's in every layout, a call in the wrong
order is refused, and torch's own functions work on the result or say what does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from parallel3d.checkpoint.own_loop import load_checkpoint, save_checkpoint
from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.convert.apply import tensor_parallelize
from parallel3d.errors import SaveError
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.linear import ColumnParallelLinear
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.vocabulary import VocabParallelEmbedding
from parallel3d.parallel_model import ParallelModel, parallelize
from parallel3d.schedules.registry import ScheduleName

PRELOAD = ("transformers.models.llama.modeling_llama",)
VOCAB, HIDDEN, STEPS = 64, 32, 4


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh, and the arguments of `parallelize`."""

    pp: int = 1
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    sharding: ShardingName = "FULL_SHARD"
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    microbatches: int = 1
    optimizer: str = "adamw"
    model: str = "linears"

    @property
    def world_size(self) -> int:
        return self.pp * self.replicas * self.shards * self.tp

    def mesh(self) -> DeviceMesh:
        sizes = (self.pp, self.replicas, self.shards, self.tp)
        names = ("pp", "dp_replicate", "dp_shard", "tp")
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)

    def parallelize(self, mesh: DeviceMesh) -> ParallelModel:
        torch.manual_seed(0)
        return parallelize(
            MODELS[self.model](mesh["tp"]),
            mesh,
            sharding=self.sharding,
            schedule=self.schedule,
            microbatches=self.microbatches,
            virtual_stages=self.virtual_stages,
            split=SPLITS.get(self.model),
        )

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Block(nn.Module):
    """A block of this library's layers."""

    def __init__(self, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(HIDDEN, tp=tp), RMSNorm(HIDDEN, tp=tp)
        self.attention = ParallelAttention(HIDDEN, 4, 4, tp=tp)
        self.mlp = ParallelMLP(HIDDEN, 2 * HIDDEN, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def linears(tp: DeviceMesh | None) -> nn.Module:
    blocks = [
        nn.Sequential(nn.Linear(HIDDEN, 33), nn.Tanh(), nn.Linear(33, HIDDEN)) for _ in "1234"
    ]
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCAB))


def layers(tp: DeviceMesh | None) -> nn.Module:
    blocks = [Block(tp) for _ in range(4)]
    head = ColumnParallelLinear(HIDDEN, VOCAB, tp=tp)
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN, tp=tp)
    return nn.Sequential(embedding, *blocks, RMSNorm(HIDDEN, tp=tp), head)


def llama(tp: DeviceMesh | None) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    return model if tp is None else tensor_parallelize(model, tp)


class Named(nn.Module):
    """A model of someone who has never seen this library."""

    def __init__(self, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SPLITS = {"named": ["embed", *(f"blocks.{at}" for at in range(4)), "head"]}
MODELS: dict[str, Callable[[DeviceMesh | None], nn.Module]] = {
    "linears": linears,
    "layers": layers,
    "llama": llama,
    "named": Named,
}


def loss_of(
    tp: DeviceMesh | None,
    output: Any,
    labels: Tensor,
) -> Tensor:
    logits = getattr(output, "logits", output)
    if logits.shape[-1] != VOCAB:
        return vocab_parallel_cross_entropy(logits, labels, tp).mean()
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole_batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCAB, (16, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def own_batch(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    ranks = mesh["dp_replicate", "dp_shard"]
    index = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size()
    index += mesh.get_local_rank("dp_shard")
    inputs, labels = whole_batch()
    return inputs.chunk(ranks.size())[index], labels.chunk(ranks.size())[index]


def plain_curve(layout: Layout) -> list[tuple[float, float]]:
    """The losses and gradient norms of plain PyTorch on one process."""
    torch.manual_seed(0)
    model, (inputs, labels) = MODELS[layout.model](None), whole_batch()
    optimizer = layout.optimizer_of(model)
    curve = []
    for _ in range(STEPS):
        loss = loss_of(None, model(inputs), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def train(
    model: ParallelModel, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: int
) -> list[tuple[float, float]]:
    """Returns the losses and norms of some steps on the same batch."""
    found = []
    inputs, labels = own_batch(mesh)
    for _ in range(steps):
        loss = model.forward_backward(inputs, labels, partial(loss_of, mesh["tp"]))
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def curve(layout: Layout) -> list[tuple[float, float]]:
    mesh = layout.mesh()
    model = layout.parallelize(mesh)
    return train(model, layout.optimizer_of(model), mesh, STEPS)


LAYOUTS = [
    Layout(),
    Layout(
        shards=2,
        sharding="NO_SHARD",
        microbatches=2,
    ),
    Layout(
        shards=2,
        sharding="SHARD_OPTIMIZER",
        optimizer="sgd",
    ),
    Layout(
        shards=2,
        microbatches=2,
        optimizer="sgd",
    ),
    Layout(
        replicas=2,
        shards=2,
        sharding="_HYBRID_SHARD_ZERO2",
        microbatches=2,
    ),
    Layout(
        tp=2,
        model="layers",
    ),
    Layout(
        pp=2,
        microbatches=2,
        schedule="zb_v",
        virtual_stages=2,
        model="layers",
    ),
    Layout(
        pp=2,
        microbatches=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
        optimizer="sgd",
    ),
    Layout(
        pp=2,
        shards=2,
        microbatches=2,
        model="named",
    ),
    Layout(
        pp=2,
        shards=2,
        tp=2,
        microbatches=2,
        model="llama",
        sharding="SHARD_OPTIMIZER",
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loop_is_plain_pytorchs(world: Any, layout: Layout) -> None:
    expected = plain_curve(layout)
    for found in world(layout.world_size).run(curve, layout):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert [loss for loss, _ in found] == pytest.approx([x for x, _ in expected], rel=1e-5)
        assert [norm for _, norm in found] == pytest.approx([x for _, x in expected], rel=1e-5)


# each shards by code of its own
TWO = ("SHARD_OPTIMIZER", "FULL_SHARD")
# two steps of the loop with a line left out, doubled or swapped, and what the error names
WRONG_ORDERS = {
    "step clear forward clip step clear": "forward_backward",
    "clip forward step clear": "forward_backward",
    "forward clip step forward clip step": "zero_grad",
    "forward clip step step clear": "zero_grad",
    "forward step clip clear": "zero_grad",
    "forward clip clear step": "forward_backward",
}
RIGHT_ORDERS = ("forward step clear", "forward clear", "forward clip clip step clear clear")


def run_calls(
    model: ParallelModel,
    optimizer: Any,
    mesh: DeviceMesh,
    calls: str,
) -> None:
    inputs, labels = own_batch(mesh)
    does = {
        "forward": partial(model.forward_backward, inputs, labels, partial(loss_of, mesh["tp"])),
        "clip": partial(model.clip_grad_norm_, 1.0),
        "step": optimizer.step,
        "clear": model.zero_grad,
    }
    for call in calls.split():
        does[call]()


def errors_of_orders(sharding: ShardingName) -> list[str]:
    layout = Layout(shards=2, sharding=sharding)
    mesh = layout.mesh()
    errors = []
    for calls in (*WRONG_ORDERS, *RIGHT_ORDERS):
        model = layout.parallelize(mesh)
        try:
            run_calls(model, layout.optimizer_of(model), mesh, calls)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("sharding", TWO)
def test_wrong_order_names_the_missing_call(world: Any, sharding: ShardingName) -> None:
    for errors in world(2).run(errors_of_orders, sharding):
        for call, error in zip(WRONG_ORDERS.values(), errors, strict=False):
            assert f"call model.{call}(" in error
        assert errors[len(WRONG_ORDERS) :] == [""] * len(RIGHT_ORDERS)


def accumulated(layout: Layout) -> float:
    """The largest difference between two halves of a batch and the whole of it."""
    mesh = layout.mesh()
    inputs, labels = own_batch(mesh)
    loss_fn, gradients = partial(loss_of, mesh["tp"]), []
    for halves in (1, 2):
        model = layout.parallelize(mesh)
        for x, y in zip(inputs.chunk(halves), labels.chunk(halves), strict=True):
            model.forward_backward(x, y, lambda o, label: loss_fn(o, label) / halves)  # noqa: B023
        gradients.append([full(p.grad) for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("sharding", TWO)
def test_two_backward_passes_add_their_gradients(world: Any, sharding: ShardingName) -> None:
    layout = Layout(shards=2, tp=2, sharding=sharding, model="layers")
    assert max(world(4).run(accumulated, layout)) < 1e-7


OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def load_by_dcp(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """As `load_checkpoint` does, by torch's own functions alone."""
    weights, states = get_state_dict(model, optimizer, options=OPTIONS)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=OPTIONS,
    )


def save_by_dcp(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    weights, states = get_state_dict(model, optimizer, options=OPTIONS)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def own_steps(
    layout: Layout, path: Path, saves: bool, by_dcp: bool = False
) -> list[tuple[float, float]]:
    """Returns the losses and norms of two steps, which follow three others and a save if `saves`,
    and otherwise a load."""
    mesh = layout.mesh()
    model = layout.parallelize(mesh)
    optimizer = layout.optimizer_of(model)
    if saves:
        train(model, optimizer, mesh, 3)
    if by_dcp:
        move = save_by_dcp if saves else load_by_dcp
        move(path, model, optimizer)
    elif saves:
        save_checkpoint(path, model, optimizer, {"step": 3})
    else:
        with pytest.raises(SaveError, match="already exists"):
            save_checkpoint(path, model, optimizer)
        assert load_checkpoint(path, model, optimizer) == {"step": 3}
    return train(model, optimizer, mesh, 2)


@pytest.mark.parametrize(
    "sharding, by_dcp",
    [("FULL_SHARD", True), ("SHARD_OPTIMIZER", False)],
)
def test_checkpoint_of_own_loop_loads_in_any_layout(
    world: Any, tmp_path: Path, sharding: ShardingName, by_dcp: bool
) -> None:
    path = tmp_path / "step_3"
    saved = Layout(pp=2, tp=2, microbatches=2, model="layers", sharding=sharding)
    expected = world(4).run(own_steps, saved, path, True, by_dcp)[0]
    assert world(4).run(own_steps, saved, path, False, by_dcp)[0] == expected
    other = Layout(shards=4, microbatches=2, model="layers", sharding=sharding)
    found = world(4).run(own_steps, other, path, False, by_dcp)[0]
    for step in range(2):
        assert found[step] == pytest.approx(expected[step], rel=1e-6)


def use_of_torch(layout: Layout) -> dict[str, Any]:
    """What torch's own functions make of a model in a layout."""
    mesh = layout.mesh()
    found = dict[str, Any]()
    inputs, labels = own_batch(mesh)
    loss_fn = partial(loss_of, mesh["tp"])
    model = layout.parallelize(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward_backward(inputs, labels, loss_fn)
    norm = model.clip_grad_norm_(1e9)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    found["norm"] = (full(total) / norm - 1).abs().item()
    expected = [full(p.grad).clone() for p in model.parameters()]
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found["clipped"] = (model.clip_grad_norm_(1e9) - 0.01).abs().item()
    model.zero_grad()
    model.forward_backward(inputs, labels, lambda o, label: scaler.scale(loss_fn(o, label)))
    scaler.unscale_(optimizer)
    unscaled = [full(p.grad) for p in model.parameters()]
    pairs = zip(unscaled, expected, strict=True)
    found["scaler"] = max((a - b).abs().max().item() for a, b in pairs)
    before = full(next(model.parameters())).clone()
    scaler.step(optimizer)
    scaler.update()
    found["stepped"] = (full(next(model.parameters())) - before).abs().max().item()
    for name, use in {
        "deepcopy": lambda: copy.deepcopy(model),
        "average": lambda: torch.optim.swa_utils.AveragedModel(model),
        "to": lambda: model.to(torch.bfloat16),
        "forward": lambda: model(inputs),
    }.items():
        try:
            use()
        except RuntimeError as error:
            found[name] = str(error)
    compiled = torch.compile(model)
    model.zero_grad()
    found["compiled"] = compiled.forward_backward(inputs, labels, loss_fn).item()
    with torch.no_grad():
        outputs = compiled(inputs)
        found["evaluated"] = model.evaluate(inputs, labels, loss_fn).item()
        found["outputs"] = loss_fn(outputs, labels).item()
    return found


@pytest.mark.parametrize("sharding", TWO)
def test_functions_of_torch_work_or_say_what_does(world: Any, sharding: ShardingName) -> None:
    for found in world(2).run(use_of_torch, Layout(shards=2, sharding=sharding)):
        for name in ("norm", "clipped", "scaler"):
            assert found[name] < 1e-6, name
        assert found["stepped"] > 0
        assert "state_dict()" in found["deepcopy"] and "state_dict()" in found["average"]
        assert "dtypes=Dtypes" in found["to"] and "forward_backward" in found["forward"]
        assert found["compiled"] == pytest.approx(found["evaluated"], rel=1e-6)


def early_optimizer() -> str:
    mesh = Layout(shards=2).mesh()
    model = linears(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = parallelize(model, mesh)
    inputs, labels = own_batch(mesh)
    parallel.forward_backward(inputs, labels, partial(loss_of, None))
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_optimizer_from_before_parallelize_is_refused(world: Any) -> None:
    assert "build it on model.parameters()" in world(2).run(early_optimizer)[0]


def loss_on(axis: str) -> float:
    """The loss of a step on a mesh with this axis alone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    tp = mesh if axis == "tp" else None
    torch.manual_seed(0)
    model = parallelize(layers(tp), mesh, sharding="NO_SHARD", microbatches=2)
    inputs, labels = whole_batch()
    if axis == "dp_shard":
        inputs, labels = (x.chunk(2)[mesh.get_local_rank()] for x in (inputs, labels))
    loss = model.forward_backward(inputs, labels, partial(loss_of, tp))
    model.clip_grad_norm_(1.0)
    return loss.item()


def test_a_mesh_needs_no_axis_that_is_not_used(world: Any) -> None:
    losses = [world(2).run(loss_on, axis)[0] for axis in ("pp", "dp_shard", "tp")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
