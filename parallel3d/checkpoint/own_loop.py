"""Checkpoints for your own training loop, in the format of the trainer's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from parallel3d.checkpoint.files import MODEL, load_tensors, save_tensors
from parallel3d.checkpoint.manifest import CONFIG_FILE, Progress
from parallel3d.errors import SaveError

# Keys optimizer states by parameter name, because indices differ between pipeline ranks.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_NO_PROGRESS = Progress(
    step=0,
    tokens=0,
    seed=0,
    global_batch_size=0,
    seq_len=0,
    parameters=0,
    parallel={},
)


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, Any] = {},
) -> None:
    """Saves parameters and optimizer states. Collective: all ranks call it.

    `path` appears only when it is complete. Any other layout can load it.

    Args:
        path: New folder. Its parent must exist and be shared by all ranks.
        model: Model that `parallelize` returned.
        optimizer: Optimizer of the model's parameters. Settings such as the learning rate are not
            saved.
        extra: Numbers, strings, lists and dicts to save as well.

    Raises:
        SaveError: The folder exists, or the checkpoint cannot be written.

    Example:
        >>> parallel3d.save_checkpoint("checkpoints/step_100", model, optimizer, {"step": 100})
    """
    if Path(path).exists():
        raise SaveError(f"{path}: already exists; use another path")
    weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
    tensors = _tensors(weights, states)
    save_tensors(tensors, _NO_PROGRESS, Path(path), yaml.safe_dump(dict(extra)))


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Loads a checkpoint that `save_checkpoint` wrote in any layout. Collective: all ranks call it.

    Args:
        path: Folder of the checkpoint.
        model: Model that `parallelize` returned.
        optimizer: Optimizer of the model's parameters.

    Returns:
        The saved `extra`.

    Raises:
        CheckpointError: The checkpoint is damaged or from another model. It is verified before any
            parameter changes.

    Example:
        >>> step = parallel3d.load_checkpoint("checkpoints/step_100", model, optimizer)["step"]
    """
    weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
    load_tensors(lambda progress: _tensors(weights, states), Path(path))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=states,
        options=_OPTIONS,
    )
    extra: dict[str, Any] = yaml.safe_load((Path(path) / CONFIG_FILE).read_text())
    return extra


def _tensors(weights: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Tensor]:
    named = {f"{MODEL}{name}": tensor for name, tensor in weights.items()}
    named |= {f"optimizer.{name}": value for name, value in states.items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
