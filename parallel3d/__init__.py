"""Hybrid tensor, pipeline and data parallel pretraining on PyTorch.

The public names are imported when they are first used, because torch takes seconds to import, and
asking for `--help`, reading a recipe or planning must not pay for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.config.load import load_recipe as load_recipe
    from parallel3d.config.recipe import ModelConfig as ModelConfig
    from parallel3d.config.recipe import ParallelConfig as ParallelConfig
    from parallel3d.config.recipe import Recipe as Recipe
    from parallel3d.convert.apply import tensor_parallelize as tensor_parallelize
    from parallel3d.convert.pretrained import load_safetensors as load_safetensors
    from parallel3d.convert.pretrained import parameters_on_meta as parameters_on_meta
    from parallel3d.layers.attention import ParallelAttention as ParallelAttention
    from parallel3d.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from parallel3d.layers.linear import RowParallelLinear as RowParallelLinear
    from parallel3d.layers.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from parallel3d.layers.mlp import ParallelMLP as ParallelMLP
    from parallel3d.layers.norm import RMSNorm as RMSNorm
    from parallel3d.layers.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
    from parallel3d.mesh import build_mesh as build_mesh
    from parallel3d.pipeline.runtime import PipelineRuntime as PipelineRuntime
    from parallel3d.schedules.schedule import Schedule as Schedule
    from parallel3d.training.callbacks import Callback as Callback
    from parallel3d.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOME_OF = {
    "Callback": "training.callbacks",
    "ColumnParallelLinear": "layers.linear",
    "ModelConfig": "config.recipe",
    "ParallelAttention": "layers.attention",
    "ParallelConfig": "config.recipe",
    "ParallelMLP": "layers.mlp",
    "PipelineRuntime": "pipeline.runtime",
    "RMSNorm": "layers.norm",
    "Recipe": "config.recipe",
    "RowParallelLinear": "layers.linear",
    "Schedule": "schedules.schedule",
    "Trainer": "training.trainer",
    "VocabParallelEmbedding": "layers.vocabulary",
    "build_mesh": "mesh",
    "load_recipe": "config.load",
    "load_safetensors": "convert.pretrained",
    "parameters_on_meta": "convert.pretrained",
    "tensor_parallelize": "convert.apply",
    "vocab_parallel_cross_entropy": "layers.loss",
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"parallel3d.{_HOME_OF[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
