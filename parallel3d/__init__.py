"""Hybrid tensor, pipeline and data parallel pretraining on PyTorch.

Your own training loop    parallelize, save_checkpoint, load_checkpoint, Dtypes, ShardingOptions
Layers split over tp      ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                          ParallelAttention, ParallelMLP, RMSNorm, vocab_parallel_cross_entropy
Others' models            tensor_parallelize, split_model, SplitSpec
A pipeline of your own    PipelineRuntime, Stage, build_schedule, TensorSpec, shard
Recipes                   train, load_recipe, Trainer, Callback
The planner               plan, estimate_memory

`help(parallel3d.parallelize)` has the loop.

The public names, which `__init__.pyi` lists, are imported when they are first used, because torch
takes seconds to import, and asking for `--help`, reading a recipe or planning must not pay for it.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_STUB = Path(__file__).with_name("__init__.pyi").read_text()
_MODULE_OF = {name: module for module, name in re.findall(r"from (\S+) import (\w+) as", _STUB)}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
