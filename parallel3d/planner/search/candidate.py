"""A layout of a question as a planned run, and priced exactly."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.config.recipe import ParallelConfig
from parallel3d.config.rules_optimizer import can_step_in_backward
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import PlannedRun, from_config
from parallel3d.planner.model.shapes import ModelShape, padded
from parallel3d.planner.search.question import Question, Strategy
from parallel3d.planner.time.step import step_cost


def planned_shape(question: Question, tp: int) -> ModelShape:
    """The model as the program takes it: parallel3d takes any vocabulary, other programs one that tp divides."""
    return question.shape if question.program.is_parallel3d else padded(question.shape, tp)


def planned_run(question: Question, parallel: ParallelConfig) -> PlannedRun:
    """Returns the run that answers the question with a layout."""
    training, batch = question.training, question.global_batch_size
    if training.steps_in_backward and not can_step_in_backward(
        parallel, batch, tied_embeddings=question.shape.tied_embeddings
    ):
        training = replace(training, steps_in_backward=False)
    return PlannedRun(
        shape=planned_shape(question, parallel.tp),
        cluster=question.cluster,
        layout=from_config(parallel, batch),
        program=question.program,
        seq_len=question.seq_len,
        precision=question.precision,
        optimizer=training,
    )


def strategy(question: Question, parallel: ParallelConfig) -> Strategy:
    """Prices a layout exactly, whether it fits or not."""
    run = planned_run(question, parallel)
    return Strategy(parallel=parallel, memory=worst_rank(run), cost=step_cost(run))
