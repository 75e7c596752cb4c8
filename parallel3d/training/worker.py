"""Worker process of a job: trains a run, evaluates a checkpoint or generates text with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel3d.build_engine import ModelClass, block_weights_of
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
from parallel3d.data.corpus import Corpus, load_corpora, load_corpus
from parallel3d.data.evaluation import evaluation_windows
from parallel3d.data.fingerprint import data_fingerprint
from parallel3d.data.loader import BatchLoader, EvaluationSet
from parallel3d.data.mixture import windows_of_run
from parallel3d.data.order import SkippedRanges
from parallel3d.data.windows import WindowSource
from parallel3d.errors import NotSavedInTimeError, printable, writing
from parallel3d.launch.deterministic import deterministic
from parallel3d.launch.rendezvous import Rendezvous, process_group, record_start
from parallel3d.launch.run_dir import begin_run
from parallel3d.launch.run_log import stderr_to_log
from parallel3d.launch.signals import StopRequest, catch_stop_signals, signal_name
from parallel3d.layers.fused_attention import device_of
from parallel3d.mesh import build_mesh, dp_rank
from parallel3d.reporting.metrics import MetricsFile, gpu_bytes, peak_tokens_per_s, perplexity
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.reporting.sinks import SinkRun, Sinks
from parallel3d.torch_private import limit_waits
from parallel3d.training.callbacks import VALIDATION, Callback, Callbacks, RunView, callback_classes
from parallel3d.training.generation import generate
from parallel3d.training.local_sgd import outer_loop_of
from parallel3d.training.loop import TrainingLoop
from parallel3d.training.record_start import RecordSaves, record_run_start
from parallel3d.training.state import load_model, of_rank_0, resume_from, start_from
from parallel3d.training.trainer import Trainer
from parallel3d.watch.heartbeat import phase


def run_worker(
    recipe: Recipe,
    rendezvous: Rendezvous,
    model_class: ModelClass,
    peak_of: PeakOf,
    callbacks: Sequence[Callback] = (),
    command: Sequence[str] = (),
) -> None:
    """Trains a run as one of its workers. Collective.

    Rank 0 prints for all ranks and writes `run_dir`, except checkpoint shards, profiles and the
    logs of other ranks.

    Args:
        recipe: Complete recipe with a `run_dir`.
        rendezvous: Place of this worker in the job.
        model_class: Builds the model to train.
        peak_of: Returns the peak FLOP/s of a GPU by name and precision, for the MFU.
        callbacks: Callbacks of rank 0, in addition to those of the recipe.
        command: Command line of the user, for `run.json`.

    Raises:
        Parallel3dError: The run failed or was stopped. See `process_group` for the cases in which
            the process group is closed.
    """
    assert recipe.run_dir is not None
    train = recipe.train
    run_dir = Path(recipe.run_dir)
    speaks = rendezvous.rank == 0
    checkpoints = run_dir / "checkpoints"
    with deterministic(train.deterministic), process_group(recipe, rendezvous) as device:
        corpora = load_corpora(recipe.data)
        loaders = build_loaders(recipe, corpora, rendezvous.rank)
        watchers: list[Callback] = []
        if speaks:
            watchers = [RecordSaves(), *callbacks, *(found() for found in callback_classes(recipe))]
            with writing(checkpoints):
                take_back(checkpoints)
        dist.barrier()
        saved = of_rank_0(find_checkpoints(recipe.checkpoint.resume, checkpoints))
        start = [] if saved else of_rank_0(find_start(recipe.checkpoint.start_from))
        trainer = build_trainer(
            recipe,
            device,
            model_class,
            initialize=not (saved or start),
            data_fingerprint=data_fingerprint(corpora),
            outer_loop=outer_loop_of(recipe),
        )
        begun = resume_from(trainer, saved, checkpoints) if saved else start_from(trainer, start)
        notes = []
        if speaks:  # Write the run folder only now, when nothing can reject the run anymore.
            notes = [f"warning: {note}" for note in begin_run(recipe)]
            with writing(checkpoints):
                if recipe.checkpoint.every is not None:
                    checkpoints.mkdir(exist_ok=True)
                tidy(checkpoints)
            record_start()
        notes.append(record_run_start(trainer, command, run_dir))
        seen = SinkRun(recipe, run_dir, trainer.step)
        text = None
        with (
            nullcontext() if speaks else stderr_to_log(run_dir, rendezvous.rank),
            ProgressDisplay(train.steps, trainer.step, run_dir, speaks=speaks) as progress,
            Sinks(recipe.logging.sinks if speaks else (), seen, progress.say) as sinks,
        ):
            weights = block_weights_of(model_class, recipe.model)
            peak, why_unknown = peak_tokens_per_s(recipe, device, peak_of, weights)
            lines = [*notes, describe_run(trainer, corpora), why_unknown, *begun]
            metrics = None
            if speaks:
                path = run_dir / "metrics.jsonl"
                metrics = MetricsFile(path, resumed_step=trainer.step, sinks=sinks)
                lines.append(metrics.note)
            if trainer.step >= train.steps:
                lines.append(f"nothing to do: all train.steps = {train.steps} are done")
            for line in filter(None, lines):
                progress.say(line)
            called = Callbacks(watchers, RunView(recipe, run_dir, progress.say, trainer.step))
            with stop_signals(recipe, checkpoints) as stop:
                loop = TrainingLoop(
                    trainer, loaders, checkpoints, metrics, progress, stop, called, peak
                )
                loop.fit()
            if train.sample_tokens:
                with phase("generation"):
                    text = generate(trainer, corpora[0].tokenizer, train)
                sinks.log({"step": trainer.step, "sample": text})
        if speaks and text is not None:
            print(f"--- sample after step {trainer.step}\n{printable(text)}\n---", flush=True)


def read_saved(
    recipe: Recipe,
    rendezvous: Rendezvous,
    model_class: ModelClass,
    command: str,
    *,
    as_json: bool,
) -> None:
    """Runs `parallel3d-train evaluate` or `generate` on the checkpoint `checkpoint.resume`.

    `evaluate` prints the loss and perplexity of each evaluation set, the validation set first.
    `generate` prints a text as the keys `train.sample_*` describe. Collective: rank 0 prints.
    """
    path = recipe.checkpoint.resume
    train = recipe.train
    with deterministic(train.deterministic), process_group(recipe, rendezvous) as device:
        trainer = build_trainer(recipe, device, model_class, initialize=False)
        saved = load_model(trainer, Path(path))
        answer: dict[str, object] = {"checkpoint": path, "step": saved.step}
        if command == "evaluate":
            _, evaluations = build_loaders(recipe, load_corpora(recipe.data), rendezvous.rank)
            text, answer["tokens"] = f"step {saved.step}", saved.tokens
            for each in evaluations:
                loss = trainer.evaluate(each.batches)
                name = "" if each.name == VALIDATION else f"/{each.name}"
                answer |= {f"loss{name}": loss, f"perplexity{name}": perplexity(loss)}
                text += f"  loss{name} {loss:.4f}  perplexity{name} {perplexity(loss):.2f}"
        else:
            corpus = load_corpus(recipe.data.corpora[0])
            answer["text"] = text = generate(trainer, corpus.tokenizer, train)
    if rendezvous.rank:
        return
    if as_json:
        text = json.dumps(answer)
    elif sys.stdout.isatty():
        text = printable(text)
    print(text, flush=True)


def build_trainer(
    recipe: Recipe, device: torch.device, model_class: ModelClass, **settings: Any
) -> Trainer:
    """Builds a trainer on the mesh of the recipe. `settings` go to `Trainer`. Collective."""
    refuse(attention_errors(recipe, device_of(device)))
    mesh = build_mesh(recipe.parallel, device.type)
    limit_waits(recipe.train.start_timeout_s)
    if hasattr(model_class, "compare"):
        model_class.compare(recipe, mesh)
    trainer = Trainer(
        recipe,
        mesh=mesh,
        device=device,
        model_class=model_class,
        gpu_bytes=gpu_bytes(device),
        **settings,
    )
    limit_waits(recipe.train.start_timeout_s)  # Again, for the groups that the trainer created.
    return trainer


def stop_signals(recipe: Recipe, checkpoints: Path) -> AbstractContextManager[StopRequest]:
    """Returns a context manager that catches the signals to save or stop.

    Without `checkpoint.every` a run cannot save, so signals end it immediately.
    """
    grace_s = recipe.checkpoint.grace_s

    def too_late(signum: int) -> NotSavedInTimeError:
        """Returns the error for a save that exceeded `checkpoint.grace_s`."""
        goes_on = "no complete checkpoint exists"
        for good in list_checkpoints(checkpoints)[-1:]:
            goes_on = f"{good} is the last complete checkpoint; resume with checkpoint.resume=auto"
        stopped = f"stopped by {signal_name(signum)}, but not saved within checkpoint.grace_s"
        return NotSavedInTimeError(f"{stopped} = {grace_s}: {goes_on}", signum)

    if recipe.checkpoint.every is None:
        return nullcontext(StopRequest())
    return catch_stop_signals(grace_s, too_late)


def describe_run(trainer: Trainer, corpora: Sequence[Corpus]) -> str:
    """Describes model size, layout, hardware, precision and data in one line."""
    recipe = trainer.recipe
    device = trainer.device
    tokens = sum(len(corpus.train) for corpus in corpora)
    is_cuda = device.type == "cuda"
    hardware = f"{torch.cuda.get_device_name(device)}, NCCL" if is_cuda else "CPU, gloo"
    return (
        f"{trainer.progress.parameters:,} parameters on {recipe.parallel.label} ({hardware}, "
        f"{recipe.train.precision}), {tokens:,} training tokens, microbatches per step: "
        f"{recipe.microbatches}"
    )


def build_loaders(
    recipe: Recipe, corpora: Sequence[Corpus], rank: int
) -> tuple[BatchLoader, list[EvaluationSet]]:
    """Returns the training loader and the evaluation sets of the data-parallel rank of `rank`."""
    train = windows_of_run(recipe, [corpus.train for corpus in corpora])
    loader = training_loader(recipe, train, rank, corpora[0].document_end)
    held_out = [corpus.validation for corpus in corpora]
    validation = windows_of_run(recipe, held_out, for_validation=True)
    sequences = recipe.train.eval_sequences
    # Without `eval_every`, only the command `evaluate` uses this set. Then the layout need not
    # divide `eval_sequences`, so the set is padded.
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
    """Returns the training loader of the data-parallel rank of `rank`.

    `document_end` is the token id that ends a document, or None without document masks.
    """
    parallel = recipe.parallel
    train = recipe.train
    return BatchLoader(
        source,
        global_batch_size=train.global_batch_size,
        microbatch_size=parallel.microbatch_size,
        dp_rank=dp_rank(parallel, rank),
        dp_size=parallel.dp,
        vocab=recipe.model.vocab,
        sizes=recipe.batch_sizes,
        skipped=SkippedRanges.merge(recipe.data.skip),
        ignored_ids=recipe.data.ignore_token_ids,
        document_end=document_end,
    )
