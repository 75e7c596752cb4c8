"""This project's framework on a calibrated host: kernels by their curves, and measurements where
`step` assumes."""

from __future__ import annotations

from parallel3d.config.sharding_strategies import REPLICATED
from parallel3d.planner.hardware.calibration import Calibration
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.time.block import (
    BlockParts,
    MicrobatchTimes,
    block_times,
    embedding_times,
    head_times,
)
from parallel3d.planner.time.collectives import all_gather_s, all_reduce_s, send_s
from parallel3d.planner.time.roofline import Kernels

_FORWARD = 0.4  # the forward's share of what a block dispatches


class CalibratedHost:
    """The measurements that hold for a run. A CPU dispatches before each kernel and not beside it,
    and ranks that are more than the cores share them: `at_once` pipeline ranks have a core for each
    of their processes, and everything that all ranks do at once takes `slowdown` longer."""

    def __init__(self, run: PlannedRun, measured: Calibration) -> None:
        layout = run.layout
        self.run = run
        self.measured = measured
        on_host = min(layout.world_size, run.cluster.gpus_per_node)
        cores = measured.cores or on_host
        self.process = measured.process(on_host)
        self.ranks = measured.together(on_host)
        self.at_once = layout.pp * cores / on_host
        self.contention = 1.0
        if self.ranks:
            self.contention = self.ranks.contention
        self.slowdown = max(1.0, on_host / cores) * self.contention
        # What splits, and what repeats: FULL_SHARD stands for all whose parameters are split.
        shards = layout.optimizer_shards
        tp_axis = "tp_sequence" if layout.sequence_parallel else "tp"
        self.tp = measured.overhead(tp_axis, layout.tp)
        splits = "FULL_SHARD"
        repeats = "HYBRID_SHARD"
        if layout.strategy in REPLICATED:
            splits = "SHARD_OPTIMIZER"
            repeats = "NO_SHARD"
        replicas = measured.overhead(repeats, layout.dp // shards)
        self.dp = measured.overhead(splits, shards).plus(replicas)

    def microbatch(self) -> MicrobatchTimes:
        run = self.run
        process = self.process
        recompute = run.layout.recompute
        kernels = Kernels(device=run.cluster.device, precision=run.precision, process=process)
        block = block_times(run, kernels)
        tp_forward, tp_backward = self._tp_s()
        # What recompute repeats costs its dispatch too, which was measured.
        share = 1 / run.layout.recompute_every
        if recompute == "every_n":
            recompute = "full"
        again = block.again_s + share * process.recompute.get(recompute, 0.0)
        if recompute == "full":
            tp_backward += share * tp_forward
        head_forward, head_backward = head_times(run, kernels)
        embedding_forward, embedding_backward = embedding_times(run, kernels)
        loss = process.logit_s * run.tokens * run.rank_vocab / 2
        end = (process.overhead.microbatch + self.tp.microbatch + self.dp.microbatch) / 2
        end_forward = _FORWARD * end
        end_backward = (1 - _FORWARD) * end
        return MicrobatchTimes(
            forward=self._block_parts(_FORWARD, block.forward_s, 0.0, tp_forward),
            backward=self._block_parts(1 - _FORWARD, block.backward_s, again, tp_backward),
            weight_s=block.weight_s,
            head_s=(head_forward + loss + end_forward, head_backward + loss + end_backward),
            embedding_s=(embedding_forward + end_forward, embedding_backward + end_backward),
            end_overhead_s=process.overhead.microbatch / 2,
        )

    def _block_parts(self, share: float, compute: float, again: float, tp: float) -> BlockParts:
        """Adds to a block's kernels, in one direction, its `share` of what was measured beside
        them."""
        dispatch = share * self.process.overhead.block
        # launched ahead: only what takes longer than the kernels shows
        if not self.measured.synchronous:
            dispatch = max(0.0, dispatch - compute - again)
        tp = tp + share * self.tp.block
        dp = share * self.dp.block
        return BlockParts(compute=compute, recompute=again, tp=tp, dp=dp, overhead=dispatch)

    def _tp_s(self) -> tuple[float, float]:
        """The layers' collectives beyond their smallest messages: two each way, of which those of
        sequence parallelism are a gather and a reduce-scatter, with two more gathers in the
        backward."""
        run = self.run
        layout = run.layout
        measured = self.measured
        bytes_ = run.tokens * run.shape.hidden * run.item_bytes
        group = run.group(layout.tp, 1)
        if self.ranks is None or group.nodes > 1:
            one = all_gather_s(run.cluster, group, bytes_) * 2
            if not layout.sequence_parallel:
                one = all_reduce_s(run.cluster, group, bytes_)
            return 2 * one, 2 * one
        if not layout.sequence_parallel:
            one = measured.collective_s("all_reduce", layout.tp, bytes_)
            return 2 * one, 2 * one
        gather = measured.collective_s("all_gather", layout.tp, bytes_)
        scatter = measured.collective_s("reduce_scatter", layout.tp, bytes_)
        return 2 * (gather + scatter), 4 * gather + 2 * scatter

    def action_s(self) -> float:
        """Seconds that an action of a pipeline takes beside its stage: its place in the schedule,
        and a message."""
        run = self.run
        layout = run.layout
        if layout.pp == 1:
            return 0.0
        bytes_ = run.tokens * run.shape.hidden * run.item_bytes
        if layout.sequence_parallel:
            bytes_ /= layout.tp
        if self.ranks is None:
            return send_s(run.cluster, bytes_, nodes=1)
        if layout.world_size > run.cluster.gpus_per_node:
            return send_s(run.cluster, bytes_, nodes=2)
        transfer = self.ranks.transfer
        _, least_s = transfer.points[0]
        return self.ranks.action_s + max(0.0, transfer.at(bytes_) - least_s)

    def once_s(self, part: StageSlice) -> tuple[float, float, float]:
        """Returns a step's seconds of the data dimension, the optimizer and the host, on a rank
        with this part."""
        base = self.process.overhead
        layout = self.run.layout
        layers = part.layers
        parameters = self.run.stage_parameters(part)
        rounds = 1
        if "microbatch" in (layout.gather_cadence, layout.reduce):
            rounds = layout.microbatches
        dp = self.dp
        data = rounds * (dp.step + layers * dp.layer + parameters * dp.parameter)
        optimizer = base.parameter * parameters / layout.optimizer_shards + layers * base.layer
        overhead = base.step + self.tp.step + layers * self.tp.layer
        slowdown = self.slowdown
        return slowdown * data, slowdown * optimizer, slowdown * overhead
