"""The state of a trainer as tensors by global names, which is what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.files import load_tensors, save_tensors
from parallel3d.checkpoint.store import SavedProgress
from parallel3d.errors import CheckpointError
from parallel3d.training.gradients import LocalParameter
from parallel3d.training.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def save_trainer(trainer: Trainer, path: Path) -> None:
    """Writes a checkpoint of the trainer's step; every rank calls it. Raises SaveError."""
    recipe = trainer.recipe
    progress = SavedProgress(
        step=trainer.step,
        tokens=trainer.tokens,
        seed=recipe.train.seed,
        global_batch_size=recipe.train.global_batch_size,
        seq_len=recipe.train.seq_len,
        parameters=trainer.parameter_count,
        parallel=asdict(recipe.parallel),
        sequences=recipe.batch_sizes.before(trainer.step),
        skipped_steps=trainer.skipped_steps,
        loss_scale=None if trainer.scaler is None else trainer.scaler.scale,
        loss_scale_good_steps=0 if trainer.scaler is None else trainer.scaler.good_steps,
    )
    save_tensors(tensors_of(trainer.parameters, trainer.optimizer), progress, path)


def load_trainer(trainer: Trainer, path: Path) -> None:
    """Puts the trainer where the checkpoint's was, whatever the layouts of the two; every rank calls it.

    Raises CheckpointError where it is damaged, of another model, or of a run whose batches were others: the place in
    the data is a count of sequences, which would then mean other ones.
    """
    start_moments(trainer.parameters, trainer.optimizer)
    progress = load_tensors(tensors_of(trainer.parameters, trainer.optimizer), path)
    train = trainer.recipe.train
    for key in ("seed", "global_batch_size", "seq_len"):
        then, now = getattr(progress, key), getattr(train, key)
        if then != now:
            raise CheckpointError(f"{path}: was trained with train.{key} = {then}, not {now}; resume with {key}={then}")
    then, now = progress.sequences, trainer.recipe.batch_sizes.before(progress.step)
    if then is not None and then != now:
        raise CheckpointError(
            f"{path}: has seen {then} sequences, and this recipe's first {progress.step} steps are {now}; resume with "
            "the train.batch_warmup_start, _increment and _steps that it was trained with"
        )
    _copy_to_twins(trainer.parameters, trainer.optimizer)
    for parameter in trainer.parameters:
        trainer.optimizer.state[parameter.local]["step"].fill_(float(progress.step - progress.skipped_steps))
    for data in trainer.data:
        data.publish()
    trainer.resume(progress)


def tensors_of(parameters: Sequence[LocalParameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> tensor that shares the memory of the model's and the optimizer's. A tied parameter is there once."""
    state: dict[str, Tensor] = {}
    for parameter in parameters:
        if f"model.{parameter.own.name}" in state:  # a V has both ends of the pipeline, and a tied weight twice, alike
            continue
        state[f"model.{parameter.own.name}"] = parameter.distributed(parameter.local.detach())
        for moment in MOMENTS:
            local = optimizer.state[parameter.local][moment]
            state[f"optimizer.{moment}.{parameter.own.name}"] = parameter.distributed(local)
    return state


@torch.no_grad()
def _copy_to_twins(parameters: Sequence[LocalParameter], optimizer: torch.optim.Optimizer) -> None:
    """What was loaded into the first of two parameters of one name, into the second."""
    first: dict[str, LocalParameter] = {}
    for parameter in parameters:
        twin = first.setdefault(parameter.own.name, parameter)
        if twin is not parameter:
            parameter.local.copy_(twin.local)
            for moment in MOMENTS:
                optimizer.state[parameter.local][moment].copy_(optimizer.state[twin.local][moment])


def start_moments(parameters: Sequence[LocalParameter], optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's state, which it would make in its first step, so that there is something to read into."""
    for parameter in parameters:
        parameter.refresh()
        state = optimizer.state[parameter.local]
        state["step"] = torch.zeros((), device=parameter.local.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter.local)
