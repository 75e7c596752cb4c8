"""A step whose gradient is not finite on one rank: all ranks name where it comes from, and end or
leave it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed import get_rank

from parallel3d.config.recipe import LocalSgdConfig, LossScaleConfig, ParallelConfig
from parallel3d.engine import Observe
from parallel3d.errors import NonFiniteError
from parallel3d.sharding.replicated import ReplicatedData
from parallel3d.training.trainer import Trainer
from tests.distributed.training_cases import (
    DEEP,
    GROUPED,
    local_weights,
    losses,
    make_loader,
    make_recipe,
    make_trainer,
    own_batch,
    train,
)

TWO = {
    "tp": ParallelConfig(tp=2, microbatch_size=4),
    "pp": ParallelConfig(pp=2, microbatch_size=2),
    "dp": ParallelConfig(dp_shard=2, microbatch_size=2),
}


def plant_nan(
    trainer: Trainer,
    steps: set[int],
    rank: int,
    name: str,
) -> None:
    """Makes one element of this parameter's gradient NaN on one rank, after all of it is reduced,
    in these steps."""
    complete = trainer.engine.finish_gradients

    def plant(observe: Observe | None = None) -> None:
        complete(observe)
        if trainer.step in steps and get_rank() == rank:
            (gradient,) = [p.local.grad for p in trainer.parameters if p.name == name]
            assert gradient is not None
            gradient.view(-1)[-1] = float("nan")

    trainer.engine.finish_gradients = plant  # type: ignore[method-assign]


def without_update(trainer: Trainer, steps: set[int]) -> None:
    """Has the trainer compute these steps and not make them."""
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: None if trainer.step in steps else step()  # type: ignore[method-assign]


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Returns the parameters and all optimizer states of this rank."""
    states = [s for p in trainer.parameters for s in trainer.optimizer.state[p.local].values()]
    return [*local_weights(trainer), *states]


def follows_a_run_without_them(
    layouts: list[ParallelConfig],
    rank: int,
    name: str,
) -> list[bool]:
    """Returns for each layout whether a run that skips three steps is that which does not make
    them, to the bit."""
    same = []
    for parallel in layouts:
        recipe = make_recipe(DEEP, parallel, on_nonfinite="skip", nonfinite_in_a_row=2)
        skipping = make_trainer(recipe)
        other = make_trainer(recipe)
        plant_nan(skipping, {2, 4, 5}, rank, name)
        without_update(other, {2, 4, 5})
        curves = train(skipping, 8), train(other, 8)
        assert skipping.progress.skipped_steps == 3
        assert skipping.step == 8
        assert skipping.progress.tokens == other.progress.tokens
        assert losses(curves[0]) == losses(curves[1])
        pairs = zip(state_of(skipping), state_of(other), strict=True)
        same.append(all(torch.equal(one, two) for one, two in pairs))
    return same


def test_a_run_that_skips_steps_is_the_run_that_does_not_make_them(world: Callable) -> None:
    two = world(2)
    both = [TWO["tp"], TWO["dp"]]
    assert (
        two.run(follows_a_run_without_them, both, 1, "layers.1.mlp.up.weight") == [[True, True]] * 2
    )
    assert (
        two.run(follows_a_run_without_them, [TWO["pp"]], 1, "layers.3.mlp.up.weight")
        == [[True]] * 2
    )


def named(
    parallel: ParallelConfig,
    rank: int,
    name: str,
    local_sgd: LocalSgdConfig,
) -> str:
    """Returns what ends a run that may skip two steps in a row, at the third."""
    recipe = replace(
        make_recipe(DEEP, parallel, on_nonfinite="skip", nonfinite_in_a_row=2), local_sgd=local_sgd
    )
    trainer = make_trainer(recipe)
    plant_nan(trainer, {1, 3, 4, 5}, rank, name)
    before = train(trainer, 5)
    assert [loss == loss for loss, _ in before] == [True] * 5
    with pytest.raises(NonFiniteError) as error:
        train(trainer, 1)
    assert trainer.step == 5
    assert trainer.progress.skipped_steps == 3
    return str(error.value)


