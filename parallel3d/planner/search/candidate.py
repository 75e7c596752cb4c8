"""A layout of a question as a planned run, and priced exactly."""

from __future__ import annotations

from parallel3d.config.recipe import ParallelConfig
from parallel3d.config.rules_optimizer import can_step_in_backward
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import PlannedRun, from_config
from parallel3d.planner.model.shapes import ModelShape, padded
from parallel3d.planner.search.question import Question, Strategy
from parallel3d.planner.time.step import step_cost
from parallel3d.schedules.balance import sizes_between


def planned_shape(question: Question, tp: int) -> ModelShape:
    """The model as the program takes it: parallel3d takes any vocabulary, other programs one that tp divides."""
    return question.shape if question.program.is_parallel3d else padded(question.shape, tp)


def planned_run(question: Question, parallel: ParallelConfig) -> PlannedRun:
    """Returns the run that answers the question with a layout."""
    training, boundaries = question.training, parallel.stage_boundaries
    return PlannedRun(
        shape=planned_shape(question, parallel.tp),
        cluster=question.cluster,
        layout=from_config(parallel, question.global_batch_size),
        program=question.program,
        seq_len=question.seq_len,
        precision=question.precision,
        stage_layers=() if boundaries is None else tuple(sizes_between(boundaries, question.shape.layers)),
        state_bytes=training.state_bytes,
        step_bytes=training.step_bytes,
        factors=training.factors,
        muon=training.muon,
        rounded=training.rounded,
        drops=training.drops,
        steps_in_backward=training.steps_in_backward
        and can_step_in_backward(parallel, question.global_batch_size, tied_embeddings=question.shape.tied_embeddings),
        loss_chunk_tokens=training.loss_chunk_tokens,
    )


def strategy(question: Question, parallel: ParallelConfig) -> Strategy:
    """Prices a layout exactly, whether it fits or not."""
    run = planned_run(question, parallel)
    return Strategy(parallel=parallel, memory=worst_rank(run), cost=step_cost(run))
