"""One worker of a run, from its place in the job to the end of training and a sample of text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from parallel3d.checkpoint.store import (
    find_checkpoints,
    find_start,
    list_checkpoints,
    take_back,
    tidy,
)
from parallel3d.config.attention_kernels import attention_errors
from parallel3d.config.flops import PeakOf
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import refuse
from parallel3d.data.corpus import Corpus, load_corpora
from parallel3d.data.evaluation import evaluation_windows
from parallel3d.data.fingerprint import data_fingerprint
from parallel3d.data.loader import BatchLoader, EvaluationSet
from parallel3d.data.mixture import training_windows, validation_windows
from parallel3d.data.order import SkippedRanges
from parallel3d.data.windows import WindowSource
from parallel3d.errors import NotSavedInTimeError, printable, writing
from parallel3d.launch.deterministic import deterministic
from parallel3d.launch.rendezvous import Rendezvous, process_group, record_start
from parallel3d.launch.run_dir import begin_run
from parallel3d.launch.signals import StopRequest, catch_stop_signals, signal_name
from parallel3d.layers.fused_attention import device_of
from parallel3d.mesh import build_mesh
from parallel3d.parallelize import ModelClass
from parallel3d.reporting.metrics import MetricsFile, gpu_bytes, peak_tokens_per_s
from parallel3d.reporting.progress import open_progress
from parallel3d.reporting.sinks import SinkRun, Sinks
from parallel3d.torch_private import limit_waits
from parallel3d.training.callbacks import VALIDATION, Callback, Callbacks, RunView, callback_classes
from parallel3d.training.generation import generate
from parallel3d.training.local_sgd import outer_loop_of
from parallel3d.training.loop import TrainingLoop
from parallel3d.training.state import of_rank_0, resume_from, start_from
from parallel3d.training.trainer import Trainer
from parallel3d.watch.heartbeat import phase


def run_worker(
    recipe: Recipe,
    rendezvous: Rendezvous,
    model_class: ModelClass,
    peak_of: PeakOf,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains as the recipe says, as one of its workers. Rank 0 prints for all and writes
    `run_dir`. `peak_of` knows the GPUs. `callbacks` of rank 0 watch the run beside those of the
    recipe. Raises the errors of `parallel3d.errors`; `process_group` says on which ways out the
    group is closed."""
    assert recipe.run_dir is not None
    train, run_dir = recipe.train, Path(recipe.run_dir)
    checkpoints = run_dir / "checkpoints"
    with deterministic(train.deterministic), process_group(recipe, rendezvous) as device:
        refuse(attention_errors(recipe, device_of(device)))
        speaks = rendezvous.rank == 0
        watchers: list[Callback] = []
        if speaks:
            watchers = [*callbacks, *(found() for found in callback_classes(recipe))]
        mesh = build_mesh(recipe.parallel, device.type)
        limit_waits(train.start_timeout_s)
        corpora = load_corpora(recipe.data)
        loaders = build_loaders(recipe, corpora, rendezvous.rank)
        if speaks:
            with writing(checkpoints):
                take_back(checkpoints)
        dist.barrier()
        trainer, resumed = load_or_initialize(
            recipe, corpora, checkpoints, mesh=mesh, device=device, model_class=model_class
        )
        if speaks:  # nothing can refuse the run any more
            prepare_run_dir(recipe, checkpoints)
        with (
            stop_signals(recipe, checkpoints) as stop,
            open_progress(train.steps, trainer.step, speaks=speaks) as progress,
            open_metrics(recipe, run_dir, trainer.step, progress.say, speaks=speaks) as metrics,
        ):
            peak, why_unknown = peak_tokens_per_s(recipe, device, peak_of, trainer.block_weights)
            lines = [
                describe_run(trainer, corpora),
                why_unknown,
                *resumed,
            ]
            if trainer.step >= train.steps:
                lines.append(f"nothing to do: train.steps = {train.steps} are done")
            for line in filter(None, lines):
                progress.say(line)
            view = RunView(recipe, run_dir, progress.say, trainer.step) if speaks else None
            called = Callbacks(watchers, view)
            with called.watching():
                TrainingLoop(
                    trainer, loaders, checkpoints, metrics, progress, stop, called, peak
                ).fit()
        if train.sample_tokens:
            with phase("generation"):
                text = generate(trainer, corpora[0].tokenizer, train)
            if speaks:
                print(f"--- sample after step {trainer.step}\n{printable(text)}\n---", flush=True)


def load_or_initialize(
    recipe: Recipe,
    corpora: Sequence[Corpus],
    checkpoints: Path,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    model_class: ModelClass,
) -> tuple[Trainer, list[str]]:
    """Returns the trainer with the weights that the run begins with, and lines for the user about
    the checkpoint. Every rank calls it."""
    saved = of_rank_0(find_checkpoints(recipe.checkpoint.resume, checkpoints))
    start = [] if saved else of_rank_0(find_start(recipe.checkpoint.start_from))
    trainer = Trainer(
        recipe,
        mesh=mesh,
        device=device,
        model_class=model_class,
        initialize=not (saved or start),
        gpu_bytes=gpu_bytes(device),
        data_fingerprint=data_fingerprint(corpora),
        outer_loop=outer_loop_of(recipe),
    )
    limit_waits(recipe.train.start_timeout_s)  # also in the groups that the trainer has made
    if saved:
        return trainer, resume_from(trainer, saved, checkpoints)[1]
    return trainer, start_from(trainer, start)


