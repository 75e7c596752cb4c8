"""The memory of published programs, which are not parallel3d: what each keeps, by products of a few
numbers.

Activations are what the backward needs of the forward. Korthikanti et al. 2022 (arXiv 2205.05198,
section 4.1), taken apart so that it holds for a tiled attention, SwiGLU, grouped keys and values,
and norms that keep float32 copies. Per block, t tokens of a microbatch, 16-bit activations:

    outside tp     2 norms' inputs, 2 linear inputs (q/k/v; gate and up), 2 dropout masks         t h (8 + 2), / tp with
                                                                                                   sequence parallelism
    inside tp      q, k, v; the output projection's input; the activation's input(s) and output   t (...) / tp
    softmax        its output, dropout's mask and output: 5 bytes a score                          5 a s t / tp
"""  # noqa: E501

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from parallel3d.planner.hardware.units import ROUNDED
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.schedules.build import live_microbatches


class PublishedRank:
    """What a rank of a published program holds, whatever is recomputed: a search asks for many
    kinds of recompute."""

    def __init__(self, run: PlannedRun, rank: int, blocks: BlockBytes) -> None:
        self.run = run
        self.rank = rank
        self.part = run.ranks[rank]
        self.blocks = blocks
        layout = run.layout
        program = run.program
        part = self.part
        self.own_parameters = rank_parameters(run, part)
        experts = run.stage_experts(part)

        def split(shards: int) -> float:
            """Returns the numbers that a rank has where so many ranks share what they have in
            common."""
            return self.own_parameters / shards + experts / layout.expert_shards(shards)

        self.own = split(layout.optimizer_shards)
        self.live = live_on(run, rank)
        self.parameters = program.weight_bytes * split(layout.parameter_shards)
        self.gradients = program.gradient_bytes * split(layout.gradient_shards)
        self.optimizer = program.optimizer_bytes * self.own
        self.logits = program.logit_bytes * run.tokens * run.loss_vocab if part.head else 0.0

    @cached_property
    def buffers(self) -> float:
        """What is gathered and on its way, which a lower bound does without."""
        return _buffers(self.run, self.part, self.own_parameters)

    def memory(self, recompute: str, every: int) -> RankMemory:
        """Returns the rank's memory with this recompute in the place of the run's own."""
        program = self.run.program
        activations, temporary, fragmentation = self._at_work(recompute, every)
        return RankMemory(
            rank=self.rank,
            parameters=self.parameters,
            gradients=self.gradients,
            optimizer=self.optimizer,
            activations=activations,
            logits=self.logits,
            buffers=self.buffers,
            temporary=temporary,
            fragmentation=fragmentation,
            context=program.context_bytes,
        )

    def total(self, recompute: str, every: int) -> float:
        """Returns the bytes of `memory` in all, sooner."""
        return self._total(*self._at_work(recompute, every))

    def least(self, recompute: str, every: int) -> float:
        """Returns a lower bound of `total`, also of the layouts that split fewer states over the
        data ranks and differ in nothing else: buffers and what is temporary, which may be less
        there, are left out."""
        program = self.run.program
        scale = self.run.cluster.scales.memory
        at_work = (1 + program.fragmentation) * (self._activations(recompute, every) + self.logits)
        beside = scale * (at_work + program.cache_bytes + program.context_bytes)
        return ROUNDED * (self.parameters + self.gradients + self.optimizer + beside)

    def _total(self, activations: float, temporary: float, fragmentation: float) -> float:
        states = self.parameters + self.gradients + self.optimizer
        allocated = states + activations + self.logits + self.buffers + temporary
        return allocated + fragmentation + self.run.program.context_bytes

    def _at_work(self, recompute: str, every: int) -> tuple[float, float, float]:
        """Returns the bytes of activations, of what is temporary and of what is reserved for
        nothing."""
        _run = self.run
        program = self.run.program
        logits = self.logits
        activations = self._activations(recompute, every)
        one_block = self.blocks.whole(recompute) if recompute in ("full", "every_n", "op") else 0.0
        # A block under recompute and the logits are not alive at once, nor is the optimizer's step
        # beside either. Beside the latter there are no buffers either: they are free, in pieces
        # that the allocator keeps.
        step = program.step_bytes * self.own - activations - logits
        temporary, at_most = (
            max(one_block - logits, each, 0.0) for each in (step - self.buffers, step)
        )
        reserved = (
            program.fragmentation * (activations + logits + self.buffers + at_most)
            + program.cache_bytes
        )
        reserved += at_most - temporary
        return activations, temporary, reserved

    def _activations(self, recompute: str, every: int) -> float:
        run = self.run
        part = self.part
        live = self.live
        stages = self.run.layout.virtual_stages
        each = self.blocks.kept(recompute, every)
        bytes_ = live * part.layers / stages * each
        if part.dense:
            bytes_ += (
                live * part.dense / stages * (self.blocks.kept(recompute, every, dense=True) - each)
            )
        if part.embedding:  # its output under dropout keeps a mask; ids are 8 bytes
            bytes_ += (
                live
                / stages
                * (_outside(run) * (1.0 if run.program.dropout else 0.0) + 8.0 * run.tokens)
            )
        if part.head:  # the last norm's input and output
            bytes_ += 4.0 * _outside(run)
        return bytes_


