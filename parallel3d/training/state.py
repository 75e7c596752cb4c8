"""Saves and loads the state of a trainer. Tensors have layout-independent global names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from parallel3d.checkpoint.files import MODEL, load_tensors
from parallel3d.checkpoint.manifest import Progress
from parallel3d.checkpoint.pretrained import load_pretrained
from parallel3d.checkpoint.store import after_resume, is_pretrained
from parallel3d.config.recipe import SequenceRange
from parallel3d.data.fingerprint import differences
from parallel3d.data.mixture import drawn_by_source
from parallel3d.data.order import SkippedRanges
from parallel3d.errors import CheckpointError, DamagedCheckpointError, writing
from parallel3d.training.trainer import Trainer


def state_of(trainer: Trainer) -> tuple[dict[str, Tensor], Progress]:
    """Returns the content of a checkpoint. Collective.

    Returns:
        Tensors by global name, which share the memory of the trainer, and the progress.
    """
    recipe = trainer.recipe
    tensors, replicas = trainer.outer_loop.save(tensors_of(trainer))
    progress = replace(
        trainer.progress,
        sequences=recipe.batch_sizes.before(trainer.step),
        drawn=drawn_by_source(recipe, trainer.step, trainer.skipped_ranges),
        local_sgd=replicas,
    )
    return tensors, progress


def load_trainer(trainer: Trainer, path: Path) -> None:
    """Loads a checkpoint that was saved in any layout. Collective.

    Raises:
        CheckpointError: The checkpoint is damaged, or its run differs in model, optimizer, seed,
            batch size, sequence length or data. Nothing has changed then.
    """
    state = tensors_of(trainer)

    def choose(saved: Progress) -> dict[str, Tensor]:
        _check_same_run(trainer, path, saved)
        return trainer.outer_loop.tensors_to_load(state, saved.local_sgd)

    saved = load_tensors(choose, path)
    _copy_to_twins(trainer)
    trainer.optimizer.set_step(saved.step - saved.skipped_steps)
    trainer.outer_loop.after_loading(saved.local_sgd)
    trainer.engine.publish()
    own = trainer.progress
    progress = replace(
        saved, parallel=own.parallel, skip=own.skip, data_fingerprint=own.data_fingerprint
    )
    if own.loss_scale is None or saved.loss_scale is None:  # One of the runs is not in float16.
        progress = replace(progress, loss_scale=own.loss_scale, loss_scale_good_steps=0)
    trainer.progress = progress


def of_rank_0(paths: list[Path]) -> list[Path]:
    """Broadcasts the paths that rank 0 found, because the folder can change meanwhile."""
    box = [paths]
    dist.broadcast_object_list(box)
    return box[0]


def resume_from(trainer: Trainer, checkpoints: list[Path], folder: Path) -> list[str]:
    """Resumes from the first undamaged checkpoint and returns lines for the user.

    Sets aside the skipped checkpoints, and those in the run's `folder` that are newer.

    Raises:
        CheckpointError: All checkpoints are damaged (none is renamed), or one is from a different
            run (see `load_trainer`).
    """
    path, lines = first_whole(trainer, checkpoints, load_trainer)
    if dist.get_rank() == 0:
        with writing(folder):
            lines += after_resume(
                folder, trainer.step, path, damaged=checkpoints[: checkpoints.index(path)]
            )
    begun = trainer.recipe.checkpoint.start_from
    lines.append(f"resumed at step {trainer.step} from {path}")
    if begun is not None:
        lines[-1] += f"; checkpoint.start_from = {begun} is ignored"
    return lines


def start_from(trainer: Trainer, checkpoints: list[Path]) -> list[str]:
    """Loads only the weights of the first undamaged checkpoint, if `checkpoints` is not empty.

    Returns lines for the user.
    """
    if not checkpoints:
        return []
    path, lines = first_whole(trainer, checkpoints, load_model)
    return [*lines, f"initial weights loaded from {path}"]


def first_whole(
    trainer: Trainer, checkpoints: list[Path], load: Callable[[Trainer, Path], object]
) -> tuple[Path, list[str]]:
    """Loads the first undamaged checkpoint. Returns its path and a line for each skipped one."""
    lines: list[str] = []
    for path in checkpoints[:-1]:
        try:
            load(trainer, path)
            return path, lines
        except DamagedCheckpointError as error:
            lines.append(f"skipped: {error}")
    load(trainer, checkpoints[-1])
    return checkpoints[-1], lines


def load_model(trainer: Trainer, path: Path) -> Progress:
    """Loads only the parameters of a checkpoint of any layout and optimizer. Collective.

    A checkpoint of local SGD provides the outer parameters. `path` can also be a folder with
    Hugging Face weights.

    Returns:
        Progress of the run that saved the checkpoint. For Hugging Face weights, the trainer's own.

    Raises:
        CheckpointError: The weights are damaged or from a different model. Nothing has changed
            then.
    """
    progress = trainer.progress
    if is_pretrained(path):
        load_pretrained(trainer.parameters, trainer.recipe.model, path)
    else:
        tensors = tensors_of(trainer)
        model = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
        progress = load_tensors(lambda saved: model, path)
        _copy_to_twins(trainer)
    trainer.outer_loop.begin()
    trainer.engine.publish()
    return progress


def _copy_to_twins(trainer: Trainer) -> None:
    """Copies a loaded tied weight and its optimizer states to its second copy on this rank.

    A checkpoint holds the weight once. With a V-shaped schedule, one rank has the first and the
    last stage, and so both copies.
    """
    loaded = {parameter.name: parameter for parameter in trainer.parameters}
    for parameter in trainer.parameters:
        twin = loaded[parameter.name]
        if twin is not parameter:
            parameter.local.detach().copy_(twin.local.detach())
            for kind, own in trainer.optimizer.state[parameter.local].items():
                own.copy_(trainer.optimizer.state[twin.local][kind])


def _check_same_run(trainer: Trainer, path: Path, saved: Progress) -> None:
    """Raises CheckpointError if the checkpoint's run differs in seed, batches, optimizer or data.

    Data fingerprints are not compared if one is unknown or with `checkpoint.allow_other_data`.
    """
    recipe = trainer.recipe
    sequences = trainer.recipe.batch_sizes.before(saved.step)
    before, after = (
        SkippedRanges.merge((*skip, *saved.skipped_by_rollbacks))
        for skip in (saved.skip, recipe.data.skip)
    )
    drawn = saved.drawn or {}
    planned = drawn_by_source(recipe, saved.step, after)
    if max(len(drawn), len(planned)) == 1:  # A single corpus can have any name.
        drawn = planned
    seen = sequences if saved.sequences is None else saved.sequences
    own = trainer.progress
    checks = [
        (f"train.{key}", getattr(saved, key), getattr(own, key), "that value")
        for key in ("seed", "global_batch_size", "seq_len")
    ]
    checks += [
        ("sequences seen", seen, sequences, "its train.batch_warmup_start, _increment and _steps"),
        (
            "sequences left out so far",
            _as_yaml(before.before(sequences)),
            _as_yaml(after.before(sequences)),
            f"data.skip={_as_yaml(saved.skip)}, to which you can add later ranges",
        ),
        (
            "sequences drawn",
            drawn,
            planned,
            "its data.sources and data.stages; to change weights, add an entry to data.stages with "
            f"from_step: {saved.step + 1}",
        ),
        ("optimizer", saved.optimizer, own.optimizer, "that optimizer.name and its settings"),
    ]
    for what, then, now, remedy in checks:
        if then != now:
            raise CheckpointError(
                f"{path}: {what} = {then} in the checkpoint, but {now} in this recipe; resume with "
                f"{remedy}"
            )
    data = saved.data_fingerprint
    own_data = own.data_fingerprint
    if data is None or own_data is None or recipe.checkpoint.allow_other_data:
        return
    if differing := differences(data, own_data):
        raise CheckpointError(
            f"{path}: was trained on other data ({'; '.join(differing)}); resume with the same "
            "data, or with checkpoint.allow_other_data=true"
        )


def _as_yaml(ranges: Sequence[SequenceRange]) -> str:
    return f"[{', '.join(f'{{first: {each.first}, last: {each.last}}}' for each in ranges)}]"


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Maps names in a checkpoint to tensors that share memory with the model and the optimizer.

    A tied weight that this rank holds twice occurs once, as its last copy.
    """
    state: dict[str, Tensor] = {}
    for parameter in trainer.parameters:
        parameter.part.sync_views()
        name = parameter.name
        state[f"{MODEL}{name}"] = parameter.part.distributed(parameter.local.detach())
        for kind, tensor in trainer.optimizer.state[parameter.local].items():
            if kind != "step":
                state[f"optimizer.{kind}.{name}"] = parameter.part.distributed(tensor)
    if trainer.experts is not None:
        state |= {f"{MODEL}{name}": bias for name, bias in trainer.experts.biases.items()}
    return state
