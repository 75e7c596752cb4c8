"""Checkpoints: a run that goes on is the run that was never stopped, in its own layout to the bit
and in any other."""

from __future__ import annotations

import pickle
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parallel3d.checkpoint.manifest import (
    INDEX_FILE,
    SavedFile,
    read_manifest,
)
from parallel3d.checkpoint.pieces import read_own_part
from parallel3d.checkpoint.store import list_checkpoints
from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.errors import CheckpointError
from parallel3d.training.state import load_trainer, resume_from
from tests.distributed.training_cases import (
    DEEP,
    DEEP_TIED,
    GROUPED,
    TIED,
    Curve,
    assert_follows,
    has_weights,
    local_weights,
    long,
    make_recipe,
    make_trainer,
    one_case,
    save_trainer,
    train,
)

HALF = 3  # after the first resumed step comes one whose loss knows the states, and another


def straight_through(
    model: ModelConfig,
    parallel: ParallelConfig,
    path: Path,
) -> Curve:
    """Six steps, with a checkpoint after three."""
    trainer = make_trainer(make_recipe(model, parallel))
    first = train(trainer, HALF)
    save_trainer(trainer, path)
    return first + train(trainer, HALF)


def resumed(
    model: ModelConfig,
    parallel: ParallelConfig,
    path: Path,
) -> Curve:
    """A trainer that loads first needs no initial weights."""
    trainer = make_trainer(make_recipe(model, parallel), initialize=False)
    load_trainer(trainer, path)
    assert trainer.step == HALF
    return train(trainer, HALF)


def refuse(model: ModelConfig, path: Path, **train_settings: object) -> str:
    """The message of a resume that must fail; nothing is changed by it."""
    trainer = make_trainer(make_recipe(model, ParallelConfig(), **train_settings))
    before = local_weights(trainer)
    with pytest.raises(CheckpointError) as refusal:
        load_trainer(trainer, path)
    assert has_weights(trainer, before)
    return str(refusal.value)


Saved = Callable[[ModelConfig, ParallelConfig], tuple[Path, Curve]]
TP2_PP2 = ParallelConfig(
    tp=2,
    pp=2,
    microbatch_size=2,
)
CP2 = ParallelConfig(cp=2, microbatch_size=4)
V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
ZERO1 = {"tp": 2, "dp_shard": 2, "sharding": "SHARD_OPTIMIZER"}
LAYOUTS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (DEEP, {"dp_replicate": 2, "pp": 2, **V2}),
    (TIED, ZERO1),
    (TIED, {"cp": 2, "microbatch_size": 4}),
]