def prepare_run_dir(recipe: Recipe, checkpoints: Path) -> None:
    """Writes the run folder, on rank 0."""
    for note in begin_run(recipe):
        print(f"warning: {printable(note)}", file=sys.stderr, flush=True)
    with writing(checkpoints):
        if recipe.checkpoint.every is not None:
            checkpoints.mkdir(exist_ok=True)
        tidy(checkpoints)
    record_start()


def stop_signals(recipe: Recipe, checkpoints: Path) -> AbstractContextManager[StopRequest]:
    """Catches the signals that ask for a save. A run without checkpoints has nowhere to save to, so
    signals end it at once."""
    grace_s = recipe.checkpoint.grace_s

    def too_late(signum: int) -> NotSavedInTimeError:
        """Returns the error of a save that has outlived `checkpoint.grace_s`."""
        good = list_checkpoints(checkpoints)[-1:]
        goes_on = "none is whole"
        if good:
            goes_on = f"{good[0]} is the last good one, from which checkpoint.resume=auto goes on"
        stopped = f"stopped by {signal_name(signum)}, and not saved within checkpoint.grace_s"
        return NotSavedInTimeError(f"{stopped} = {grace_s}: {goes_on}", signum)

    if recipe.checkpoint.every is None:
        return nullcontext(StopRequest())
    return catch_stop_signals(grace_s, too_late)


def describe_run(trainer: Trainer, corpora: Sequence[Corpus]) -> str:
    """Returns the first line of a run."""
    recipe, device = trainer.recipe, trainer.device
    axes = [f"{axis} {size}" for axis, size in recipe.parallel.axes.items() if size > 1]
    layout = " x ".join(axes) or "one process"
    tokens = sum(len(corpus.train) for corpus in corpora)
    hardware = "CPU, gloo"
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}, NCCL"
    return (
        f"{trainer.parameter_count:,} parameters on {layout} ({hardware}, "
        f"{recipe.train.precision}), {tokens:,} training tokens, microbatches a step: "
        f"{recipe.microbatches}"
    )


@contextmanager
def open_metrics(
    recipe: Recipe, run_dir: Path, resumed_step: int, tell: Callable[[str], None], *, speaks: bool
) -> Iterator[MetricsFile | None]:
    """Holds the file of metrics, and the sinks that are fed its lines, for a block; None on a rank
    that does not speak."""
    if not speaks:
        yield None
        return
    with Sinks(recipe.logging.sinks, SinkRun.of(recipe, run_dir, resumed_step), tell) as sinks:
        path = run_dir / "metrics.jsonl"
        metrics = MetricsFile(path, resumed_step=resumed_step, sinks=sinks)
        if metrics.note:
            tell(f"warning: {metrics.note}")
        yield metrics


def build_loaders(
    recipe: Recipe, corpora: Sequence[Corpus], rank: int
) -> tuple[BatchLoader, list[EvaluationSet]]:
    """Returns the loader for training and the evaluation sets of the data rank that `rank` belongs
    to."""
    train, end = (
        training_windows(recipe, [corpus.train for corpus in corpora]),
        corpora[0].document_end,
    )
    loader = training_loader(recipe, train, rank, end)
    validation = validation_windows(recipe, [corpus.validation for corpus in corpora])
    sequences = recipe.train.eval_sequences
    # `evaluate` takes any number, which no rule has compared with the layout
    if recipe.train.eval_every is None:
        own = EvaluationSet.build(VALIDATION, loader, validation, sequences)
    else:
        own = EvaluationSet(VALIDATION, loader.evaluating(validation, sequences))
    sources = evaluation_windows(recipe.data, recipe.train.seq_len)
    others = [
        EvaluationSet.build(chosen.name, loader, source, chosen.sequences)
        for chosen, source in zip(recipe.data.evaluation, sources, strict=True)
    ]
    return loader, [own, *others]


def training_loader(
    recipe: Recipe, source: WindowSource, rank: int, document_end: int | None
) -> BatchLoader:
    """Returns the loader of the recipe's batches of `source` for the data rank that `rank` belongs
    to. `document_end` is the id that ends a document, if batches are to tell documents apart."""
    parallel, train = recipe.parallel, recipe.train
    place = parallel.coordinates(rank)
    return BatchLoader(
        source,
        global_batch_size=train.global_batch_size,
        microbatch_size=parallel.microbatch_size,
        dp_rank=place.dp_replicate * parallel.dp_shard + place.dp_shard,
        dp_size=parallel.dp,
        vocab=recipe.model.vocab,
        sizes=recipe.batch_sizes,
        left_out=SkippedRanges.merge(recipe.data.skip),
        ignored_ids=recipe.data.ignore_token_ids,
        document_end=document_end,
    )
