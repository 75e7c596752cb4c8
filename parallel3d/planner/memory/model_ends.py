"""What the two ends of the model keep and hold while they compute: the embedding, and the last
norm, the head and the loss (`layers.vocabulary`, `layers.loss`, `training.loss`), of a microbatch
on one tp rank: bounds in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.planner.memory.block_work import BlockTensors, WeightGradients
from parallel3d.planner.model.parameters import vocabulary_rows
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.training.loss_chunks import tokens_at_a_time


@dataclass(frozen=True, kw_only=True)
class EndTensors:
    """Bytes of the tensors at the ends."""

    block: BlockTensors  # whose hidden features, norm and input gradient are those of the ends
    item: int
    tokens: int
    rows: int  # rows of the vocabulary on this rank
    chunk: int | None  # tokens whose logits exist at a time; None: all
    table: int  # numbers of the token table on this rank
    positions: int  # the gradient of learned positions; 0 without
    is_split: bool  # tp > 1

    @classmethod
    def of(cls, run: PlannedRun, block: BlockTensors) -> EndTensors:
        tp = run.layout.tp
        shape = run.shape
        item = int(run.item_bytes)
        rows = vocabulary_rows(shape, tp)
        return cls(
            block=block,
            item=item,
            tokens=run.tokens,
            rows=rows,
            chunk=tokens_at_a_time(
                run.optimizer.loss_chunk_tokens,
                tokens=run.tokens,
                vocab=shape.vocab,
                tp=tp,
                gpu_bytes=run.cluster.device.gpu_bytes,
            ),
            table=rows * shape.hidden,
            positions=item * shape.position_rows * shape.hidden
            if shape.positions == "learned"
            else 0,
            is_split=tp > 1,
        )

    @property
    def logits(self) -> int:
        """The logits of a microbatch between the head's forward and its backward."""
        return self.item * self._logit_count

    @property
    def _logit_count(self) -> int:
        if self.chunk is None:
            return self.tokens * self.rows
        return 0

    @property
    def kept_by_embedding(self) -> int:
        """The ids as rows of this rank, which of them are another rank's, and dropout's mask."""
        return 9 * self.tokens * self.is_split + self.block.mask

    @property
    def kept_by_head(self) -> int:
        """What the last norm and the loss keep, the logits aside."""
        output = self.block.hidden_full
        if self.chunk is None:
            output = self.block.hidden_local
        return self.block.norm + output + 4 * self.tokens

    @property
    def delayed(self) -> int:
        """The factors of the head's gradient, where it waits for the second half of a backward."""
        if self.chunk is None:
            return self.block.hidden_full + self.logits
        return 0

    @property
    def delayed_table(self) -> int:
        """Numbers of that gradient."""
        if self.chunk is None:
            return self.table
        return 0

    @property
    def loss(self) -> int:
        """Bytes made by the loss of a microbatch: its softmax in float32."""
        return 4 * self._logit_count

    def head_backward(self, weights: WeightGradients, *, has_sum: bool) -> int:
        """Returns the bytes made from the gradient of the logits, which is where they were, or from
        the loss in chunks, to that of the last block's output. `has_sum`: there is a float32
        gradient of the table to add to."""
        item = self.item
        table = item * self.table
        if self.chunk is None:
            return self.block.input_gradient + table * (weights != "later")
        logits = self.chunk * self.rows
        at_once = item * logits
        if item < 4:  # their gradient in float32, and the product that is added to the table's
            at_once += max(4 * logits, table)
        made = 0 if has_sum else 4 * self.table
        return max(self.block.hidden_full + made + at_once, made + self.block.input_gradient)

    def embedding_backward(self, weights: WeightGradients) -> int:
        """Returns the bytes made from the gradient of the embedding's output to that of its
        table."""
        full = self.block.hidden_full
        wide = 0
        if self.item < 4:
            wide = 4 * full // self.item
        made = wide
        # what it has of each row is summed in float32, beside it
        if weights == "kept":
            made = self.item * self.table + 2 * wide
        along = full * self.is_split  # without other ranks' rows
        return self.positions * (weights == "kept") + along + max(self.block.gathered, made)
