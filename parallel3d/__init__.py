"""Hybrid tensor, pipeline and data parallel pretraining on PyTorch.

The public names are imported when they are first used, because torch takes seconds to import, and asking for `--help`,
reading a recipe or planning must not pay for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.config.load import load_recipe
    from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe
    from parallel3d.convert.apply import tensor_parallelize
    from parallel3d.convert.pretrained import load_safetensors, parameters_on_meta
    from parallel3d.layers.attention import ParallelAttention
    from parallel3d.layers.embedding import VocabParallelEmbedding
    from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
    from parallel3d.layers.loss import vocab_parallel_cross_entropy
    from parallel3d.layers.mlp import ParallelMLP
    from parallel3d.layers.norm import RMSNorm
    from parallel3d.mesh import build_mesh
    from parallel3d.pipeline.runtime import PipelineRuntime
    from parallel3d.schedules.schedule import Schedule
    from parallel3d.training.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "ColumnParallelLinear",
    "ModelConfig",
    "ParallelAttention",
    "ParallelConfig",
    "ParallelMLP",
    "PipelineRuntime",
    "RMSNorm",
    "Recipe",
    "RowParallelLinear",
    "Schedule",
    "Trainer",
    "VocabParallelEmbedding",
    "build_mesh",
    "load_recipe",
    "load_safetensors",
    "parameters_on_meta",
    "tensor_parallelize",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "ColumnParallelLinear": "parallel3d.layers.linear",
    "ModelConfig": "parallel3d.config.recipe",
    "ParallelAttention": "parallel3d.layers.attention",
    "ParallelConfig": "parallel3d.config.recipe",
    "ParallelMLP": "parallel3d.layers.mlp",
    "PipelineRuntime": "parallel3d.pipeline.runtime",
    "RMSNorm": "parallel3d.layers.norm",
    "Recipe": "parallel3d.config.recipe",
    "RowParallelLinear": "parallel3d.layers.linear",
    "Schedule": "parallel3d.schedules.schedule",
    "Trainer": "parallel3d.training.trainer",
    "VocabParallelEmbedding": "parallel3d.layers.embedding",
    "build_mesh": "parallel3d.mesh",
    "load_recipe": "parallel3d.config.load",
    "load_safetensors": "parallel3d.convert.pretrained",
    "parameters_on_meta": "parallel3d.convert.pretrained",
    "tensor_parallelize": "parallel3d.convert.apply",
    "vocab_parallel_cross_entropy": "parallel3d.layers.loss",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
