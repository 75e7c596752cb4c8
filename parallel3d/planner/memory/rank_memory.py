"""The memory of every pipeline rank, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, cast

from parallel3d.planner.memory.activations import block_bytes, whole_block_bytes
from parallel3d.planner.model.parameters import layer_parameters
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice, norm_parameters
from parallel3d.planner.own.memory import Least, most_held
from parallel3d.planner.own.memory import least_held as least_held_of_own
from parallel3d.schedules.live import live_microbatches
from parallel3d.schedules.registry import ScheduleName, schedule_traits

MemoryKind = Literal["allocated", "allocated in the first step", "reserved", "device"]
_MOMENTS = 2 / 3  # of Adam's states with a float32 copy of the weights


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on each device of one pipeline rank at its peak; the fields up to `fragmentation` add up to `total`."""

    rank: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # parameters gathered and gradients on their way (FSDP), received activations
    temporary: float  # a block under recompute, the optimizer's temporaries
    fragmentation: float  # reserved by the allocator and not allocated
    context: float  # CUDA, cuBLAS and NCCL, outside the allocator

    @property
    def allocated(self) -> float:
        """What `torch.cuda.max_memory_allocated` says."""
        return self.total - self.fragmentation - self.context

    @property
    def reserved(self) -> float:
        """What `torch.cuda.max_memory_reserved` says."""
        return self.total - self.context

    @property
    def total(self) -> float:
        """What the device has in use (`nvidia-smi`)."""
        states = self.parameters + self.gradients + self.optimizer
        at_work = self.activations + self.logits + self.buffers + self.temporary
        return states + at_work + self.fragmentation + self.context

    @property
    def allocated_in_first_step(self) -> float:
        """Of `allocated`, as long as the optimizer has not made its moments: they come after the backward's peak."""
        states = self.parameters + self.gradients + self.optimizer
        return max(states, self.allocated - self.optimizer * _MOMENTS)

    def of_kind(self, kind: MemoryKind) -> float:
        return {
            "allocated": self.allocated,
            "allocated in the first step": self.allocated_in_first_step,
            "reserved": self.reserved,
            "device": self.total,
        }[kind]


def memory_by_rank(run: PlannedRun) -> list[RankMemory]:
    """Of every pipeline rank; the ranks of the other axes have the same."""
    return [rank_memory(run, rank) for rank in range(run.layout.pp)]


def worst_rank(run: PlannedRun) -> RankMemory:
    """The pipeline rank that needs most."""
    is_known = run.is_own and not schedule_traits(run.layout.schedule).splits_backward
    ranks = _candidates(run) if is_known else range(run.layout.pp)
    return max((rank_memory(run, rank) for rank in ranks), key=lambda memory: memory.total)


def quick_worst_bytes(run: PlannedRun, *, enough: float = inf) -> float:
    """`worst_rank(run).total`, in any case of the few ranks that usually hold most. Where one holds more than `enough`,
    that rank's."""
    most = 0.0
    for rank in _candidates(run):
        most = max(most, rank_memory(run, rank).total)
        if most > enough:
            break
    return most


def _candidates(run: PlannedRun) -> Iterable[int]:
    """The ranks that can be the fullest: the first, which holds most microbatches; the last, which has the logits; and,
    where layers are uneven, the first of those that have most."""
    pp = run.layout.pp
    layers = [part.layers for part in run.ranks]
    return dict.fromkeys((0, pp - 1, layers.index(max(layers)), min(1, pp - 1)))


def least_held(run: PlannedRun) -> tuple[Least, ...]:
    """Of the first and the last pipeline rank of a job of this project's own program; of others nothing is known so
    quickly."""
    ranks = dict.fromkeys((0, run.layout.pp - 1))
    return tuple(least_held_of_own(run, rank) if run.is_own else Least() for rank in ranks)


def least_bytes(run: PlannedRun, states: Sequence[Least], work: Sequence[Least]) -> float:
    """A lower bound of `worst_rank(run).total`, from the states of one run and the activations of another that has them
    in common with it."""
    program = run.program
    around = 0.0 if run.on_cpu or not run.is_own else program.cache_bytes + program.context_bytes
    more = 1.0 if run.on_cpu else 1 + program.fragmentation
    most = 0.0
    for has, does in zip(states, work, strict=True):
        fullest = more * (has.gathered + does.activations)
        amid = has.gradients + more * (has.gathered_amid + does.amid)
        most = max(most, has.at_rest + max(fullest, amid))
    return most + around


def rank_memory(run: PlannedRun, rank: int) -> RankMemory:
    """Of one pipeline rank: of this project's own program at the fullest moment of a step (`own/memory`), of others by
    what their programs keep."""
    return _own(run, rank) if run.is_own else _others(run, rank)


