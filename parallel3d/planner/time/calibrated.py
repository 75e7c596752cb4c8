"""Step time of parallel3d on a calibrated host, from measured curves instead of assumptions."""

from __future__ import annotations

from parallel3d.config.sharding_strategies import REPLICATED
from parallel3d.planner.hardware.calibration import Calibration, beyond_smallest_s
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.time.block import (
    MicrobatchTimes,
    TimeParts,
    block_times,
    embedding_times,
    head_times,
)
from parallel3d.planner.time.collectives import (
    context_gather_s,
    experts_exchange_s,
    hidden_bytes,
    passes,
    send_s,
    tp_exchange_s,
)
from parallel3d.planner.time.roofline import Kernels

_FORWARD = 0.4  # Fraction of a block's dispatch time that belongs to the forward pass.


class CalibratedHost:
    """Measurements of a host, applied to a run.

    If there are more ranks than cores, `shared` ranks share a core. Work that all ranks do at the
    same time takes `slowdown` times as long, which includes the measured contention.
    """

    def __init__(self, run: PlannedRun, measured: Calibration) -> None:
        layout = run.layout
        self.run = run
        self.measured = measured
        on_host = min(layout.world_size, run.cluster.gpus_per_node)
        cores = measured.cores or on_host
        self.process = measured.process(on_host)
        self.ranks = measured.together(on_host)
        self.shared = max(1.0, on_host / cores)
        self.contention = self.ranks.contention if self.ranks else 1.0
        self.slowdown = self.shared * self.contention
        # Measured overhead of sharding and of replication. FULL_SHARD represents all strategies
        # that shard parameters.
        shards = layout.optimizer_shards
        tp_axis = "tp_sequence" if layout.sequence_parallel else "tp"
        self.tp = measured.overhead(tp_axis, layout.tp)
        splits = "FULL_SHARD"
        repeats = "HYBRID_SHARD"
        if layout.strategy in REPLICATED:
            splits = "SHARD_OPTIMIZER"
            repeats = "NO_SHARD"
        replicas = measured.overhead(repeats, layout.replicas // shards)
        self.dp = measured.overhead(splits, shards).plus(replicas)

    def microbatch(self) -> MicrobatchTimes:
        run = self.run
        process = self.process
        recompute = run.layout.recompute
        kernels = Kernels(device=run.cluster.device, precision=run.precision, process=process)
        block = block_times(run, kernels)
        tp_forward, tp_backward = self._tp_s()
        cp = context_gather_s(run)
        ep = 2 * experts_exchange_s(run)
        # The measured cost of recompute includes its dispatch.
        if recompute == "every_n":
            recompute = "full"
        again_s = process.recompute.get(recompute, 0.0) / run.layout.recompute_every
        again = block.again_s + again_s
        dispatch = _FORWARD * process.overhead.block
        dispatch_back = (1 - _FORWARD) * process.overhead.block
        if not self.measured.synchronous:  # Asynchronous launch hides dispatch behind kernels.
            dispatch = max(0.0, dispatch - block.forward_s)
            dispatch_back = max(0.0, dispatch_back - block.backward_s - again)
        added = _FORWARD * (self.tp.block + self.dp.block)
        head_forward, head_backward = head_times(run, kernels)
        embedding_forward, embedding_backward = embedding_times(run, kernels)
        loss = process.logit_s * run.tokens * run.rank_vocab / 2
        end = (process.overhead.microbatch + self.tp.microbatch + self.dp.microbatch) / 2
        end_forward = _FORWARD * end
        end_backward = (1 - _FORWARD) * end
        return MicrobatchTimes(
            block=TimeParts(
                compute=block.forward_s + block.backward_s,
                recompute=again,
                tp=(passes(run) - 1) * tp_forward + tp_backward + self.tp.block,
                cp=3 * cp,
                ep=passes(run) * ep,
                dp=self.dp.block,
                overhead=dispatch + dispatch_back,
            ),
            forward_s=block.forward_s + dispatch + tp_forward + cp + ep + added,
            weight_s=block.weight_s,
            head_s=(head_forward + loss + end_forward, head_backward + loss + end_backward),
            embedding_s=(embedding_forward + end_forward, embedding_backward + end_backward),
        )

    def _tp_s(self) -> tuple[float, float]:
        """Returns the seconds of a block's tp collectives, forward and backward.

        Measured times exclude that of the smallest message, which `self.tp` includes. There are two
        all-reduces per direction. Sequence parallelism replaces each by an all-gather and a
        reduce-scatter, and adds two all-gathers to the backward pass.
        """
        run = self.run
        layout = run.layout
        measured = self.measured
        bytes_ = hidden_bytes(run)
        is_measured = self.ranks is not None and run.group(layout.tp, 1).nodes == 1
        if not (is_measured and layout.sequence_parallel):
            one = tp_exchange_s(run)
            if is_measured:
                one = measured.collective_s("all_reduce", layout.tp, bytes_)
            return 2 * one, 2 * one
        gather = measured.collective_s("all_gather", layout.tp, bytes_)
        scatter = measured.collective_s("reduce_scatter", layout.tp, bytes_)
        return 2 * (gather + scatter), 4 * gather + 2 * scatter

    def action_s(self) -> float:
        """Returns the seconds of a pipeline action's message and, if measured, its scheduling."""
        run = self.run
        layout = run.layout
        if layout.pp == 1:
            return 0.0
        bytes_ = run.outside * run.item_bytes
        if self.ranks is None or layout.world_size > run.cluster.gpus_per_node:
            return send_s(run, bytes_)
        return self.ranks.action_s + beyond_smallest_s(self.ranks.transfer, bytes_)

    def once_s(self, part: StageSlice) -> tuple[float, float, float]:
        """Returns the seconds per step of data parallelism, the optimizer and other overhead."""
        base = self.process.overhead
        layout = self.run.layout
        layers = part.layers
        parameters = self.run.stage_parameters(part) + self.run.stage_experts(part)
        rounds = max(self.run.sharding_rounds)
        dp = self.dp
        data = rounds * (dp.step + layers * dp.layer + parameters * dp.parameter)
        shard = self.run.shard_numel(part, layout.optimizer_shards)
        optimizer = base.parameter * shard + layers * base.layer
        overhead = base.step + self.tp.step + layers * self.tp.layer
        slowdown = self.slowdown
        return slowdown * data, slowdown * optimizer, slowdown * overhead
