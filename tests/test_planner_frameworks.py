"""The stacks of other frameworks: what each does otherwise, and how a published case becomes a run
of one of them."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.planner.hardware.framework import EAGER, FUSED, SOFTMAX, in_precision
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.published.cases import PublishedCase, read_case
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.arguments import HARDWARE
from tests.planned_runs import planned_run

OURS: dict[str, Any] = {"id": "ours", "model": {"layers": 16, "hidden": 4096}}


def case(**sections: Any) -> PublishedCase:
    return read_case("ours", {**OURS, "hardware": {"gpus": 8}, **sections}, [HARDWARE])


def sharded(**layout: Any) -> PlannedRun:
    dp = layout["dp_shard"]
    shards = {"parameter_shards": dp, "gradient_shards": dp, "optimizer_shards": dp}
    return planned_run(EAGER, **shards, **layout)


def test_fsdp_gathers_once_a_step_inside_a_pipeline_and_keeps_what_it_gathered() -> None:
    """The traffic of a step does not grow with its microbatches; the rank's parameters and
    gradients are whole."""
    few, many = (sharded(pp=4, dp_shard=8, microbatches=m) for m in (8, 32))
    assert step_cost(few).parts.dp == pytest.approx(step_cost(many).parts.dp)
    alone = [step_cost(sharded(dp_shard=8, microbatches=m)).parts.dp for m in (8, 32)]
    assert alone[1] > 3 * alone[0]
    blocks = 8 * few.stage_parameters(StageSlice(layers=1))
    first = memory_by_rank(few)[1]
    assert first.buffers == pytest.approx(6 * blocks, rel=0.05)  # 2 bytes gathered, 4 of gradients


def test_wide_sharding_costs_more_than_hybrid_and_grows_without_a_cliff() -> None:
    """Bandwidth alone would leave the ratio of full to hybrid sharding as it is on two nodes."""
    ratios = []
    for gpus in (16, 32, 64, 128, 256, 512, 1024):
        eight = {"parameter_shards": 8, "gradient_shards": 8, "optimizer_shards": 8}
        full = {name: gpus for name in eight}
        steps = []
        for shards in (full, eight):
            layout = {"dp_shard": gpus, "microbatch_size": 2, **shards}
            steps.append(step_cost(planned_run(EAGER, "h100-80gb", **layout)).step_time_s)
        ratios.append(steps[0] / steps[1])
    assert 0.95 < ratios[0] < 1.02
    assert ratios[-1] > 1.1
    for near, far in zip(ratios, ratios[1:], strict=False):
        assert 0.97 < far / near < 1.7


def test_a_fused_stack_is_faster_and_old_attention_keeps_its_scores() -> None:
    eager, fused, old = (planned_run(stack, dp_shard=8) for stack in (EAGER, FUSED, SOFTMAX))
    assert step_cost(fused).parts.compute < 0.9 * step_cost(eager).parts.compute
    scores = 5 * old.shape.heads * old.seq_len**2 * old.shape.layers
    more = memory_by_rank(old)[0].activations - memory_by_rank(eager)[0].activations
    assert more == pytest.approx(scores, rel=0.1)


@pytest.mark.parametrize("precision, bytes_", [("bf16", 18), ("bf16_pure", 8), ("fp32", 16)])
def test_a_parameter_takes_the_bytes_of_its_precision(precision: str, bytes_: float) -> None:
    framework = in_precision(EAGER, precision)
    memory = memory_by_rank(planned_run(framework))[0]
    parameters = memory.parameters / framework.weight_bytes
    held = memory.parameters + memory.gradients + memory.optimizer
    assert held / parameters == pytest.approx(bytes_)


@pytest.mark.parametrize(
    "framework, gpu, compiled, stack",
    [
        ("Megatron-Core core_v0.6.0", "A800-80GB-SXM", False, "fused"),
        ("Megatron-LM", "A100-80GB-SXM", False, "softmax"),
        ("NeMo 24.07 / Megatron-Core", "H100-80GB-SXM", False, "fused"),
        ("torchtitan", "H100-80GB-SXM", True, "compiled"),
        ("MaxText", "H100-80GB-SXM", False, "jax"),
        ("DeepSpeed 0.14.2 (Hugging Face)", "A100-80GB-SXM", False, "eager"),
    ],
)
def test_a_case_that_states_no_stack_gets_that_of_its_framework(
    framework: str, gpu: str, compiled: bool, stack: str
) -> None:
    hardware = {"gpus": 8, "gpu": gpu}
    found = case(framework=framework, hardware=hardware, train={"compile": compiled})
    assert found.stack == stack
    assert case(framework=framework, stack="eager").stack == "eager"


def test_a_case_states_its_head_dim_attention_and_stages() -> None:
    model = {"layers": 16, "hidden": 4096, "heads": 32, "head_dim": 64, "ffn_kind": "Squared ReLU"}
    parallel = {"pp": 4, "stage_boundaries": [3, 8, 13], "schedule": "none"}
    train = {"attention": "softmax", "dropout": True, "precision": "fp16 O2"}
    run = case(model=model, parallel=parallel, train=train).run
    assert run.shape.query_hidden == 32 * 64
    assert run.shape.feed_forward == "relu2"
    assert [stage.layers for stage in run.stages] == [3, 5, 5, 3]
    assert run.layout.schedule == "1f1b"
    assert (run.framework.attention, run.framework.dropout, run.precision) == (
        "softmax",
        True,
        "fp16",
    )


def test_a_run_that_does_not_say_what_it_recomputes_recomputes_as_little_as_fits() -> None:
    def recomputed(sequences: int, **train: str) -> tuple[str, int]:
        parallel = {"zero_stage": 3}
        layout = case(train={"micro_batch": sequences, **train}, parallel=parallel).run.layout
        return layout.recompute, layout.recompute_every

    found = [recomputed(sequences) for sequences in range(4, 120)]
    ways = [("none", 2), ("every_n", 2), ("full", 2)]
    assert [*dict.fromkeys(found)] == ways
    assert found[-1] == ("full", 2)
    assert recomputed(40, activation_recompute="none")[0] == "none"
