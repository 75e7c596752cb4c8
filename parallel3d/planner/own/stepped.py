"""The moments of a backward that steps each parameter when its gradient is complete, where that is done parameter by
parameter: on one data rank, and of whole parameters in buckets (`sharding.buckets`). There is one microbatch a step.
What `fully_shard` does differs by its reduced gradients alone, and is among the other moments.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.planner.own.buckets import Filled, Fillings, filled_by
from parallel3d.planner.own.ends import embedding_backward, head_backward, loss_backward
from parallel3d.planner.own.moment import Around, Moment
from parallel3d.planner.own.moments import Moments
from parallel3d.planner.own.rank import Rank, Stage
from parallel3d.planner.own.states import State, received_into
from parallel3d.planner.own.work import backward_work


class SteppedMoments(Moments):
    """Of one rank."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._sent = [self._fillings(kind).left for kind in rank.kinds]  # of those that are done

    def _backward(self, state: State, stage: Stage, around: Around) -> Iterator[Moment]:
        rank, blocks = self.rank, stage.blocks
        fillings = self._fillings(stage)
        first = fillings.first
        is_tied = stage.part.embedding and stage.part.head and rank.run.shape.tied_embeddings
        tied = float(rank.item * rank.ends.table) if is_tied else 0.0  # the gradient of both waits for the embedding
        if stage.part.head:
            yield from self._stepped_head(state, stage, around, fillings, is_tied=is_tied)
        for at in reversed(range(blocks)):
            filled, kind = fillings.blocks[at], rank.recompute(stage.first + at)
            work = backward_work(rank.sizes, kind, "given", opens=filled.opens, step=self._step_share)
            arriving = 0.0 if at == blocks - 1 and not stage.part.head else rank.sizes.b
            temporary = arriving + work.peak + tied + filled.waits
            yield self._in_backward(state, stage, around, at, at + 1, temporary)
            done = self._in_backward(state, stage, around, at, at, 2.0 * rank.sizes.b + tied)
            yield from self._filled(done, filled)
        if stage.part.embedding:
            work = embedding_backward(rank.ends, "given", opens=first.opens, step=self._step_share)
            temporary = rank.sizes.b + work.peak + tied + first.waits
            yield self._in_backward(state, stage, around, -1, 0, temporary)
        yield from self._filled(self._in_backward(state, stage, around, -1, 0, 0.0), first)

    def _stepped_head(
        self, state: State, stage: Stage, around: Around, fillings: Fillings, *, is_tied: bool
    ) -> Iterator[Moment]:
        """The loss, the head, and the norm before it, which is its own unit; a tied head is none."""
        rank, ends, all_ = self.rank, self.rank.ends, stage.blocks
        norm, head = fillings.norm, Filled() if is_tied else fillings.head
        if ends.chunk is None:
            yield self._in_backward(state, stage, around, all_, all_, loss_backward(ends), head=True)
        how = "kept" if is_tied else "given"
        work = head_backward(ends, how, has_total=False, opens=head.opens, step=self._step_share)
        yield self._in_backward(state, stage, around, all_, all_, work.peak, head=True)
        tied = float(rank.item * ends.table) if is_tied else 0.0
        after = self._in_backward(state, stage, around, all_, all_, 2.0 * rank.sizes.b + tied)
        yield from self._filled(after, head)
        yield after._replace(temporary=after.temporary + norm.waits + norm.opens)
        yield from self._filled(after, norm)

    def _filled(self, moment: Moment, filled: Filled) -> Iterator[Moment]:
        for each in (filled.finishes, filled.sends):
            if each:
                yield moment._replace(temporary=moment.temporary + each)

    def at_the_end(self) -> Iterator[Moment]:
        """The last two buckets of each stage are finished when all backwards are."""
        rank = self.rank
        each = [self._fillings(stage) for stage in rank.stages]
        waiting, received = sum(one.left for one in each), received_into(rank.walk) * rank.sizes.b
        for one in each:
            temporary = waiting - one.left + one.finishing
            yield Moment("last backward", 0.0, rank.throughout, 0.0, received, temporary)

    def _own_gradients(self, state: State, stage: Stage, around: Around, at: int) -> float:
        return 0.0

    def _fillings(self, stage: Stage) -> Fillings:
        if self.rank.whole:
            return filled_by(self.rank.run, stage.part, self.rank.run.step_bytes)
        return Fillings(Filled(), (Filled(),) * stage.blocks, Filled(), Filled())

    @property
    def _step_share(self) -> float:
        """What a step makes, for each byte of a gradient that is stepped as it comes."""
        return self.rank.run.step_bytes / self.rank.item if self.rank.alone else 0.0
