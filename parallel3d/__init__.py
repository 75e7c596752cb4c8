"""Hybrid tensor, pipeline and data parallel pretraining on PyTorch.

Your own training loop    parallelize, save_checkpoint, load_checkpoint, Dtypes, ShardingOptions
Tensor-parallel layers    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                          ParallelAttention, ParallelMLP, RMSNorm, vocab_parallel_cross_entropy
Existing models           tensor_parallelize, split_model, SplitSpec
Your own pipeline         PipelineRuntime, Stage, build_schedule, TensorSpec, shard
Recipes                   train, load_recipe, Trainer, Callback
Planner                   plan, estimate_memory

`help(parallel3d.parallelize)` shows a training loop.

Public names are listed in `__init__.pyi` and imported on first use. Importing torch takes seconds,
and `--help`, recipe validation and planning do not need it.
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
    globals()[name] = value  # Later uses skip this function.
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
