"""`parallel3d-plan verify`: one rank of a large run trained dry, and the memory model beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from parallel3d.config.recipe import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.tools.plan.command import main
from parallel3d.tools.verify.command import Verified, verify
from parallel3d.tools.verify.dry_run import Chunks

LLAMA = ModelConfig(layers=4, hidden=2048, heads=16, kv_heads=8, ffn_hidden=5632, vocab=32003)
GPT = ModelConfig(architecture="gpt", layers=3, hidden=2048, heads=16, ffn_hidden=8192, vocab=50257, max_positions=2048)
LARGE = ParallelConfig(pp=2, dp_replicate=4, dp_shard=256, tp=8, sequence_parallel=True)  # 16,384 ranks
MIDDLE = ParallelConfig(pp=3, dp_shard=8)
LOOPED = ParallelConfig(pp=2, dp_shard=8, virtual_stages=2)
ZERO_1 = ParallelConfig(pp=2, dp_shard=64, tp=2, sharding="SHARD_OPTIMIZER", sequence_parallel=True)
LAYOUTS = {
    "sharded, the first of a pipeline": (LLAMA, LARGE, "bf16", 4, 0),
    "sharded, the last, recomputed": (LLAMA, replace(LARGE, recompute="full", microbatch_size=2), "bf16", 4, 1),
    "optimizer sharded": (GPT, replace(LARGE, sharding="SHARD_OPTIMIZER", recompute="selective"), "bf16", 4, 0),
    "zero bubble": (LLAMA, replace(LARGE, schedule="zb_h1", sequence_parallel=False), "bf16", 3, 0),
    "one pipeline rank in float32": (GPT, ParallelConfig(dp_shard=8, tp=2), "fp32", 1, 0),
    "gathered for each microbatch, in the middle": (LLAMA, replace(MIDDLE, gather="microbatch"), "bf16", 4, 1),
    "gathered and reduced for each microbatch": (
        LLAMA,
        ParallelConfig(dp_shard=8, tp=2, gather="microbatch", reduce="microbatch"),
        "bf16",
        3,
        0,
    ),
    "the second halves put off, their blocks whole": (LLAMA, replace(MIDDLE, schedule="zb_h1"), "bf16", 6, 2),
    "one stage after the other": (LLAMA, replace(LOOPED, schedule="looped_bfs"), "bf16", 4, 0),
    "on a V": (LLAMA, replace(LOOPED, schedule="dualpipe_v"), "bf16", 4, 1),
    "gradients of later stages on their way": (
        replace(GPT, layers=12, hidden=1536, ffn_hidden=6144),
        replace(ZERO_1, virtual_stages=3, schedule="interleaved_zb", recompute="full", microbatch_size=2),
        "bf16",
        2,
        0,
    ),
    "second halves on the whole sequence": (
        replace(LLAMA, vocab=128256),
        ParallelConfig(pp=2, dp_shard=32, tp=8, schedule="zb_h1", microbatch_size=2, sequence_parallel=True),
        "bf16",
        2,
        0,
    ),
    "a second half of the gradient that was received": (
        replace(GPT, layers=2, hidden=1024, heads=16, ffn_hidden=4096),
        ParallelConfig(pp=2, dp_replicate=4, tp=8, schedule="zb_h1", microbatch_size=4, recompute="selective"),
        "bf16",
        1,
        0,
    ),
    "one microbatch, its second half reduced": (
        LLAMA,
        ParallelConfig(pp=2, dp_shard=512, schedule="zb_h1", recompute="full"),
        "bf16",
        1,
        1,
    ),
    "and its parameters freed before": (
        LLAMA,
        ParallelConfig(pp=2, dp_shard=512, schedule="zb_h1", gather="microbatch"),
        "fp32",
        1,
        1,
    ),
    "reduced for each microbatch behind a head": (
        replace(LLAMA, hidden=4096, heads=32, ffn_hidden=14336),
        ParallelConfig(pp=2, dp_shard=8, reduce="microbatch", recompute="selective"),
        "bf16",
        2,
        1,
    ),
    "a chunked loss in float32": (
        replace(LLAMA, layers=1, vocab=131072),
        ParallelConfig(dp_shard=8, sharding="NO_SHARD", recompute="selective"),
        "fp32",
        1,
        0,
    ),
    "what was made again goes when it is gathered": (
        LLAMA,
        ParallelConfig(pp=2, dp_shard=512, tp=4, microbatch_size=8, sequence_parallel=True, recompute="full"),
        "bf16",
        1,
        0,
    ),
    "replicas alone": (LLAMA, ParallelConfig(dp_replicate=4, sharding="_HYBRID_SHARD_ZERO2"), "bf16", 1, 0),
    "dropout": (replace(GPT, dropout=0.1), ParallelConfig(dp_shard=8, tp=2), "bf16", 2, 0),
    "attention's probabilities written out": (
        replace(GPT, dropout=0.1, attention_dropout=0.1),
        ParallelConfig(dp_shard=8, tp=4),
        "bf16",
        2,
        0,
    ),
    "and again in the backward": (
        replace(LLAMA, attention_dropout=0.1),
        ParallelConfig(dp_shard=8, tp=4, recompute="selective"),
        "fp32",
        2,
        0,
    ),
    "and in a block that is recomputed": (
        replace(LLAMA, attention_dropout=0.1),
        ParallelConfig(pp=2, dp_shard=8, tp=4, recompute="full", microbatch_size=2),
        "bf16",
        2,
        0,
    ),
    "and behind a split backward": (
        replace(LLAMA, attention_dropout=0.1),
        ParallelConfig(pp=2, dp_shard=8, tp=4, schedule="zb_h1"),
        "bf16",
        4,
        1,
    ),
    "keys repeated for each query head": (
        replace(LLAMA, kv_heads=2),
        ParallelConfig(dp_shard=8, microbatch_size=4),
        "fp32",
        2,
        0,
    ),
    "repeated again in the backward": (
        replace(LLAMA, kv_heads=2),
        ParallelConfig(pp=2, dp_shard=8, microbatch_size=4, recompute="selective"),
        "fp32",
        2,
        1,
    ),
    "repeated, a split backward": (
        replace(LLAMA, kv_heads=2),
        ParallelConfig(pp=2, dp_shard=8, microbatch_size=4, schedule="zb_h1"),
        "fp32",
        4,
        1,
    ),
    "a window": (replace(LLAMA, window=512), ParallelConfig(dp_shard=8, microbatch_size=4), "bf16", 2, 0),
    "heads wider than the model, and normed": (
        replace(LLAMA, head_dim=192, qk_norm=True),
        ParallelConfig(pp=2, dp_shard=8, tp=2, microbatch_size=4, sequence_parallel=True),
        "bf16",
        4,
        0,
    ),
    "heads narrower than the model, their attention recomputed": (
        replace(LLAMA, head_dim=64),
        ParallelConfig(dp_shard=8, microbatch_size=4, recompute="selective"),
        "bf16",
        2,
        0,
    ),
    "heads that no fused kernel takes": (
        replace(LLAMA, hidden=2000, heads=40, kv_heads=8),
        ParallelConfig(dp_shard=8, tp=8),
        "fp32",
        2,
        0,
    ),
}


DOCUMENTS = {
    "in one call": (LLAMA, ParallelConfig(dp_shard=8, tp=2, sequence_parallel=True), "bf16", 2, 0),
    "learned positions": (GPT, ParallelConfig(pp=2, dp_shard=8, recompute="full", microbatch_size=2), "bf16", 2, 0),
    "one after the other": (LLAMA, ParallelConfig(dp_shard=8, microbatch_size=2), "fp32", 2, 0),
    "one after the other, again": (LLAMA, ParallelConfig(pp=2, dp_shard=8, recompute="selective"), "fp32", 2, 1),
    "one after the other, split": (GPT, ParallelConfig(pp=2, dp_shard=8, schedule="zb_h1"), "fp32", 4, 1),
}


def _recipe(model: ModelConfig, parallel: ParallelConfig, precision: str, microbatches: int) -> Recipe:
    train = TrainConfig(
        steps=1,
        global_batch_size=microbatches * parallel.microbatch_size * parallel.dp,
        seq_len=2048,
        precision=precision,  # type: ignore[arg-type]
    )
    return Recipe(model=model, train=train, parallel=parallel, run_dir="runs/verify")


def assert_safe(found: Verified, most: float = 0.05) -> None:
    """The model is never more than 2% below the dry run, and at most so much above it."""
    assert -0.02 < found.difference < most


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_memory_model_errs_on_the_safe_side_of_a_dry_run(case: str) -> None:
    model, parallel, precision, microbatches, pipeline_rank = LAYOUTS[case]
    rank = pipeline_rank * (parallel.world_size // parallel.pp)
    found = verify(_recipe(model, parallel, precision, microbatches), rank)
    assert_safe(found)
    assert found.parameters == found.dry.parameter_count
    for kind, model_bytes, dry_bytes in [*found.rows()][:2]:
        assert model_bytes == pytest.approx(dry_bytes, rel=1e-3, abs=1e5), kind


@pytest.mark.parametrize("case", ["optimizer sharded", "sharded, the first of a pipeline", "on a V"])
def test_both_columns_sort_bytes_into_the_same_kinds(case: str) -> None:
    """16-bit copies of parameters, and inputs that a forward received and keeps, come from elsewhere than they go."""
    model, parallel, precision, microbatches, pipeline_rank = LAYOUTS[case]
    rank = pipeline_rank * (parallel.world_size // parallel.pp)
    found = verify(_recipe(model, parallel, precision, microbatches), rank)
    for kind, model_bytes, dry_bytes in found.rows():
        assert abs(model_bytes - dry_bytes) < 0.015 * found.dry.peak.total, kind


@pytest.mark.long
def test_a_plan_of_70b_and_its_dry_run_say_the_same_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe that a search wrote holds, by the model and by the real code, as many bytes of each kind."""
    recipe = tmp_path / "planned.yaml"
    asked = "--model llama3-70b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 256 --fix tp=8 pp=4"
    assert main([*asked.split(), "--emit-recipe", str(recipe)]) == 0
    capsys.readouterr()
    assert main(["verify", str(recipe), "--pipeline-rank", "0", "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert [each["kind"] for each in kinds][:2] == ["parameters", "optimizer"] and len(kinds) == 4
    assert all(each["model_gib"] == pytest.approx(each["dry_run_gib"], abs=0.1) for each in kinds)


@pytest.mark.parametrize("case", DOCUMENTS)
def test_documents_that_attention_stays_within_are_priced(case: str) -> None:
    model, parallel, precision, microbatches, pipeline_rank = DOCUMENTS[case]
    recipe = replace(_recipe(model, parallel, precision, microbatches), data=DataConfig(documents="mask"))
    assert_safe(verify(recipe, pipeline_rank * (parallel.world_size // parallel.pp)))


SMALL = ModelConfig(layers=2, hidden=512, heads=4, kv_heads=4, ffn_hidden=1408, vocab=512)
SMALL_GPT = ModelConfig(
    architecture="gpt", layers=1, hidden=512, heads=8, ffn_hidden=2048, vocab=512, max_positions=2048
)
SGD = OptimizerConfig(name="sgd")
ROUNDED = OptimizerConfig(name="adafactor", stochastic_rounding=True)
SMALL_LAYOUTS = {
    # What holds most of each of these is what its name says: without that the model was 1 to 20% off.
    "sums over replicas that stay, and one gradient of a tied table": (
        (replace(SMALL_GPT, vocab=50257), ParallelConfig(dp_replicate=4, dp_shard=2, tp=2, recompute="full")),
        ("bf16_pure", 1, 64, None, SGD, 0),
    ),
    "sums over replicas after second halves": (
        (replace(SMALL, layers=9), ParallelConfig(pp=3, dp_replicate=2, schedule="zb_h1", gather="microbatch")),
        ("bf16_pure", 1, 64, None, SGD, 1),
    ),
    "a bucket that is packed before the next block is at work": (
        (SMALL, ParallelConfig(dp_shard=2, sharding="SHARD_OPTIMIZER", bucket_mib=1.0)),
        ("bf16_pure", 1, 256, None, SGD, 0),
    ),
    "an embedding gathered before any block": (
        (
            replace(SMALL_GPT, layers=2, vocab=16384),
            ParallelConfig(pp=2, dp_shard=512, sharding="SHARD_GRAD_OP", gather="microbatch"),
        ),
        ("bf16", 2, 512, None, SGD, 0),
    ),
    "a head's gathered input instead of its own": (
        (
            replace(SMALL, vocab=2048),
            ParallelConfig(
                pp=2, dp_shard=8, tp=2, sequence_parallel=True, schedule="gpipe", recompute="full", microbatch_size=2
            ),
        ),
        ("bf16", 4, 1024, 256, SGD, 1),
    ),
    "the last gradient of a unit beside what arrives": (
        (replace(SMALL, vocab=32003), ParallelConfig(pp=2, dp_shard=8, sharding="SHARD_GRAD_OP")),
        ("bf16", 1, 64, None, SGD, 0),
    ),
    "a gradient scaled before the forward is made again": (
        (replace(SMALL_GPT, dropout=0.1), ParallelConfig(dp_shard=8, recompute="full")),
        ("bf16", 1, 1024, None, SGD, 0),
    ),
    "a gradient that was received, to the end of its backward": (
        (replace(SMALL_GPT, layers=2, ffn_hidden=512), ParallelConfig(pp=2, dp_shard=64)),
        ("bf16", 2, 256, None, SGD, 0),
    ),
    "the embedding's mask beside buckets": (
        (
            replace(SMALL, dropout=0.1),
            ParallelConfig(dp_shard=8, sharding="NO_SHARD", recompute="full", bucket_mib=1.0),
        ),
        ("bf16_pure", 1, 2048, None, SGD, 0),
    ),
    "a step beside what the next one receives into": (
        (
            replace(SMALL, vocab=32003),
            ParallelConfig(pp=2, dp_shard=8, sharding="NO_SHARD", recompute="full", microbatch_size=4),
        ),
        ("bf16", 2, 1024, None, OptimizerConfig(state_dtype="bf16"), 0),
    ),
    "a step in float32, rounded stochastically": (
        (replace(SMALL, vocab=140000), ParallelConfig(dp_shard=2, sharding="NO_SHARD")),
        ("bf16_pure", 1, 64, None, OptimizerConfig(stochastic_rounding=True), 0),
    ),
    "Adafactor's, likewise": (
        (replace(SMALL, vocab=140000), ParallelConfig()),
        ("bf16_pure", 1, 64, None, ROUNDED, 0),
    ),
}


@pytest.mark.parametrize("case", SMALL_LAYOUTS)
def test_what_the_runtime_keeps_for_a_while_is_priced(case: str) -> None:
    (model, parallel), (precision, microbatches, seq_len, chunk, optimizer, pipeline_rank) = SMALL_LAYOUTS[case]
    recipe = _recipe(model, parallel, precision, microbatches)
    train = replace(recipe.train, seq_len=seq_len, loss_chunk_tokens=chunk)
    rank = pipeline_rank * (parallel.world_size // parallel.pp)
    assert_safe(verify(replace(recipe, optimizer=optimizer, train=train), rank))


def test_a_second_world_in_one_process_has_groups_of_its_own() -> None:
    """The second world has the first one's ranks, so it would take that one's mesh, which DTensor remembers."""
    for parallel in (ParallelConfig(dp_replicate=2, dp_shard=4, tp=2), ParallelConfig(dp_shard=8, tp=2)):
        recipe = _recipe(SMALL, replace(parallel, sharding="NO_SHARD"), "bf16", 1)
        verify(replace(recipe, train=replace(recipe.train, seq_len=64), optimizer=OptimizerConfig(name="adafactor")), 0)


@pytest.mark.parametrize(
    ("precision", "optimizer", "chunk", "parallel"),
    [
        ("fp16", OptimizerConfig(name="adafactor"), None, ParallelConfig(sharding="NO_SHARD", dp_shard=2)),
        ("fp16", OptimizerConfig(state_dtype="bf16"), 128, ParallelConfig(dp_replicate=2, sharding="NO_SHARD")),
        ("bf16_pure", OptimizerConfig(name="sgd"), 512, ParallelConfig(dp_shard=4, sharding="NO_SHARD")),
    ],
)
def test_precisions_and_optimizers_are_priced(
    precision: str, optimizer: OptimizerConfig, chunk: int | None, parallel: ParallelConfig
) -> None:
    recipe = _recipe(replace(LLAMA, layers=1), parallel, precision, 1)
    train = replace(recipe.train, seq_len=512, loss_chunk_tokens=chunk)
    found = verify(replace(recipe, optimizer=optimizer, train=train), 0)
    assert_safe(found)
    kinds = {kind: (model, dry) for kind, model, dry in found.rows()}
    assert kinds["optimizer"][0] == pytest.approx(kinds["optimizer"][1], rel=1e-3, abs=1e3)


SMALL = replace(LLAMA, layers=3, hidden=1024, heads=16, kv_heads=4, ffn_hidden=4096, vocab=2003)
MATRICES = 3 * (2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 4096 * 1024)  # numbers of SMALL's blocks that Muon steps
BLOCK = MATRICES // 3 + 2 * 1024


@pytest.mark.parametrize(
    ("parallel", "precision", "state_dtype"),
    [
        (ParallelConfig(), "bf16", None),  # one data rank, in buckets all the same
        (ParallelConfig(dp_shard=8, tp=2, sharding="SHARD_OPTIMIZER"), "bf16", "bf16"),
        (ParallelConfig(pp=2, dp_shard=2), "bf16", "bf16"),
    ],
)
def test_a_step_in_the_backward_is_priced_by_what_waits_for_it(
    parallel: ParallelConfig, precision: str, state_dtype: Literal["bf16"] | None
) -> None:
    found = _stepped(parallel, precision, OptimizerConfig(step_in_backward=True, state_dtype=state_dtype))
    assert_safe(found, most=0.35)  # buckets of a tiny model count whole
    assert found.model.gradients == 0


def test_a_step_in_the_backward_saves_all_gradients_but_one() -> None:
    within, after = (
        _stepped(ParallelConfig(recompute="full"), "fp32", OptimizerConfig(step_in_backward=early))
        for early in (True, False)
    )
    saved = after.dry.peak.total - within.dry.peak.total
    assert 4 * (after.parameters - 2 * 4096 * 1024) < saved < 4 * after.parameters
    assert after.model.total - within.model.total == pytest.approx(saved, rel=0.1)


def _stepped(parallel: ParallelConfig, precision: str, optimizer: OptimizerConfig) -> Verified:
    recipe = _recipe(SMALL, parallel, precision, 1)
    train = replace(recipe.train, seq_len=64, global_batch_size=parallel.dp, grad_clip=None)
    return verify(replace(recipe, train=train, optimizer=optimizer), 0)


@pytest.mark.parametrize(
    ("parallel", "optimizer"),
    [
        (ParallelConfig(), OptimizerConfig(name="muon")),
        (ParallelConfig(dp_shard=4, dp_replicate=2, tp=8), OptimizerConfig(name="muon", state_dtype="bf16")),
        (ParallelConfig(dp_shard=4, sharding="NO_SHARD"), OptimizerConfig(name="muon", ns_dtype="fp32")),
    ],
)
def test_muon_has_one_momentum_and_gathers_whole_matrices(parallel: ParallelConfig, optimizer: OptimizerConfig) -> None:
    recipe = _recipe(SMALL, parallel, "bf16", 1)
    train = replace(recipe.train, seq_len=64, global_batch_size=parallel.dp)
    found = verify(replace(recipe, optimizer=optimizer, train=train), 0)
    assert_safe(found)
    assert found.model.moment == "optimizer's step" and found.dry.at.startswith("after the last action")
    width = 2 if optimizer.state_dtype == "bf16" else 4
    kinds = {kind: (model, dry) for kind, model, dry in found.rows()}
    if parallel.world_size == 1:
        others = found.parameters - MATRICES
        assert kinds["optimizer"][0] == width * (MATRICES + 2 * others)
    assert kinds["optimizer"][0] == pytest.approx(kinds["optimizer"][1], abs=1e3)


def test_each_block_that_is_gathered_ahead_is_held() -> None:
    parallel = ParallelConfig(dp_shard=128)  # so that a reduced gradient is little
    recipe = _recipe(replace(SMALL, layers=6), parallel, "bf16", 1)
    train = replace(recipe.train, seq_len=64, global_batch_size=parallel.dp)
    found = [
        verify(replace(recipe, train=train, parallel=replace(parallel, prefetch=depth)), 0) for depth in (None, 2, 3)
    ]
    for each in found:
        assert_safe(each)
    usual, two, three = (each.dry.peak.total for each in found)
    assert [two - usual, three - two] == pytest.approx([2 * BLOCK, 2 * BLOCK], rel=0.03)


def test_the_last_tp_rank_has_fewer_rows_and_the_last_data_rank_none() -> None:
    parallel = ParallelConfig(dp_shard=4, tp=8)
    for rank in (0, 7, 31):
        found = verify(_recipe(LLAMA, parallel, "bf16", 1), rank)
        assert found.parameters == found.dry.parameter_count


def test_a_page_of_json_says_where_the_peak_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "quickstart", "train.device=cpu", "--pipeline-rank", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rank"] == 4 and told["pipeline_rank"] == 1
    assert told["parameters"]["model"] == told["parameters"]["dry_run"] > 0
    assert -2 < told["difference_pct"] < 5
    assert told["peak_at"]["dry_run"].startswith("action ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "8"], "--rank 8: the layout has ranks 0 to 7"),
        (["--pipeline-rank", "2"], "--pipeline-rank 2: the layout has pipeline ranks 0 to 1"),
        (["--rank", "1", "--pipeline-rank", "1"], "one of the two"),
        (
            ["model.window=16", "train.device=auto"],
            "model.window = 16: the memory model knows windows in float32 on CPUs",
        ),
        (
            ["parallel.dp_shard=1", "parallel.dp_replicate=2", "local_sgd.sync_every=4"],
            "local_sgd.sync_every = 4: the memory model knows replicas that sum their gradients in each step",
        ),
        (
            ["optimizer.name=muon", "train.precision=bf16_pure", "optimizer.stochastic_rounding=true"],
            "knows no such steps with optimizer.name = muon",
        ),
        (["model.layers=zero"], "model.layers"),
    ],
)
def test_a_bad_input_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "quickstart", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.mark.parametrize(("rows", "ranks"), [(7, 3), (8, 4), (5, 4), (3, 8), (1, 1)])
def test_parts_made_on_demand_are_those_that_fully_shard_makes(rows: int, ranks: int) -> None:
    for dim, parameter in enumerate((torch.arange(rows * 2).view(rows, 2), torch.arange(rows * 2).view(2, rows))):
        eager = _fsdp_common._chunk_with_empty(parameter, ranks, dim)
        on_demand = Chunks(parameter, ranks, dim)
        assert all(torch.equal(on_demand[rank], eager[rank]) for rank in range(ranks))
        assert on_demand[0].data_ptr() == parameter.data_ptr()


def test_the_last_of_sixteen_thousand_ranks_owns_nothing_and_is_run_in_seconds() -> None:
    parallel = ParallelConfig(dp_shard=16_384, sharding="SHARD_GRAD_OP", reduce="microbatch")
    train = TrainConfig(steps=1, global_batch_size=16_384, seq_len=1024, precision="bf16")
    found = verify(Recipe(model=replace(LLAMA, layers=1), parallel=parallel, train=train), 16_383)
    assert_safe(found)
    assert found.parameters == found.dry.parameter_count == 0
