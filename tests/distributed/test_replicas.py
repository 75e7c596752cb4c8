"""One bit of what several ranks hold flips: the next comparison names the tensor and the ranks, and
ends the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.config.recipe import LocalSgdConfig, ModelConfig, ParallelConfig, Recipe
from parallel3d.diagnosis.replicas import copies_of
from parallel3d.errors import ReplicaError
from parallel3d.layers.linear import ColumnParallelLinear
from parallel3d.layers.norm import LayerNorm
from parallel3d.layers.positions import LearnedPositions
from parallel3d.mesh import build_mesh
from parallel3d.models.gpt import GPT as GptModel
from parallel3d.training.trainer import Trainer
from tests.distributed.training_cases import (
    DEEP_TIED,
    GPT,
    GROUPED,
    QWEN,
    make_recipe,
    make_trainer,
    train,
)


def flip(tensor: Tensor) -> None:
    tensor.detach().view(torch.int32).view(-1)[-1] ^= 8


def compared(recipe: Recipe) -> list[str]:
    """Returns the names of what this rank compares, after steps in which nothing differs."""
    trainer = make_trainer(recipe)
    train(trainer, 3)
    trainer.compare_replicas("step 3")
    copies = copies_of(trainer.parameters, trainer.optimizer.state)
    copies += trainer.engine.copies(trainer.optimizer.state) + trainer.outer_loop.copies()
    return [name for each in copies for name in each.tensors]


def recipe_of(
    model: ModelConfig = GROUPED,
    optimizer: str = "adamw",
    every: int | None = None,
    **layout: object,
) -> Recipe:
    recipe = make_recipe(model, ParallelConfig(microbatch_size=2, **layout))  # type: ignore[arg-type]
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, name=optimizer))  # type: ignore[arg-type]
    if every:
        return replace(recipe, local_sgd=LocalSgdConfig(sync_every=every))
    return recipe


def test_what_ranks_hold_alike_stays_the_same_to_the_bit(world: Callable) -> None:
    two = world(2)
    four = world(4)
    tp = two.run(compared, recipe_of(QWEN, tp=2, sequence_parallel=True))[0]
    assert "layers.1.attention_norm.weight" in tp
    assert "optimizer.exp_avg.norm.weight" in tp
    for name in tp:
        assert not name.endswith(("up.weight", "q.weight"))
    tied = two.run(compared, recipe_of(DEEP_TIED, pp=2))[0]
    assert set(tied) == {"embed.weight"} | {
        f"optimizer.{kind}.embed.weight" for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    assert two.run(compared, recipe_of(dp_shard=2))[0] == []
    apart = two.run(compared, recipe_of(dp_replicate=2, every=2))[0]
    assert {"outer layers.1.mlp.up.weight", "optimizer.outer.head.weight"} < set(apart)
    heads = four.run(compared, recipe_of(tp=4))[0]
    assert "layers.0.attention.k.weight" in heads
    assert "layers.0.attention.q.weight" not in heads
    muon = four.run(compared, recipe_of(optimizer="muon", dp_replicate=2, tp=2))[0]
    assert "optimizer.momentum_buffer.layers.0.mlp.up.weight" in muon


def flipped(
    recipe: Recipe,
    rank: int,
    name: str,
) -> str:
    """Returns what ends a run that compares after every second step, where one bit flips after the
    third."""
    trainer = make_trainer(recipe)
    train(trainer, 2)
    trainer.compare_replicas("step 2")
    train(trainer, 1)
    if get_rank() == rank:
        (parameter,) = [p for p in trainer.parameters if p.name == name]
        flip(parameter.local)
    train(trainer, 1)
    with pytest.raises(ReplicaError) as error:
        trainer.compare_replicas("step 4")
    assert error.value.exit_status == 70
    return str(error.value)


@pytest.mark.parametrize(
    "recipe, rank, name",
    [
        pytest.param(recipe_of(dp_replicate=2), 1, "layers.1.mlp.up.weight", id="dp"),
        pytest.param(recipe_of(DEEP_TIED, pp=2), 1, "embed.weight", id="ends"),
    ],
)
def test_of_two_ranks_both_are_named(
    world: Callable,
    recipe: Recipe,
    rank: int,
    name: str,
) -> None:
    messages = world(2).run(flipped, recipe, rank, name)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"step 4: {name} differs between ranks 0 and 1 (rank 0: ")
    assert "; rank 1: " in messages[0]
    assert "; one of them is wrong" in messages[0]


def test_of_four_ranks_the_odd_one_is_named(world: Callable) -> None:
    name = "layers.1.mlp_norm.weight"
    recipe = recipe_of(tp=2, dp_replicate=2)
    messages = world(4).run(flipped, recipe, 2, name)
    assert messages == [messages[0]] * 4
    place = recipe.parallel.coordinates(2)
    assert messages[0].startswith(f"step 4: {name} on rank 2 (rank 2: ")
    assert f", {place}) differs from" in messages[0]
    assert "differs from ranks 0 and 3; resume from a checkpoint" in messages[0]


def without_one_seed() -> list[str]:
    """Returns what is said of layers whose ranks draw for themselves."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = get_rank()
    said = []
    for seed in (0, rank):
        torch.manual_seed(seed)
        for build in (
            lambda: LearnedPositions(8, 16, tp=mesh),
            lambda: ColumnParallelLinear(16, 32, tp=mesh, copies=2),
            lambda: ColumnParallelLinear(16, 32, tp=mesh),
            lambda: nn.init.normal_(LayerNorm(8, tp=mesh).weight),
        ):
            try:
                build()
            except ValueError as error:
                said.append(str(error))
    return said


def test_layers_built_from_several_seeds_are_refused_where_ranks_must_hold_the_same(
    world: Callable,
) -> None:
    for said in world(2).run(without_one_seed):
        positions, copies, drawn = said
        assert positions.startswith("LearnedPositions.weight [8, 16]: differs between tp ranks")
        assert copies.startswith("ColumnParallelLinear.weight [32, 16]: ")
        assert "torch.manual_seed(0)" in copies
        assert "differs between tp ranks" in drawn


def draws_for_itself() -> str:
    torch.manual_seed(get_rank())

    class Own(GptModel):
        def __init__(self, *args: object, **settings: object) -> None:
            super().__init__(*args, **settings)  # type: ignore[arg-type]
            specs = self.embed.positions.specs  # type: ignore[union-attr]
            own = replace(specs["weight"], init=lambda tensor, generator: tensor.normal_())  # type: ignore[index,operator]
            specs["weight"] = own  # type: ignore[index,operator]

    recipe = make_recipe(GPT, ParallelConfig(tp=2, microbatch_size=4))
    with pytest.raises(ReplicaError) as error:
        Trainer(
            recipe,
            mesh=build_mesh(recipe.parallel, "cpu"),
            device=torch.device("cpu"),
            model_class=Own,
        )
    return str(error.value)


def test_a_model_whose_initializer_draws_for_itself_is_refused_at_the_start(
    world: Callable,
) -> None:
    message, other = world(2).run(draws_for_itself)
    assert message == other
    assert message.startswith("the initial weights: embed.")
    assert "an initializer must draw only from the generator" in message
