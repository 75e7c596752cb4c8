"""Random recipes, one for each seed, and how a pool of workers trains many of them in one job.

A rank that hangs ends its process. `train_all` then reports the seed with what each rank was doing,
starts new processes, and continues with the other seeds. `FUZZ_SEEDS=17,42 pytest
tests/distributed/test_fuzz_models.py` runs some seeds only.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.config.sharding_strategies import HYBRID_OF
from parallel3d.errors import ConfigError, Parallel3dError, RankError
from parallel3d.schedules.registry import SCHEDULES
from tests.distributed.world import World

PATIENCE_S = 60.0  # a case takes a second or two; one that takes so long hangs
CASES_IN_A_JOB = 5  # a job keeps all its process groups, whose threads wake 100 times a second


@dataclass(frozen=True)
class Case:
    """A recipe that follows from its seed alone."""

    seed: int
    recipe: Recipe

    def __str__(self) -> str:
        """Shows the seed, and of the recipe the keys that are not at their defaults."""
        sections = (getattr(self.recipe, each.name) for each in fields(self.recipe))
        words = [f"{key.name}={value}" for section in sections for key, value in changed(section)]
        return f"seed {self.seed}: {' '.join(words)}"


@dataclass(frozen=True)
class Outcome:
    """The result of a case: the answers of the ranks, the error that refused it, or a description
    of its failure."""

    case: Case
    refused: str | None = None
    failed: str | None = None
    answers: tuple[Any, ...] = ()


def changed(section: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Yields the keys of a section of a recipe that are not at their defaults, and their values."""
    for key in fields(section) if is_dataclass(section) else ():
        value = getattr(section, key.name)
        if value != key.default:
            yield key, value


def asked_or(seeds: Iterable[int]) -> list[int]:
    """Returns the seeds that FUZZ_SEEDS names, or else the given ones."""
    asked = os.environ.get("FUZZ_SEEDS")
    if asked is None:
        return list(seeds)
    return [int(seed) for seed in asked.split(",")]


def draw_layout(random: Random, processes: int) -> ParallelConfig:
    """Draws sizes of the axes for so many processes, a schedule, a sharding strategy and their
    options."""
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    for factor in prime_factors(processes):
        axes[random.choice(list(axes))] *= factor
    schedules = [
        name for name, traits in SCHEDULES.items() if axes["pp"] > 1 or traits.stages.usual == 1
    ]
    schedule = random.choice(schedules)
    stages = SCHEDULES[schedule].stages
    virtual_stages = stages.usual if axes["pp"] > 1 else 1
    replicated = random.random() < 0.5
    strategies = ["NO_SHARD", "SHARD_OPTIMIZER"] if replicated else ["SHARD_GRAD_OP", "FULL_SHARD"]
    sharding = random.choice(strategies)
    if axes["dp_replicate"] > 1:
        sharding = HYBRID_OF.get(sharding, sharding)  # type: ignore[call-overload]
    cadences = ["step"] if replicated else ["step", "step", "microbatch"]
    splits = SCHEDULES[schedule].splits_backward
    return ParallelConfig(
        **axes,
        schedule=schedule,
        virtual_stages=virtual_stages,
        microbatch_size=random.choice([1, 1, 2]),
        sharding=sharding,
        gather=random.choice(cadences),  # type: ignore[arg-type]
        reduce="step" if splits else random.choice(cadences),  # type: ignore[arg-type]
        prefetch=None if replicated else random.choice([None, None, 1, 2]),
        bucket_mib=random.choice([None, 0.01]) if replicated else None,
        sequence_parallel=random.random() < 0.5,
        recompute=random.choice(["none", "none", "full", "selective"]),  # type: ignore[arg-type]
    )


def prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number, small ones first."""
    factors = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def train_all(
    world: Callable[[int], World],
    job: Callable[[Recipe], Any],
    cases: Sequence[Case],
    folder: Path,
) -> Iterator[Outcome]:
    """Runs the job with the recipe of each case on as many processes as its layout needs."""
    for size in sorted({case.recipe.parallel.world_size for case in cases}):
        left = [case for case in cases if case.recipe.parallel.world_size == size]
        while left:
            together = left[:CASES_IN_A_JOB]
            pool = world(size)
            try:
                ranks = pool.run(run_cases, job, together, folder)
            except (EOFError, ConnectionError, TimeoutError):
                pool.close()
                seed, words = failure_in(folder, size)
                yield from (Outcome(case, failed=words) for case in left if case.seed == seed)
                left = [case for case in left if case.seed != seed]
                continue
            for case, *answers in zip(together, *ranks, strict=False):
                left.remove(case)
                yield combined(case, answers)


def run_cases(
    job: Callable[[Recipe], Any],
    cases: Sequence[Case],
    folder: Path,
) -> list[Any]:
    """Runs the job with each recipe on this rank. Returns the answers, or instead of an answer the
    error of the project. Any other error is the last answer, because it may leave a process group
    in the middle of a collective."""
    path = folder / f"rank{dist.get_rank()}"
    answers = []
    for case in cases:
        with path.open("w") as log:
            print(case.seed, file=log, flush=True)
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=log)
            try:
                answers.append(job(case.recipe))
            except Parallel3dError as error:
                # The traceback would keep the trainer and its process groups alive.
                answers.append(error.with_traceback(None))
            except Exception:
                text = traceback.format_exc()
                print(text, file=log, flush=True)
                answers.append(RuntimeError(tail_of(text)))
            if isinstance(answers[-1], Exception):
                faulthandler.dump_traceback_later(PATIENCE_S / 4, exit=True, file=log)
            dist.barrier()  # if not all ranks arrive, all of them end
            faulthandler.cancel_dump_traceback_later()
        if isinstance(answers[-1], RuntimeError):
            break
    return answers


def failure_in(folder: Path, size: int) -> tuple[int, str]:
    """Returns the seed of the case in which ranks ended, and what they wrote before."""
    texts = [(folder / f"rank{rank}").read_text() for rank in range(size)]
    seeds = [int(text.partition("\n")[0]) for text in texts]
    raised = [seed for seed, text in zip(seeds, texts, strict=True) if "Traceback" in text]
    tails = [f"rank {rank}: {tail_of(text)}" for rank, text in enumerate(texts)]
    return (raised or seeds)[0], "\n".join(tails)


def tail_of(text: str) -> str:
    """Returns the last lines of a traceback, or the innermost calls of a rank that hung."""
    lines = text.strip().splitlines()[1:]
    if lines and lines[0].startswith("Timeout"):
        calls = [line for line in lines if "parallel3d/" in line]
        return "\n".join([lines[0], *calls[:4]])
    return "\n".join(lines[-4:]) or "ended without a word"


def combined(case: Case, answers: Sequence[Any]) -> Outcome:
    """Returns the outcome of a case from the answers of its ranks."""
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if not errors:
        return Outcome(case, answers=tuple(answers))
    said = "; ".join(sorted({f"{type(error).__name__}: {error}" for error in errors}))
    if not all(isinstance(error, ConfigError | RankError) for error in errors):
        return Outcome(case, failed=said)
    if len(errors) < len(answers):
        return Outcome(case, failed=f"only some ranks raise: {said}")
    if "\n" in said:
        return Outcome(case, failed=f"refused in more than a line: {said}")
    return Outcome(case, refused=said)


def assert_follow(differences: Iterable[tuple[Outcome, list[str]]]) -> None:
    """Asserts that no case fails or differs from its reference, and that two thirds are not
    refused."""
    failures = []
    refused = []
    followed = 0
    for outcome, found in differences:
        if outcome.refused is not None:
            refused.append(f"seed {outcome.case.seed}: {outcome.refused}")
        elif outcome.failed is not None or found:
            failures.append("\n".join([outcome.failed or "differs", *found[:8], str(outcome.case)]))
        else:
            followed += 1
    print(
        f"{followed} cases follow their reference, {len(failures)} fail, {len(refused)} are "
        "refused:",
        *refused,
        sep="\n",
    )
    assert not failures, "\n\n".join(failures)
    assert len(refused) <= max(1, followed / 2), refused