def rank_parameters(run: PlannedRun, stage: StageSlice) -> int:
    """Parameters of a slice of the model on one device, experts not among them, the token table
    padded as the program pads it."""
    shape = run.shape
    count = run.stage_parameters(
        StageSlice(layers=stage.layers, embedding=False, head=False, dense=stage.dense)
    )
    table = run.rank_vocab * shape.hidden
    if stage.embedding:
        count += table + (shape.position_rows * shape.hidden if shape.positions == "learned" else 0)
        count += shape.norm_parameters if shape.embedding_norm else 0
    if stage.head:
        count += shape.norm_parameters
        if not (shape.tied_embeddings and stage.embedding):
            count += table
    return count


def live_on(run: PlannedRun, rank: int) -> int:
    """Microbatches, counted for each of a rank's stages, whose activations are alive at once on a
    pipeline rank."""
    layout = run.layout
    # zb-2p: as many again, so that the bubble goes (Qi et al. 2023, arXiv 2401.10241, table 1)
    zero_bubble = {"zb-1p": layout.pp, "zb-2p": 2 * layout.pp - 1}
    if layout.schedule in zero_bubble:
        return min(zero_bubble[layout.schedule], layout.microbatches)
    return live_microbatches(
        layout.schedule,
        pp=layout.pp,
        rank=rank,
        microbatches=layout.microbatches,
        virtual_stages=layout.virtual_stages,
    )


def _buffers(run: PlannedRun, part: StageSlice, parameters: int) -> float:
    """Counts what FSDP gathers and reduces: the block in use and the next one gathered, one block's
    gradients before and after their reduction, the embedding and head gathered throughout. A
    pipeline adds an activation and a gradient that are being received."""
    layout = run.layout
    program = run.program
    bytes_ = 0.0
    if layout.parameter_shards > 1 or program.always_sharded:
        block = run.block_parameters
        ends = parameters - run.stage_parameters(replace(part, embedding=False, head=False))
        # else no rank has another's experts at any time
        if layout.expert_shards(layout.parameter_shards) > 1:
            block += run.stage_experts(StageSlice(layers=1, embedding=False, head=False))
            parameters += run.stage_experts(part)
        # gathered once a step, and the gradients whole until the last backward
        at_once = float(parameters)
        if run.gathers_each_microbatch:
            at_once = 2 * block + ends
        bytes_ = at_once * (program.gather_bytes + program.reduce_bytes)
    return bytes_ + (4 * run.item_bytes * _outside(run) if layout.pp > 1 else 0.0)


