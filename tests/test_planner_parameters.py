"""Parameters counted for every named model, stage by stage and rank by rank, against the trainer's
own modules on the meta device, cut over tp by the layers themselves. Blocks are alike, so that
three of them stand for a model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import gcd

import pytest
from torch import nn

from parallel3d.config.recipe import ModelConfig
from parallel3d.mesh import Axis
from parallel3d.models import shape_cards, unsharded_model
from parallel3d.pipeline.stage import block_ranges, cut
from parallel3d.planner.model.named import card_config, named_shape
from parallel3d.planner.model.parameters import expert_numel, rank_numel, total_parameters
from parallel3d.planner.model.shapes import ModelShape, StageSlice, from_config
from parallel3d.shard_sizes import shard_rows

CARDS = shape_cards()


def config_of(name: str) -> ModelConfig:
    return card_config(name, CARDS[name])


@contextmanager
def on_tp_rank(tp: int, rank: int) -> Iterator[None]:
    """Layers that are made here cut their parameters for this rank of so many, without any
    processes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Axis, "of", staticmethod(lambda mesh: Axis(tp, rank, None)))
        yield


def numel(module: nn.Module, shards: int = 1) -> int:
    """Counts numbers on the first of the data ranks that split each parameter's rows, those of a
    shared one once."""
    return sum(
        len(shard_rows(len(p), 0, shards)) * (p.numel() // len(p)) for p in module.parameters()
    )


def stages(config: ModelConfig, layers: list[int]) -> Iterator[tuple[nn.Module, StageSlice]]:
    """Yields the trainer's stages of these numbers of blocks, each with the planner's description
    of it."""
    for blocks in block_ranges(layers):
        yield (
            cut(unsharded_model(config), blocks),
            StageSlice(
                layers=blocks.end - blocks.first,
                embedding=blocks.is_first_stage,
                head=blocks.is_last_stage,
            ),
        )


def tensor_sizes(shape: ModelShape) -> list[int]:
    """Some that the layers allow: a small one, the largest up to 64, and one for which keys and
    values are repeated."""
    count = 0 if shape.experts is None else shape.experts.count
    allowed = [
        tp
        for tp in (1, 2, 3, 4, 5, 8, 16, 32, 64)
        if not gcd(shape.heads, shape.ffn_hidden, count) % tp
        and (not shape.kv_heads % tp or not tp % shape.kv_heads)
    ]
    repeated = [tp for tp in allowed if tp > shape.kv_heads]
    return sorted({*allowed[:2], allowed[-1], *repeated[:1]})


@pytest.mark.parametrize("name", sorted(CARDS))
def test_a_named_model_is_counted_to_the_parameter_on_every_stage_and_rank(name: str) -> None:
    config = config_of(name)
    shape = named_shape(name, CARDS)
    # Three blocks stand for all: on one stage, and cut unevenly over two.
    small = replace(config, layers=3)
    for tp in tensor_sizes(shape):
        cuts = [[1, 2], [3]] if tp == 1 else [[1, 2]]
        for rank in {0, tp - 1}:
            with on_tp_rank(tp, rank):
                for layers in cuts:
                    for module, part in stages(small, layers):
                        for shards in (1, 1024):  # more data ranks than some vectors fill
                            own = from_config(small)
                            counted = rank_numel(own, (part,), tp, at=(rank, 0), shards=shards)
                            counted += expert_numel(own, part.layers, tp, shards)
                            assert counted == numel(module, shards), (layers, tp, rank)
    block = rank_numel(shape, (StageSlice(layers=1, embedding=False, head=False),), 1)
    whole = rank_numel(from_config(small), (StageSlice(layers=3, embedding=True, head=True),), 1)
    experts = expert_numel(shape, shape.layers, 1, 1)
    assert total_parameters(shape) == whole + (shape.layers - 3) * block + experts