def _own(run: PlannedRun, rank: int) -> RankMemory:
    held, program = most_held(run, rank), run.program
    at_work = held.activations + held.logits + held.buffers + held.temporary
    return RankMemory(
        rank=rank,
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=held.activations,
        logits=held.logits,
        buffers=held.buffers,
        temporary=held.temporary,
        fragmentation=0.0 if run.on_cpu else program.fragmentation * at_work + program.cache_bytes,
        context=0.0 if run.on_cpu else program.context_bytes,
    )


def _others(run: PlannedRun, rank: int) -> RankMemory:
    layout, program = run.layout, run.program
    part = run.ranks[rank]
    parameters = rank_parameters(run, part)
    activations = _activations(run, rank)
    logits = program.logit_bytes * run.tokens * run.loss_vocab if part.head else 0.0
    one_block = whole_block_bytes(run) if layout.recompute in ("full", "layer", "op") else 0.0
    buffers = _buffers(run, part, parameters)
    # A block under recompute and the logits are not alive at once, nor is the optimizer's step beside either.
    step = program.step_bytes * parameters / layout.optimizer_shards
    temporary = max(one_block - logits, step - activations - logits, 0.0)
    held = RankMemory(
        rank=rank,
        parameters=program.weight_bytes * parameters / layout.parameter_shards,
        gradients=program.gradient_bytes * parameters / layout.gradient_shards,
        optimizer=program.optimizer_bytes * parameters / layout.optimizer_shards,
        activations=activations,
        logits=logits,
        buffers=buffers,
        temporary=temporary,
        fragmentation=program.fragmentation * (activations + logits + buffers + temporary) + program.cache_bytes,
        context=program.context_bytes,
    )
    # What the allocator keeps for nothing it gives back before it runs out.
    cached = program.step_cached_bytes * parameters / layout.optimizer_shards
    room = max(0.0, run.cluster.device.memory_bytes - held.total)
    return replace(held, fragmentation=held.fragmentation + min(cached, room))


def rank_parameters(run: PlannedRun, stage: StageSlice) -> int:
    """Parameters of a slice of the model on one device, the token table padded as the program pads it."""
    shape, tp = run.shape, run.layout.tp
    count = stage.layers * layer_parameters(shape, tp)
    table = run.rank_vocab * shape.hidden
    if stage.embedding:
        count += table + (shape.position_rows * shape.hidden if shape.positions == "learned" else 0)
        count += norm_parameters(shape) if shape.embedding_norm else 0
    if stage.head:
        count += norm_parameters(shape)
        if not (shape.tied_embeddings and stage.embedding):
            count += table
    return count


def live_on(run: PlannedRun, rank: int) -> int:
    """Microbatches, counted for each of a rank's stages, whose activations are alive at once on a pipeline rank."""
    layout = run.layout
    if layout.schedule == "zb-1p":
        return min(layout.pp, layout.microbatches)
    if layout.schedule == "zb-2p":  # as many again, so that the bubble goes (Qi et al. 2023, arXiv 2401.10241, table 1)
        return min(2 * layout.pp - 1, layout.microbatches)
    return live_microbatches(
        cast(ScheduleName, layout.schedule),
        pp=layout.pp,
        rank=rank,
        microbatches=layout.microbatches,
        virtual_stages=layout.virtual_stages,
    )


def _activations(run: PlannedRun, rank: int) -> float:
    layout, part = run.layout, run.ranks[rank]
    live = live_on(run, rank)
    stages = layout.virtual_stages
    bytes_ = live * part.layers / stages * block_bytes(run)
    outside = run.tokens * run.shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    if part.embedding:  # its output under dropout keeps a mask; ids are 8 bytes
        bytes_ += live / stages * (outside * (1.0 if run.program.dropout else 0.0) + 8.0 * run.tokens)
    if part.head:  # the last norm's input and output
        bytes_ += 4.0 * outside
    return bytes_


def _buffers(run: PlannedRun, part: StageSlice, parameters: int) -> float:
    """FSDP: the block in use and the next one gathered, one block's gradients before and after their reduction, the
    embedding and head gathered throughout. Pipeline: an activation and a gradient being received."""
    layout, program, shape = run.layout, run.program, run.shape
    bytes_ = 0.0
    if layout.parameter_shards > 1 or program.always_sharded:
        block = min(layer_parameters(shape, layout.tp), program.gathered_parameters / 2)
        if run.gathers_each_microbatch:
            ends = parameters - part.layers * layer_parameters(shape, layout.tp)
            bytes_ += block * (2 * program.gather_bytes + 2 * program.reduce_bytes)
            bytes_ += ends * (program.gather_bytes + program.reduce_bytes)
        else:  # gathered once a step, and the gradients whole until the last backward
            bytes_ += parameters * (program.gather_bytes + program.reduce_bytes)
    if layout.pp > 1:
        outside = run.tokens * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
        bytes_ += 4 * run.item_bytes * outside
    return bytes_