class BlockBytes:
    """What one block keeps of a microbatch, by recompute; of a mixture one with experts, or a
    `dense` one. Runs that differ in nothing but the schedule and the use of the data ranks have it
    in common."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._kept: dict[tuple[str, int, bool], float] = {}
        self._whole: dict[tuple[bool, bool], float] = {}

    def kept(self, recompute: str, every: int, *, dense: bool = False) -> float:
        """Returns what the block keeps until its backward."""
        key = recompute, every, dense
        if key not in self._kept:
            self._kept[key] = self._kept_bytes(recompute, every, dense=dense)
        return self._kept[key]

    def whole(self, recompute: str, *, dense: bool = False) -> float:
        """Returns what the block keeps where no block is recomputed: also what is alive while one
        is."""
        key = recompute == "selective", dense
        if key not in self._whole:
            self._whole[key] = _whole_block_bytes(self._run, is_selective=key[0], dense=dense)
        return self._whole[key]

    def _kept_bytes(self, recompute: str, every: int, *, dense: bool) -> float:
        run = self._run
        inputs = _outside(self._run) * self._run.item_bytes
        shape = run.shape
        tp = run.layout.tp
        if recompute in ("full", "every_n"):
            share = 1.0 if recompute == "full" else 1 / every
            return share * inputs + (1 - share) * self.whole(recompute, dense=dense)
        if recompute == "op":
            # What torchtitan's per-operator recompute keeps (Liang et al. 2024, arXiv 2410.06511,
            # and its parallelisms/parallelize_llama.py): the block's input, attention's output, and
            # of wq, wk, wv, wo, w1, w3, w2 every second one's output: k, the projection's output,
            # one of the MLP's inputs.
            kept = run.tokens * (shape.kv_hidden + shape.hidden) / tp + _inner(run, dense=dense)
            return (
                2.0 * inputs
                + kept * run.item_bytes
                + 2.0 * shape.heads / tp * run.tokens * run.item_bytes
            )
        return self.whole(recompute, dense=dense)


def _whole_block_bytes(run: PlannedRun, *, is_selective: bool, dense: bool) -> float:
    shape = run.shape
    layout = run.layout
    program = run.program
    # Input of each norm, and its output, which is the linear layers' input; RMS norms of a
    # framework's own operators keep float32 copies, where layer norm is one kernel of every
    # framework.
    copies = 0.0 if shape.layer_norm else program.norm_extra_bytes
    bytes_ = _outside(run) * (
        (8.0 + copies) * shape.block_norms / 2 + (2.0 if program.dropout else 0.0)
    )
    # q, k, v and the output projection's input; q and k once more where rotation does not happen in
    # place.
    kv = max(shape.kv_hidden, shape.head_dim * layout.tp)
    rotated = (shape.query_hidden + kv) * program.rope_copies if shape.positions == "rope" else 0.0
    features = 2.0 * shape.query_hidden + 2.0 * kv + rotated
    if (latent := shape.latent) is not None:
        narrow = latent.key_value_rank + latent.turned + (latent.query_rank or 0)
        features = 2.0 * shape.query_hidden + 2.0 * shape.heads * latent.value + rotated
        bytes_ += 4.0 * narrow * _outside(run) / shape.hidden  # before and after their norms
    # The activation's inputs and output; an unfused SwiGLU keeps silu(gate) too.
    inner = (shape.feed_forward_inputs + 1 + (shape.is_gated and not program.fused_mlp)) * _inner(
        run, dense=dense
    )
    if shape.experts is not None and not dense:  # what was sent to the experts, and in their order
        inner += 2.0 * run.routed_rows * shape.hidden
    # A tiled attention keeps a float32 per row; another keeps the scores, unless they are
    # recomputed.
    score = 4.0
    if program.attention != "flash" and not is_selective:
        score = (5.0 if program.dropout else 2.0) * run.seq_len
    bytes_ += run.tokens * (2.0 * features + score * shape.heads) / layout.tp + 2.0 * inner
    return bytes_ * run.item_bytes / 2


def _inner(run: PlannedRun, *, dense: bool) -> float:
    """Elements of the feed-forward part's features of a microbatch on a rank, of experts those of
    the rows that they compute."""
    shape = run.shape
    layout = run.layout
    experts = run.shape.experts
    if experts is None or dense:
        return run.tokens * shape.ffn_hidden / layout.tp
    return (
        run.tokens * experts.shared_hidden / layout.tp
        + run.routed_rows * experts.hidden / layout.expert_tp
    )


def _outside(run: PlannedRun) -> float:
    """Elements of [tokens, hidden] where tp does not divide the features."""
    return run.tokens * run.shape.hidden / (run.layout.tp if run.layout.sequence_parallel else 1)
