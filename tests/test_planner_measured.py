"""A calibrated host: what was measured is found again, and ranks that share cores share their
time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import yaml

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.config.schema import adapter
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.calibration import OneProcess, Overhead
from parallel3d.planner.hardware.cluster import Cluster, cluster_from_tree
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.search.request import PlanRequest, Strategy
from parallel3d.planner.time.block import block_times
from parallel3d.planner.time.roofline import Kernels
from parallel3d.tools.calibrate.fit import ANY, Times, larger_job, overheads, process_tree
from parallel3d.tools.calibrate.hardware_file import hardware_text
from parallel3d.tools.calibrate.probes import (
    LAYERS,
    MICROBATCHES,
    ON_CPU,
    TINY,
    LargerRuns,
    Probe,
    probes,
)

MODEL = ModelConfig(
    layers=8,
    hidden=192,
    heads=8,
    kv_heads=4,
    ffn_hidden=512,
    vocab=1024,
)
LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(recompute="full"),
    ParallelConfig(
        pp=2,
        virtual_stages=2,
        schedule="interleaved_1f1b",
        dp_replicate=2,
    ),
    ParallelConfig(dp_shard=2, tp=2, sequence_parallel=True),
    ParallelConfig(tp=4),
)
TRUE = Overhead(
    block=1e-3,
    microbatch=4e-4,
    layer=2e-4,
    step=3e-3,
    parameter=2e-9,
)
RATE = 5e10  # operations per second of every product and of attention
BYTE_S = 4e-10  # seconds per byte of every other operator
GRADIENT_S = 1e-9  # seconds per weight and microbatch


def larger_blocks(larger: LargerRuns = ON_CPU) -> dict[tuple[int, int], float]:
    """Returns the seconds of the larger model's block by sequence and microbatch, by the planner's
    own model of this host."""
    rates = {"byte_s": BYTE_S, "gradient_s": GRADIENT_S, "logit_s": 0.0}
    process = adapter(OneProcess).validate_python(
        {**kernels(larger), **rates, "overhead": vars(TRUE), "recompute": {}}
    )
    found = {}
    for size in larger.sizes:
        run = larger_job(size, larger)
        block = block_times(
            run,
            Kernels(
                device=ANY.device,
                precision=larger.precision,
                process=process,
            ),
        )
        found[size] = block.forward_s + block.backward_s
    return found


def kernels(larger: LargerRuns = ON_CPU) -> dict[str, Any]:
    sides = (32, 512)
    rate = RATE if larger.synchronous else 1000 * RATE
    rows = [[s, d, rate] for s in sides for d in sides]
    return {
        "matmul": {p: rows for p in ("fp32", "bf16")},
        "attention": {p: {"forward": rows, "backward": rows} for p in ("fp32", "bf16")},
        "memory": [[2**14, 1e-6], [2**24, 1e-3]],
    }


def times_of(
    axis: str, overhead: Overhead, *, parameters: float, larger: LargerRuns = ON_CPU
) -> dict[Probe, float]:
    """What probes would take whose steps were exactly linear. A device that is not synchronous
    takes the longer of a block's dispatch and its kernels, and a larger model's microbatch adds
    nothing to them."""
    blocks = larger_blocks(larger)

    def step(layers: int, microbatches: int, block_s: float, count: float) -> float:
        each = overhead.microbatch + layers * (overhead.block + block_s)
        if block_s and not larger.synchronous:
            assert block_s > overhead.block
            each = layers * block_s
        return (
            overhead.step
            + layers * overhead.layer
            + microbatches * each
            + count * overhead.parameter
        )

    times = {
        Probe(axis, TINY, layers, m): step(layers, m, 0.0, 0.0)
        for layers, m in product(LAYERS, MICROBATCHES)
    }
    for layers, m, size in product(LAYERS, MICROBATCHES, larger.sizes):
        times[Probe(axis, larger.model, layers, m, size)] = step(
            layers,
            m,
            blocks[size],
            parameters,
        )
    return times


def times_alone(larger: LargerRuns, parameters: float, **more_s: float) -> Times:
    """The probes of one process, whose recompute adds so much to a block."""
    alone = times_of("alone", TRUE, parameters=parameters, larger=larger)
    deep = LAYERS[-1]
    for kind, m in product(("selective", "full"), MICROBATCHES):
        added = m * deep * more_s.get(kind, 0.0)
        alone[Probe(kind, TINY, deep, m)] = alone[Probe("alone", TINY, deep, m)] + added
    return alone


TIMES = [[2**12, 1e-5], [2**24, 1e-2]]  # seconds of messages of these bytes


def worlds() -> dict[int, Any]:
    """The measurements of an ideal host: one rate for everything, worlds of 1 and 2."""
    common = {
        "device": "CPU",
        "torch": "2",
        "cores": 2,
        "memory_bytes": 2**34,
        "processors": 1,
    }
    alone = times_alone(ON_CPU, ON_CPU.parameters, selective=5e-4, full=1e-3)
    one = {**common, "processes": {1: process_tree(kernels(), alone)}}
    added = replace(TRUE, block=2e-3, step=5e-3)
    two_times: dict[Probe, float] = {}
    for axis in {probe.axis for probe in probes(2)} - {"pp"}:
        two_times |= times_of(axis, added, parameters=3.3e6)
    for m in MICROBATCHES:
        two_times[Probe("pp", TINY, 2, 2 * m)] = (
            2 * m * (TRUE.block + TRUE.microbatch / 2 + 2 * 1e-4)
        )
    two = {
        **common,
        "contention": (1.0, 1.0),
        **overheads(two_times, 2),
        "collectives": dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), TIMES),
        "transfers": TIMES,
    }
    return {1: one, 2: two}


@pytest.fixture
def host() -> Cluster:
    return cluster_from_tree(yaml.safe_load(hardware_text(worlds(), date="2026-01-02")), "host")


def test_a_written_file_reads_as_what_was_measured(host: Cluster) -> None:
    measured = host.measured
    assert measured is not None
    assert measured.cores == 2
    assert measured.synchronous
    assert measured.processes[1].overhead.block == pytest.approx(TRUE.block, rel=1e-3)
    assert measured.processes[1].byte_s == pytest.approx(BYTE_S, rel=1e-3)
    assert measured.processes[1].gradient_s == pytest.approx(GRADIENT_S, rel=1e-3)
    assert measured.processes[1].recompute["full"] == pytest.approx(1e-3, rel=1e-3)
    # beyond a process alone
    assert measured.ranks[2].axes["tp"].block == pytest.approx(1e-3, rel=1e-3)
    assert measured.ranks[2].axes["FULL_SHARD"].step == pytest.approx(2e-3, rel=1e-3)
    assert measured.ranks[2].action_s == pytest.approx(1e-4, rel=1e-3)


def strategy(cluster: Cluster, parallel: ParallelConfig) -> Strategy:
    request = PlanRequest(
        shape=from_config(MODEL),
        cluster=cluster,
        gpus=parallel.world_size,
        seq_len=96,
        global_batch_size=16,
        precision="fp32",
    )
    return Strategy(request, parallel)


def predicted_s(cluster: Cluster, parallel: ParallelConfig) -> float:
    return strategy(cluster, parallel).cost.step_time_s


def test_parts_of_a_calibrated_step_are_not_negative_and_add_up(host: Cluster) -> None:
    for parallel in LAYOUTS:
        cost = strategy(host, parallel).cost
        for value in vars(cost.parts).values():
            assert value >= 0, parallel
        assert cost.parts.total == pytest.approx(cost.step_time_s)


def test_a_file_whose_measurements_are_incomplete_is_refused() -> None:
    tree = yaml.safe_load(hardware_text(worlds(), date="2026-01-02"))
    del tree["measured"]["processes"][1]["byte_s"]
    with pytest.raises(
        ConfigError, match="measured: must be written by parallel3d-plan calibrate.*byte_s"
    ):
        cluster_from_tree(tree, "mine")
