"""What the programs of published runs do otherwise, each as its own code has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel3d.models import shape_cards
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.program import TrainingProgram
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.named import named_shape
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.published.case_run import run_of_case
from parallel3d.planner.published.cases import read_cases
from parallel3d.planner.published.fields import Fields
from parallel3d.planner.published.programs import program_of, programs
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.arguments import HARDWARE

FOLDERS = [HARDWARE]
INTERNEVO, MEGATRON_CORE, NANOTRON, TORCHTITAN = (
    programs()[name] for name in ("internevo", "megatron-core", "nanotron", "torchtitan")
)


def run(program: TrainingProgram, **layout: Any) -> PlannedRun:
    cluster = load_cluster("a100-80gb", FOLDERS)
    shape = named_shape("llama2-7b", shape_cards())
    return PlannedRun(shape=shape, cluster=cluster, layout=RunLayout(**layout), program=program, seq_len=2048)


def sharded(program: TrainingProgram, **layout: Any) -> PlannedRun:
    dp = layout["dp_shard"]
    return run(program, parameter_shards=dp, gradient_shards=dp, optimizer_shards=dp, **layout)


def test_fsdp_gathers_once_a_step_inside_a_pipeline_and_keeps_what_it_gathered() -> None:
    """The traffic of a step does not grow with its microbatches; the rank's parameters and gradients are whole."""
    few, many = (sharded(TORCHTITAN, pp=4, dp_shard=8, microbatches=m) for m in (8, 32))
    assert step_cost(few).parts.dp == pytest.approx(step_cost(many).parts.dp)
    alone = [step_cost(sharded(TORCHTITAN, dp_shard=8, microbatches=m)).parts.dp for m in (8, 32)]
    assert alone[1] > 3 * alone[0]
    blocks = 8 * few.block_parameters
    first = memory_by_rank(few)[1]
    assert first.buffers == pytest.approx(6 * blocks, rel=0.05)  # 2 bytes gathered, 4 of gradients


def test_zero1_that_cuts_every_tensor_pays_for_each_slice() -> None:
    """nanotron makes a view and a copy for each tensor and rank, gathered and reduced."""
    few, many = (run(NANOTRON, dp_shard=dp, microbatches=2, optimizer_shards=dp) for dp in (8, 512))
    per_slice = 4 * few.cluster.device.launch_s
    for work in (few, many):
        whole = replace(work, program=replace(NANOTRON, cut_tensors=0))
        more = step_cost(work).step_time_s - step_cost(whole).step_time_s
        assert more == pytest.approx(work.layout.dp * 6 * 32 * per_slice)


def test_an_optimizer_that_is_not_fused_needs_room_for_its_temporaries() -> None:
    """InternEvo's ZeRO-1 holds 16 bytes a parameter at rest, and 14 more at the step."""
    work = run(INTERNEVO, tp=4, recompute="full")
    [rank] = memory_by_rank(work)
    parameters = rank.parameters / 2
    assert (rank.gradients + rank.optimizer) / parameters == pytest.approx(14)
    assert rank.activations + rank.logits + rank.temporary == pytest.approx(14 * parameters)


def test_internevo_leaves_the_rest_of_the_layers_to_the_last_stages() -> None:
    assert [part.layers for part in run(INTERNEVO, pp=6, microbatches=6).ranks] == [5, 5, 5, 5, 6, 6]
    assert [part.layers for part in run(MEGATRON_CORE, pp=6, microbatches=6).ranks] == [5, 5, 6, 6, 5, 5]


def test_internevos_fsdp_makes_nothing_flat() -> None:
    tree = {"framework": "InternEvo", "model": {"layers": 16, "hidden": 4096}, "hardware": {"gpus": 8}}
    programs = [run_of_case(Fields({**tree, "parallel": {"fsdp": on}}), FOLDERS, {}).program for on in (True, False)]
    assert [program.step_bytes + program.step_cached_bytes for program in programs] == [12, 18]


def test_what_the_allocator_keeps_for_nothing_gives_way_where_memory_is_short() -> None:
    """InternEvo has float32 gradients for the norm, tensor by tensor, before one flat one: 4 bytes a parameter."""
    tight, roomy = (run(INTERNEVO, tp=tp, recompute="full") for tp in (2, 4))
    for work, share in ((tight, 0.0), (roomy, 1.0)):
        [rank] = memory_by_rank(work)
        [without] = memory_by_rank(replace(work, program=replace(INTERNEVO, step_cached_bytes=0.0)))
        kept = rank.fragmentation - without.fragmentation
        assert kept == pytest.approx(share * 4 * rank.parameters / 2, rel=1e-6)
        assert rank.allocated == pytest.approx(without.allocated)