@pytest.mark.parametrize(
    "axis, rank, name, place",
    [
        ("pp", 0, "layers.1.attention_norm.weight", "pp 0, dp_replicate 0, dp_shard 0, cp 0, tp 0"),
        ("dp", 1, "head.weight", "pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 0"),
    ],
)
def test_the_rank_and_the_parameter_of_the_first_bad_gradient_are_named(
    world: Callable, axis: str, rank: int, name: str, place: str
) -> None:
    messages = world(2).run(named, TWO[axis], rank, name, LocalSgdConfig())
    assert messages[0] == messages[1]
    assert messages[0].startswith("step 6: loss ")
    assert "gradient norm nan; the first non-finite gradient" in messages[0]
    assert f"is that of {name} on rank {rank} (" in messages[0]
    assert f", {place})" in messages[0]
    assert ("so any of ranks 0 and 1 may have caused it" in messages[0]) == (axis == "dp")
    assert "weights are those of step 3" in messages[0]


def test_replicas_that_train_apart_skip_together_and_name_the_one(world: Callable) -> None:
    apart = ParallelConfig(dp_replicate=2, microbatch_size=4)
    name = "layers.3.mlp.down.weight"
    messages = world(2).run(named, apart, 1, name, LocalSgdConfig(sync_every=2))
    assert messages[0] == messages[1]
    assert f"is that of {name} on rank 1 (" in messages[0]
    assert "it is a sum" not in messages[0]


def before_the_sum(kind: str) -> str:
    """Returns the warning of a step in which rank 1 alone goes wrong: in its gradients before they
    are summed, or in its forward."""
    parallel = ParallelConfig(
        dp_replicate=2,
        microbatch_size=4,
        sharding="NO_SHARD",
    )
    recipe = make_recipe(GROUPED, parallel, on_nonfinite="skip")
    trainer = make_trainer(recipe)
    train(trainer, 1)
    if get_rank() == 1:
        (data,) = trainer.engine.data
        assert isinstance(data, ReplicatedData)
        if kind == "gradient":
            bucket = data._buckets[0]
            start = bucket.start_reduction
            wanted = trainer.stages[0].module.layers["1"].mlp.up.weight  # type: ignore[index,union-attr]
            (part,) = [part for part in bucket.parts if part.parameter is wanted]
            bucket.start_reduction = lambda: (part.gradient[3, 5:6].fill_(float("nan")), start())[1]  # type: ignore[method-assign,func-returns-value]
        else:
            trainer.stages[0].module.norm.register_forward_hook(
                lambda module, inputs, output: output * float("inf")
            )  # type: ignore[union-attr]
    result = trainer.train_step(own_batch(recipe, 1))
    assert result.is_skipped
    assert trainer.progress.skipped_steps == 1
    assert result.skip_reason is not None
    return result.skip_reason


def test_what_data_ranks_have_summed_is_told_apart_by_loss_and_weights(world: Callable) -> None:
    gradient = world(2).run(before_the_sum, "gradient")
    assert gradient[0] == gradient[1]
    assert gradient[0].endswith("step skipped (1 in a row, at most 10)")
    assert "that of layers.1.mlp.up.weight on ranks 0 and 1 (rank 0: " in gradient[0]
    assert "any of ranks 0 and 1 may have caused it" in gradient[0]
    (loss, _) = world(2).run(before_the_sum, "loss")
    assert "the loss is not finite on rank 1 (" in loss
    assert "that of head.weight on ranks 0 and 1" in loss


def skipped_at_the_smallest_scale() -> tuple[list[float | None], list[str | None], int]:
    """Returns the scales, what steps say of it that they are left out, and how many are."""
    recipe = make_recipe(
        GROUPED,
        TWO["dp"],
        precision="fp16",
        on_nonfinite="skip",
        nonfinite_in_a_row=2,
    )
    trainer = make_trainer(replace(recipe, loss_scale=LossScaleConfig(initial=4.0, interval=100)))
    plant_nan(trainer, {1, 2, 3, 4}, 1, "layers.1.mlp.up.weight")
    loader = make_loader(trainer.recipe, get_rank())
    results = [trainer.train_step(loader.batch(step)) for step in range(6)]
    told = [result.skip_reason for result in results]
    return [result.loss_scale for result in results], told, trainer.progress.skipped_steps


def test_in_fp16_a_step_is_left_out_also_where_no_scale_is_small_enough(world: Callable) -> None:
    scales, told, skipped = world(2).run(skipped_at_the_smallest_scale)[0]
    assert scales == [4.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert [text is not None for text in told] == [False, False, False, True, True, False]
    assert "even at a loss scale of 1; the first non-finite gradient" in told[3]
    assert skipped == 4
