"""Converted models of transformers do what the models do: checkpoints, `fully_shard`, generation,
compilation. `test_families` compares outputs and gradients. No model is downloaded."""

from __future__ import annotations

import io
import re
import runpy
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

from parallel3d.convert.apply import tensor_parallelize
from parallel3d.convert.families import rules_of
from parallel3d.convert.rules import Column
from parallel3d.layers.parameter import set_fused_gradients
from tests.distributed.layer_cases import tp_mesh
from tests.distributed.test_families import VOCAB, B, S, build, whole

# it imports what all of transformers' models import
PRELOAD = ("transformers.models.qwen2.modeling_qwen2",)
ROOT = Path(__file__).parents[2]


def build_sharing(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a model with two heads of keys, if the kind lets one choose."""
    if kind == "gpt2":
        return build(kind, dtype)
    return build(kind, dtype, num_key_value_heads=2, tie_word_embeddings=False)


def save_split(folder: str) -> None:
    model = tensor_parallelize(build("gpt2"), tp_mesh())
    dcp.save(model.state_dict(), checkpoint_id=folder)


def load_split(folder: str) -> None:
    """At another tp than it was saved at, into another model, and into plain tensors."""
    wanted = build("gpt2")
    model = build("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    plain = {name: torch.zeros_like(value) for name, value in wanted.state_dict().items()}
    tensor_parallelize(model, tp_mesh())
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    dcp.load(plain, checkpoint_id=folder)
    for name, value in wanted.state_dict().items():
        assert torch.equal(whole(state[name]), value) and torch.equal(plain[name], value), name


def train_with_fully_shard() -> None:
    """Trains dp_shard 2 x tp 2 on one batch cut in two by a step of AdamW, and one process on the
    whole batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    alone = build_sharing("qwen2, tied")
    model: Any = tensor_parallelize(build_sharing("qwen2, tied"), mesh)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    ids = torch.randint(0, VOCAB, (4, S))
    for each, batch in ((alone, ids), (model, ids.chunk(2)[mesh["dp_shard"].get_local_rank()])):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        each(batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        optimizer.step()
    for (name, ours), parameter in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert_close(
            whole(ours),
            parameter,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def keep_logits_split() -> None:
    """A rule of the table replaced: the head gives this rank's part of the vocabulary."""
    tp = tp_mesh()
    model = build("llama")
    table = {**rules_of(model), "**.lm_head": Column()}
    with pytest.raises(
        ValueError, match=r"lm_head: 101 output features cannot be split over tp = 2; try tp = 1"
    ):
        tensor_parallelize(model, tp, table)
    table["**.embed_tokens"] = "replicate"
    model.resize_token_embeddings(104)  # type: ignore[operator]
    assert tensor_parallelize(model, tp, table)(
        torch.zeros(1, 3, dtype=torch.int64)
    ).logits.shape == (1, 3, 52)
    assert isinstance(model.lm_head.weight, DTensor)
    assert model.lm_head.weight.placements == (Shard(0),)


def use_it_as_transformers_does(kind: str) -> None:
    """Generation with its cache, eager attention and activation checkpointing."""
    tp = tp_mesh()
    alone: Any = build(kind)
    split: Any = tensor_parallelize(build(kind), tp)
    ids = torch.randint(5, VOCAB, (B, 6))
    written = [
        each.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for each in (alone, split)
    ]
    assert torch.equal(*written)
    for each in (alone, split):
        each.set_attn_implementation("eager")
    split.activation_checkpointing_enable()
    for each in (alone, split):
        each.train()(ids, labels=ids).loss.backward()
    for parameter, ours in zip(alone.parameters(), split.parameters(), strict=True):
        assert_close(whole(ours.grad), parameter.grad, rtol=1e-5, atol=1e-5)


def add_in_place(kind: str) -> None:
    """Two microbatches' gradients, added in place, are those that autograd adds up."""
    tp = tp_mesh()
    models = [tensor_parallelize(build_sharing(kind, torch.float64), tp) for _ in range(2)]
    set_fused_gradients(models[1], True)
    for ids in torch.randint(0, VOCAB, (2, B, S)):
        for model in models:
            model(ids, labels=ids).loss.backward()
    for (name, theirs), ours in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert isinstance(ours.grad, DTensor)
        assert isinstance(theirs.grad, DTensor)
        assert ours.grad.placements == theirs.grad.placements, name
        assert_close(whole(ours.grad), whole(theirs.grad), rtol=1e-12, atol=1e-12)


def compile_it() -> None:
    """A compiled model gives what it gives without the compiler."""
    model: Any = tensor_parallelize(build("gpt2", n_layer=1), tp_mesh())
    ids = torch.randint(0, VOCAB, (B, S))
    results = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        loss = run(ids, labels=ids).loss
        loss.backward()
        gradients = [whole(parameter.grad) for parameter in model.parameters()]
        results.append((loss.detach(), gradients))
        model.zero_grad()
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def refuse_a_patchwork() -> None:
    """Each rank has drawn its own weights."""
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tp = tp_mesh()
    with pytest.raises(ValueError, match=r"0.weight .*: differs between tp ranks.*manual_seed"):
        tensor_parallelize(model, tp, {"0": "column", "1": "row"}, example=(torch.ones(1, 4),))
    assert type(model[0]) is nn.Linear


def test_a_checkpoint_of_tp_4_loads_at_tp_2_and_whole(world: Callable, tmp_path: Path) -> None:
    world(4).run(save_split, str(tmp_path))
    world(2).run(load_split, str(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_else_transformers_does_with_a_model_works(world: Callable, kind: str) -> None:
    world(2).run(use_it_as_transformers_does, kind)


def test_fully_shard_and_clipping_compose_with_it(world: Callable) -> None:
    world(4).run(train_with_fully_shard)


@pytest.mark.parametrize("size, kind", [(2, "gpt2"), (4, "qwen2, tied")])
def test_gradients_that_are_added_in_place_are_those_of_autograd(
    world: Callable, size: int, kind: str
) -> None:
    world(size).run(add_in_place, kind)


@pytest.mark.long
def test_a_converted_model_may_be_compiled(world: Callable) -> None:
    world(2).run(compile_it)


def test_the_head_may_keep_its_logits_split(world: Callable) -> None:
    world(2).run(keep_logits_split)


def test_ranks_that_start_from_other_weights_are_refused(world: Callable) -> None:
    world(2).run(refuse_a_patchwork)


def program(name: str) -> str:
    """Returns a program of docs/how-to/library.md."""
    text = (ROOT / "docs" / "how-to" / "library.md").read_text()
    found = re.search(rf"```python\n(# {re.escape(name)}\n.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def run_program(path: Path) -> str:
    """Returns the output of a program that would open and close this process group itself."""
    with (
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]


def test_a_converted_model_learns_by_the_program_of_the_guide(
    world: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "own_llama.py"
    path.write_text(program(path.name))
    first, other = (losses_of(each) for each in world(2).run(run_program, path))
    assert first[-1] < 0.9 * first[0]
    assert other == []


@pytest.mark.parametrize(
    "name, tolerance",
    [("own_loop.py", 1e-3), pytest.param("own_llama.py", 1e-4, marks=pytest.mark.long)],
)
def test_a_program_with_all_axes_trains_the_same_model_on_eight_processes_as_on_one(
    world: Callable, tmp_path: Path, name: str, tolerance: float
) -> None:
    path = tmp_path / name
    path.write_text(program(name))
    one, eight = (losses_of(world(size).run(run_program, path)[0]) for size in (1, 8))
    assert one[-1] < 0.8 * one[0]
    assert eight == pytest.approx(one, rel=tolerance)


def test_the_program_on_pipelines_learns(world: Callable, tmp_path: Path) -> None:
    path = tmp_path / "train_pipeline.py"
    path.write_text(program(path.name))
    printed = world(4).run(run_program, path)
    losses = losses_of(printed[0])
    assert losses[2] < losses[1] < losses[0]
    assert printed[1:] == ["", "", ""]  # the last stage of a V is on rank 0