def test_before_the_first_step_there_are_no_moments() -> None:
    rank = RankMemory(rank=0, parameters=2, gradients=4, optimizer=12, activations=30, logits=0, buffers=0, temporary=0,
                      fragmentation=5, context=1, made_after_backward=8)  # fmt: skip
    assert (rank.allocated, rank.allocated_in_first_step) == (48, 40)
    assert replace(rank, activations=1).allocated_in_first_step == 18  # the states themselves, once they are made


def test_dropout_and_the_attention_are_what_the_notes_of_a_run_say() -> None:
    """Megatron's default of 0.1 keeps a mask and an output for each score where attention is not one kernel."""
    tree: dict[str, Any] = {
        "framework": "Megatron-LM", "hardware": {"gpu": "H100-80GB", "gpus": 1},
        "model": {"layers": 12, "hidden": 512, "heads": 8, "seq_len": 1024}, "train": {"micro_batch": 4},
    }  # fmt: skip

    def activations(notes: str) -> float:
        [rank] = memory_by_rank(run_of_case(Fields({**tree, "notes": notes}), FOLDERS, {}))
        return rank.activations

    flash, scores = activations("dropout 0.0"), activations("dropout 0.0; attention backend unfused")
    dropped = activations("dropout 0.1; attention backend unfused")
    tokens, each = 4 * 1024, 12 * 8 * 4 * 1024 * 1024
    assert scores - flash == pytest.approx(2 * each, rel=0.02)  # the softmax's output, 2 bytes a score
    assert dropped - scores == pytest.approx(3 * each + (12 * 2 + 1) * tokens * 512)  # masks of residuals too
    assert activations("transformer-impl local") == scores


def test_logits_of_megatron_core_are_there_in_16_bits_and_once_in_32() -> None:
    work = run(MEGATRON_CORE, tp=2)
    [rank] = memory_by_rank(work)
    assert rank.logits == 6 * 2048 * work.rank_vocab


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("benchmarks/llama3_h100_202412_torchtitan.md", "torchtitan-compiled"),
        ("x_2025-06.md", "torchtitan-compiled-2025"),
    ],
)
def test_a_program_is_that_of_its_runs_year(source: str, name: str) -> None:
    tree = {"framework": "torchtitan", "source": source, "train": {"compile": True},
            "model": {"layers": 12, "hidden": 512}, "hardware": {"gpus": 8}}  # fmt: skip
    assert run_of_case(Fields(tree), FOLDERS, {}).program.name == name
    assert program_of("torchtitan", compiled=False, early=False, year=2025, fsdp=True).name == "torchtitan"


def test_an_unknown_program_is_taken_for_the_kind_of_its_layout() -> None:
    """FSDP alone is taken for PyTorch's own operators, anything with a pipeline for Megatron-Core."""
    tree = {"framework": "ours", "model": {"layers": 16, "hidden": 4096}, "hardware": {"gpus": 64}}

    def name(**parallel: object) -> str:
        return run_of_case(Fields({**tree, "parallel": parallel}), FOLDERS, {}).program.name

    assert name(fsdp=True) == name(zero_stage=3) == name(zero_stage=3, tp=8) == "unknown-fsdp"
    assert name() == name(zero_stage=1) == name(fsdp=True, pp=4) == "unknown"


def test_a_figure_of_the_first_iteration_is_compared_without_moments() -> None:
    """BigScience's log of its pipeline without DeepSpeed: what it holds at rest, to a thousandth."""
    cases = {case.id: case for case in read_cases(HARDWARE.parent / "cases" / "published.json", FOLDERS).cases}
    case = cases["bigscience-v100-meg_ds_3d_gpt2_perf_n16-ds-off"]
    assert max(r.allocated_in_first_step for r in memory_by_rank(case.run)) / 2**30 == pytest.approx(17.095, rel=1e-3)


def test_collectives_that_a_run_cuts_into_pieces_hide_as_nemos_do() -> None:
    tree: dict[str, Any] = {
        "framework": "torchtitan", "model": {"layers": 16, "hidden": 4096}, "parallel": {"tp": 8},
        "hardware": {"gpu": "H100-80GB", "gpus": 8},
    }  # fmt: skip

    def tp_s(notes: str) -> float:
        return step_cost(run_of_case(Fields({**tree, "notes": notes}), FOLDERS, {})).parts.tp

    assert tp_s("full AC. AsyncTP on.") == pytest.approx(0.4 * tp_s("full AC."))
