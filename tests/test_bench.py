"""The benchmarks' report and their referees: no timing is judged here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.errors import Parallel3dError, RankError
from parallel3d.tools.bench import converted, data_loading
from parallel3d.tools.bench.harness import check_agreement
from parallel3d.tools.bench.plain_torch.llama import PlainLlama
from parallel3d.tools.bench.report import (
    Options,
    Round,
    Timing,
    as_json,
    rows_against_one_process,
    rows_against_peer,
)
from parallel3d.tools.bench.step import (
    StepSize,
    measure,
)

TINY = ModelConfig(
    layers=3,
    hidden=16,
    heads=4,
    kv_heads=2,
    ffn_hidden=24,
    vocab=32,
)
TINY_SIZE = StepSize(
    name="tiny",
    model=TINY,
    seq_len=6,
    rounds=1,
    steps=1,
)


def rounds_of(*cpu_pairs: tuple[float, float]) -> list[Round]:
    return [
        Round(ours=Timing(wall_s=0.5, cpu_s=ours), peer=Timing(wall_s=1.0, cpu_s=peer))
        for ours, peer in cpu_pairs
    ]


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(p.shape, generator=generator)
        for name, p in PlainLlama(config).named_parameters()
    }


def test_batches_are_loaded_beside_those_of_torchs_own_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The benchmark compares the first batch of both, in which windows cross the borders of shards
    this small."""
    monkeypatch.setattr(data_loading, "SHARD_TOKENS", 3 * data_loading.SEQ_LEN)
    threads = torch.get_num_threads()
    peer, bar = data_loading.bench_data_loading(Options(rounds=1, steps=1, case="torch"))
    torch.set_num_threads(threads)
    assert peer.case == "torch DataLoader"
    assert bar.case == "50 million tokens/s"
    assert bar.peer == 0.02
    assert bar.bar == 1.0
    assert peer.ours == bar.ours > 0


def test_ratio_is_the_median_of_the_rounds_ratios() -> None:
    cpu, wall = rows_against_peer("a", rounds_of((1.0, 2.0), (9.0, 10.0), (2.0, 10.0)), 0.4)
    assert cpu.ours == 2.0
    assert cpu.peer == 10.0
    assert cpu.ratio == 0.5
    assert cpu.bar == 0.4
    assert wall.ours == 0.5
    assert wall.peer == 1.0
    assert wall.ratio == 0.5
    assert wall.bar is None


def test_json_has_exactly_the_agreed_fields() -> None:
    rows = rows_against_peer("a", rounds_of((1.0, 2.0)), 0.4)
    rows += rows_against_one_process("a", rounds_of((1.0, 2.0)), rounds_of((3.0, 4.0)))
    report = json.loads(as_json(rows))
    assert list(report) == ["results"]
    assert report["results"][0] == {
        "case": "a",
        "ours": 1.0,
        "peer": 2.0,
        "unit": "cpu_s_per_step",
        "ratio": 0.5,
        "bar": 0.4,
    }
    assert report["results"][2]["case"] == "a vs one process"
    assert report["results"][2]["ratio"] == 0.25
    assert report["results"][2]["bar"] is None


@pytest.mark.parametrize("wrong", [1.001, math.nan])
def test_contestants_that_disagree_are_not_timed(wrong: float) -> None:
    check_agreement([("loss", 1.00001, 1.0)])
    with pytest.raises(RankError, match="loss: .*not the same training"):
        check_agreement([("loss", wrong, 1.0)])


def measured() -> list[Round]:
    parallel = ParallelConfig(tp=2, sequence_parallel=True)
    with pytest.raises(Parallel3dError, match="no recompute"):
        measure(TINY_SIZE, replace(parallel, recompute="full"), 1, 1)
    return measure(TINY_SIZE, parallel, 1, 1)


def test_ours_and_torch_agree_and_are_timed_on_two_ranks(world: Callable) -> None:
    (round_,) = world(2).run(measured)[0]
    assert min(round_.ours.wall_s, round_.ours.cpu_s, round_.peer.wall_s, round_.peer.cpu_s) > 0


def test_a_converted_block_and_its_peers_agree(world: Callable) -> None:
    pytest.importorskip(
        "transformers", reason="its blocks are converted: pip install 'parallel3d[dev]'"
    )
    size = replace(TINY_SIZE, model=replace(TINY, layers=1), seq_len=8)
    for split, alone in world(2).run(converted.measure_beside_layers, size, 1, 1):
        assert min(each.ours.cpu_s for each in (*split, *alone)) > 0
    for rounds in world(2).run(converted.measure_beside_dtensor, size, 1, 1):
        assert min(each.ours.cpu_s for each in rounds) > 0
