"""What the frameworks of published runs do otherwise, each as its own code has it."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.published.case_run import run_of_case
from parallel3d.planner.published.fields import Fields
from parallel3d.planner.published.frameworks import (
    RunTraits,
    framework_of,
    frameworks,
)
from parallel3d.planner.published.knowledge import Knowledge
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.arguments import HARDWARE
from tests.planned_runs import planned_run

FOLDERS = [HARDWARE]
OURS: dict[str, Any] = {"framework": "ours", "model": {"layers": 16, "hidden": 4096}}
INTERNEVO, MEGATRON_CORE, NANOTRON, TORCHTITAN = (
    frameworks()[name] for name in ("internevo", "megatron-core", "nanotron", "torchtitan")
)


def sharded(**layout: Any) -> PlannedRun:
    dp = layout["dp_shard"]
    return planned_run(
        TORCHTITAN,
        parameter_shards=dp,
        gradient_shards=dp,
        optimizer_shards=dp,
        **layout,
    )


def test_fsdp_gathers_once_a_step_inside_a_pipeline_and_keeps_what_it_gathered() -> None:
    """The traffic of a step does not grow with its microbatches; the rank's parameters and
    gradients are whole."""
    few, many = (sharded(pp=4, dp_shard=8, microbatches=m) for m in (8, 32))
    assert step_cost(few).parts.dp == pytest.approx(step_cost(many).parts.dp)
    alone = [step_cost(sharded(dp_shard=8, microbatches=m)).parts.dp for m in (8, 32)]
    assert alone[1] > 3 * alone[0]
    blocks = 8 * few.block_parameters
    first = memory_by_rank(few)[1]
    assert first.buffers == pytest.approx(6 * blocks, rel=0.05)  # 2 bytes gathered, 4 of gradients


@pytest.mark.parametrize(
    "framework, year, name",
    [
        ("NeMo 24.07 / Megatron-Core", 2024, "nemo"),
        ("NeMo Megatron", 2022, "nemo-2022"),
        ("Megatron-LM", 2021, "megatron-2021"),
        ("Megatron-LM (Megatron-Core)", 2024, "megatron-core"),
        ("Megatron-DeepSpeed", 2024, "megatron-deepspeed-2023"),
        ("zero-bubble-pipeline-parallelism (Megatron-LM fork)", 2023, "zero-bubble"),
        ("DeepSpeed ZeRO-3", 2021, "deepspeed-zero3"),
        ("DeepSpeed ZeRO-3", 2024, "unknown-2024"),
        ("", 2024, "unknown-2024"),
        ("", 2021, "unknown-2022"),
    ],
)
def test_a_program_is_found_by_its_whole_name_and_its_year(
    framework: str, year: int, name: str
) -> None:
    assert framework_of(framework, RunTraits(year=year)).name == name


def test_what_was_set_on_a_source_is_taken_back_where_it_is_left_out() -> None:
    """The figures of a framework's entry go, and what its code does where a run does not say
    stays."""
    traits = RunTraits(year=2025)
    known, left_out = (
        framework_of("NeMo", traits, left_out=sources) for sources in ((), ("dgxc_benchmarking",))
    )
    assert known.tp_hidden == 0.6
    assert left_out.name == "unknown-fused"
    assert left_out.tp_hidden == 0
    assert left_out.default_sequence_parallel
    assert left_out.default_schedule == "interleaved_1f1b"
    assert framework_of("NeMo", traits, left_out=("hagemann",)) == known
    # by its parent's runs
    assert framework_of("fms-fsdp", traits, left_out=("llm_foundry",)).name == "unknown-2024"


def test_devices_lose_what_was_set_on_their_runs() -> None:
    h100 = Knowledge(FOLDERS).cluster("H100-80GB-SXM").device
    without = Knowledge(FOLDERS, frozenset({"dgxc_benchmarking"})).cluster("H100-80GB-SXM").device
    assert h100.matmul_efficiency == 0.665
    assert without.matmul_efficiency == 0.72
    assert Knowledge(FOLDERS, frozenset({"hagemann"})).cluster("H100-80GB-SXM").device == h100


@pytest.mark.parametrize(
    "gpu, file, gib",
    [
        ("A100-40GB-SXM", "a100-40gb", 39.2),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 79.2),
        ("H100-96GB-SXM", "h100-96gb-hbm2e", 95.0),
        ("H100 PCIe", "h100-pcie", 79.1),
    ],
)
def test_a_device_is_found_by_whole_words(gpu: str, file: str, gib: float) -> None:
    cluster = Knowledge(FOLDERS).cluster(gpu)
    assert cluster.device_file == file
    assert cluster.device.memory_bytes / 2**30 == pytest.approx(gib, rel=0.02)


def test_what_a_run_says_of_its_kernels_holds_for_every_framework() -> None:
    def framework(year: int, **options: bool) -> tuple[str, bool]:
        fields = Fields({**OURS, "hardware": {"gpus": 1}, "year": year, "options": options})
        found = run_of_case(fields, Knowledge(FOLDERS, framework="unknown")).framework
        return found.attention, found.dropout

    assert framework(2021) == ("softmax", True)
    assert framework(2024) == ("flash", False)
    assert framework(2024, softmax_attention=True, dropout=True) == ("softmax", True)
    assert framework(2021, softmax_attention=False) == ("flash", True)


def test_a_run_that_does_not_say_what_it_recomputes_recomputes_as_little_as_fits() -> None:
    def recomputed(sequences: int, **train: str) -> tuple[str, int]:
        fields = Fields(
            {
                **OURS,
                "hardware": {"gpus": 8},
                "train": {"micro_batch": sequences, **train},
                "parallel": {"zero_stage": 3},
            }
        )
        layout = run_of_case(fields, Knowledge(FOLDERS)).layout
        filled = "train.activation_recompute (every_n, because less does not fit)" in fields.filled
        assert filled == (layout.recompute == "every_n")
        return layout.recompute, layout.recompute_every

    found = [recomputed(sequences) for sequences in range(4, 90)]
    ways = [("none", 2), ("every_n", 4), ("every_n", 2), ("full", 2)]
    # where even all is not enough
    assert [*dict.fromkeys(found)] == ways
    assert found[-1] == ("none", 2)
    assert recomputed(40, activation_recompute="none")[0] == "none"