@pytest.fixture(scope="module")
def saved_run(world: Callable, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns the checkpoint and the curve of a model in a layout, which is trained once."""

    @cache
    def run(model: ModelConfig, parallel: ParallelConfig) -> tuple[Path, Curve]:
        path = tmp_path_factory.mktemp("run") / "step_00000003"
        return path, world(parallel.world_size).run(straight_through, model, parallel, path)[0]

    return run


@pytest.mark.parametrize("model, parallel", [one_case(*each) for each in LAYOUTS])
def test_resuming_in_the_same_layout_is_bitwise(
    world: Callable, saved_run: Saved, model: ModelConfig, parallel: ParallelConfig
) -> None:
    path, uninterrupted = saved_run(model, parallel)
    curve = world(parallel.world_size).run(resumed, model, parallel, path)[0]
    assert curve == uninterrupted[HALF:]


@pytest.mark.parametrize(
    "model, before, axes",
    [
        (DEEP_TIED, TP2_PP2, {"pp": 2, "dp_shard": 2, **V2}),
        long(DEEP_TIED, TP2_PP2, ZERO1),
        (DEEP_TIED, TP2_PP2, {"dp_shard": 2, "sharding": "NO_SHARD"}),
        long(TIED, CP2, {"cp": 4}),
        (TIED, CP2, {"tp": 2}),
    ],
)
def test_resuming_in_another_layout_goes_on_alike(
    world: Callable,
    saved_run: Saved,
    model: ModelConfig,
    before: ParallelConfig,
    axes: dict[str, Any],
) -> None:
    path, uninterrupted = saved_run(model, before)
    parallel = ParallelConfig(**axes, microbatch_size=2)
    curve = world(parallel.world_size).run(resumed, model, parallel, path)[0]
    assert_follows(curve, uninterrupted[HALF:], last=None)


def three_steps(path: Path) -> None:
    trainer = make_trainer(make_recipe(GROUPED, ParallelConfig(microbatch_size=8)))
    train(trainer, HALF)
    save_trainer(trainer, path)


@pytest.fixture(scope="module")
def original(world: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("one") / "step_00000003"
    world(1).run(three_steps, path)
    return path


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / original.name))


def test_torch_itself_reads_what_was_saved(world: Callable, original: Path) -> None:
    assert world(1).run(torch_reads_what_we_read, original)[0] == len(
        read_manifest(original).tensors
    )


def torch_reads_what_we_read(path: Path) -> int:
    """Returns how many tensors torch.distributed.checkpoint reads from the folder as we do."""
    saved = read_manifest(path).tensors
    theirs = {name: torch.full(tensor.shape, torch.nan) for name, tensor in saved.items()}
    dcp.load(theirs, checkpoint_id=path)
    equal = 0
    for name, tensor in theirs.items():
        ours = torch.empty_like(tensor)
        read_own_part(path, saved[name], ours)
        equal += torch.equal(ours, tensor)
    return equal


def test_damage_is_refused_before_a_weight_changes(world: Callable, saved: Path) -> None:
    shard = next(saved.glob("*.distcp"))

    def refusal() -> str:
        message: str = world(1).run(refuse, GROUPED, saved)[0]
        return message

    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    said = f"{shard.name}: has {len(whole) - 100} bytes, but {len(whole)} were saved"
    assert said in refusal()
    shard.unlink()
    assert f"{shard.name}: is missing" in refusal()
    shard.write_bytes(whole)
    (saved / "stray.distcp").touch()
    assert "stray.distcp: is not a file of this checkpoint" in refusal()


def test_other_data_is_refused_or_told(world: Callable, tmp_path: Path) -> None:
    world(1).run(resume_on_other_data, tmp_path / "step_00000003")


def resume_on_other_data(path: Path) -> None:
    recipe = make_recipe(GROUPED, ParallelConfig(microbatch_size=8))
    then = {
        "source": "text",
        "tokenizer": "bytes",
        "train_tokens": 900,
        "validation_tokens": 50,
        "checksum": "aa",
    }
    trainer = make_trainer(recipe)
    trainer.progress = replace(trainer.progress, data_fingerprint=(then,))
    save_trainer(trainer, path)
    load_trainer(trainer, path)
    trainer.progress = replace(
        trainer.progress, data_fingerprint=({**then, "train_tokens": 800, "checksum": "bb"},)
    )
    before = local_weights(trainer)
    words = r"trained on other data \(train_tokens 900, now 800; checksum aa, now bb\)"
    with pytest.raises(CheckpointError, match=f"{words}; .* checkpoint.allow_other_data=true"):
        load_trainer(trainer, path)
    assert has_weights(trainer, before)
    trainer.recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, allow_other_data=True))
    resume_from(trainer, [path], path.parent)
    trainer.progress = replace(
        trainer.progress, data_fingerprint=None
    )  # a program's own data has none
    load_trainer(trainer, path)


def test_damaged_checkpoints_are_passed_over_for_an_older_one(world: Callable, saved: Path) -> None:
    flipped = saved.with_name("step_00000020")
    short = saved.with_name("step_00000030")
    for newer, damage in ((flipped, b"x"), (short, b"")):
        shutil.copytree(saved, newer)
        shard = next(newer.glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1] + damage)
    told = world(1).run(resume_and_tell, list_checkpoints(saved.parent)[::-1])[0]
    assert told[0].startswith(f"skipped: {short / shard.name}: has ")
    assert told[1].startswith(f"skipped: {flipped / shard.name}: is corrupt")
    assert told[2:] == [
        f"resumed at step {HALF}; set aside: {short}.damaged",
        f"resumed at step {HALF}; set aside: {flipped}.damaged",
        f"resumed at step {HALF} from {saved}",
    ]
    assert list_checkpoints(saved.parent) == [saved]


def resume_and_tell(checkpoints: list[Path]) -> list[str]:
    trainer = make_trainer(make_recipe(GROUPED, ParallelConfig(microbatch_size=8)))
    return resume_from(trainer, checkpoints, checkpoints[0].parent)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden": 64}, "model.embed.weight is [128, 32] there and [128, 64] here"),
        ({"layers": 4}, "model.layers.3.attention.q.weight is missing there and [32, 32] here"),
        # it would load without the last block
        ({"layers": 2}, "model.layers.2.attention.q.weight is [32, 32] there and missing here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    world: Callable, original: Path, changes: dict[str, int], words: str
) -> None:
    assert words in world(1).run(refuse, replace(GROUPED, **changes), original)[0]  # type: ignore[arg-type]


def test_a_pickle_in_a_checkpoint_is_never_run(world: Callable, saved: Path) -> None:
    """An index and a piece that would make a file, under checksums that are right."""
    manifest = read_manifest(saved)
    canary = saved.parent / "canary"
    (saved / INDEX_FILE).write_bytes(pickle.dumps(Payload(canary)))
    content = (saved / INDEX_FILE).read_bytes()
    index = SavedFile(len(content), f"{zlib.crc32(content):08x}")
    replace(manifest, files={**manifest.files, INDEX_FILE: index}).write(saved)
    world(1).run(resume_and_tell, [saved])
    assert not canary.exists()


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple]:
        return Path.touch, (self.canary,)
