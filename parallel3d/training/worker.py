"""One worker of a run, from its place in the job to the end of training."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from parallel3d.checkpoint.store import find_checkpoints, sweep
from parallel3d.config.recipe import Recipe
from parallel3d.data.corpus import Corpus, load_corpus
from parallel3d.data.loader import BatchLoader
from parallel3d.data.tokenizer import TokenIds
from parallel3d.errors import DamagedCheckpointError
from parallel3d.launch.rendezvous import Rendezvous, choose_device, process_group
from parallel3d.launch.signals import StopRequest, catch_sigterm
from parallel3d.mesh import build_mesh
from parallel3d.parallelize import ModelClass
from parallel3d.training.generation import generate
from parallel3d.training.loop import Loaders, fit
from parallel3d.training.metrics import MetricsFile
from parallel3d.training.progress import ProgressDisplay, open_progress
from parallel3d.training.state import load_trainer
from parallel3d.training.trainer import Trainer


def run_worker(recipe: Recipe, rendezvous: Rendezvous, model_class: ModelClass) -> None:
    """Trains as the recipe says, as one of its workers. Rank 0 prints for all and writes `run_dir`.

    Raises the errors of `parallel3d.errors`; the process group is closed on every way out.
    """
    assert recipe.run_dir is not None
    device = choose_device(recipe.train.device, rendezvous)
    with process_group(rendezvous, device, recipe.train.timeout_s):
        mesh = build_mesh(recipe.parallel, device.type)
        corpus = load_corpus(recipe.data)
        loaders = build_loaders(recipe, corpus, rendezvous.rank)
        trainer = Trainer(recipe, mesh=mesh, device=device, model_class=model_class)
        run_dir, speaks = Path(recipe.run_dir), rendezvous.rank == 0
        checkpoints = run_dir / "checkpoints"
        resumed = resume_from(trainer, find_checkpoints(recipe.checkpoint.resume, checkpoints))
        metrics = None
        if speaks:
            run_dir.mkdir(parents=True, exist_ok=True)
            sweep(checkpoints)
            metrics = MetricsFile(run_dir / "metrics.jsonl", resumed_step=trainer.step)
        # A run without checkpoints has nowhere to save to, so SIGTERM ends it at once.
        sigterm = nullcontext(StopRequest()) if recipe.checkpoint.every is None else catch_sigterm()
        with sigterm as stop, open_progress(recipe.train.steps, trainer.step, speaks=speaks) as progress:
            _introduce(progress, trainer, corpus, resumed)
            fit(trainer, loaders, checkpoints, metrics, progress, stop)
        if recipe.train.sample_tokens:
            text = generate(
                trainer,
                corpus.tokenizer,
                prompt=recipe.train.sample_prompt,
                tokens=recipe.train.sample_tokens,
                top_k=recipe.train.sample_top_k,
            )
            if speaks:
                print(f"--- sample after step {trainer.step}\n{text}\n---", flush=True)


def build_loaders(recipe: Recipe, corpus: Corpus, rank: int) -> Loaders:
    """Returns the loaders of the data rank that `rank` belongs to."""
    loader = training_loader(recipe, corpus.train, rank)
    # Validation sequences are drawn from all validation files, and are the same for every seed of the run.
    sequences = recipe.train.eval_sequences
    validation = replace(loader, tokens=corpus.validation, global_batch_size=sequences, sizes=None, seed=0)
    return Loaders(loader, validation)


def training_loader(recipe: Recipe, tokens: TokenIds, rank: int) -> BatchLoader:
    """Returns the loader of the recipe's batches of `tokens` for the data rank that `rank` belongs to."""
    parallel, train = recipe.parallel, recipe.train
    place = parallel.coordinates(rank)
    return BatchLoader(
        tokens,
        seq_len=train.seq_len,
        global_batch_size=train.global_batch_size,
        microbatch_size=parallel.microbatch_size,
        dp_rank=place.dp_replicate * parallel.dp_shard + place.dp_shard,
        dp_size=parallel.dp,
        vocab=recipe.model.vocab,
        seed=train.seed,
        sizes=recipe.batch_sizes,
        ignored_ids=recipe.data.ignore_token_ids,
    )


def resume_from(trainer: Trainer, checkpoints: list[Path]) -> list[str]:
    """Loads the first of `checkpoints` that is not damaged. Returns lines for the user: the ones that were passed over,
    and where the run goes on. Raises CheckpointError where all are damaged, or one is of another model."""
    lines = []
    for at, path in enumerate(checkpoints):
        try:
            load_trainer(trainer, path)
        except DamagedCheckpointError as error:
            if at + 1 == len(checkpoints):
                raise
            lines.append(f"passed over: {error}")
        else:
            return [*lines, f"goes on from step {trainer.step} of {path}"]
    return lines


def _introduce(progress: ProgressDisplay, trainer: Trainer, corpus: Corpus, resumed: list[str]) -> None:
    """Shows what is trained, on which layout, and where the run was resumed."""
    recipe = trainer.recipe
    layout = " x ".join(f"{axis} {size}" for axis, size in recipe.parallel.axes.items() if size > 1) or "one process"
    microbatches = f"{recipe.microbatches} microbatch{'es' * (recipe.microbatches > 1)}"
    progress.say(
        f"{trainer.parameter_count:,} parameters on {layout} ({trainer.device.type}, {recipe.train.precision}), "
        f"{len(corpus.train):,} training tokens, {microbatches} a step"
    )
    for line in resumed:
        progress.say(line)
    if trainer.step >= recipe.train.steps:
        progress.say(f"nothing to do: train.steps = {recipe.train.steps} are done")
