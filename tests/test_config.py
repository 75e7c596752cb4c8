"""Recipes: from YAML and overrides to a checked `Recipe`, or to an error that says what would
do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.load import load_recipe, to_yaml
from parallel3d.config.recipe import (
    ModelConfig,
    ParallelConfig,
    Recipe,
    RopeScaling,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.recipes import shipped_recipes
from parallel3d.schedules.registry import ScheduleName

SMALL = """
model: {layers: 4, hidden: 48, heads: 6, kv_heads: 2, ffn_hidden: 128, vocab: 264}
parallel: {pp: 2, dp_shard: 2, tp: 2, microbatch_size: 2}
train: {steps: 100, global_batch_size: 16, seq_len: 64, eval_every: 10}
"""

Load = Callable[..., Recipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_text(*overrides: str, text: str = SMALL) -> Recipe:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return load_recipe(path, overrides, cards=shape_cards())

    return load_text


def refused(load: Load, *overrides: str, text: str = SMALL) -> str:
    with pytest.raises(ConfigError) as error:
        load(*overrides, text=text)
    return str(error.value)


def test_a_file_is_laid_over_the_defaults_and_overrides_over_both(load: Load) -> None:
    recipe = load("train.steps=7", "optimizer.betas=[0.8, 0.9]")
    assert recipe.train.steps == 7
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.train.seq_len == 64
    assert recipe.optimizer.weight_decay == 0.1
    assert recipe.optimizer.decay_steps is None
    assert recipe.microbatches == 4


@pytest.mark.parametrize("path", shipped_recipes().values(), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_survive_being_written(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, cards=shape_cards())
    (tmp_path / "config.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "config.yaml", cards=shape_cards()) == recipe


def test_text_that_looks_like_something_else_survives_being_written(load: Load) -> None:
    recipe = load("run_dir=1e5", "train.sample_prompt=no", "data.pattern=*.py", "data.path=null")
    assert recipe.run_dir == "1e5"
    assert recipe.train.sample_prompt == "no"
    assert recipe.data.pattern == "*.py"
    assert load(text=to_yaml(recipe)) == recipe


@pytest.mark.parametrize("lr", ["1e-4", "1E-4", "1.0e-4", "0.0001", "1.e-4"])
def test_a_rate_may_be_written_as_people_write_it(load: Load, lr: str) -> None:
    assert load(f"optimizer.lr={lr}").optimizer.lr == 1e-4
    assert load(text=SMALL + f"optimizer:\n  lr: {lr}\n").optimizer.lr == 1e-4


def test_a_shape_card_stands_below_the_layer_that_names_it(load: Load) -> None:
    train = "train: {steps: 1, global_batch_size: 1, seq_len: 8}\n"
    assert load(text="model: {name: llama3-8b}\n" + train).model.kv_heads == 8
    assert load(text="model: {name: llama3-8b, layers: 2}\n" + train).model.layers == 2
    assert (
        load("model.layers=3", text="model: {name: llama3-8b, layers: 2}\n" + train).model.layers
        == 3
    )
    # A card asked for on the command line is wanted whole: the file's numbers are another model's.
    switched = load(
        "model.name=llama2-7b",
        "model.layers=3",
        text="model: {name: llama3-8b, layers: 2}\n" + train,
    ).model
    assert switched.name == "llama2-7b"
    assert switched.layers == 3
    assert switched.vocab == 32000


def test_a_section_of_a_card_is_changed_key_by_key_or_dropped_whole(load: Load) -> None:
    text = "model: {name: llama3.2-1b}\ntrain: {steps: 1, global_batch_size: 1, seq_len: 8}\n"
    published = RopeScaling(
        type="llama3",
        factor=32.0,
        original_max_positions=8192,
    )
    assert load(text=text).model.rope_scaling == published
    assert load("model.rope_scaling.factor=16", text=text).model.rope_scaling == replace(
        published, factor=16.0
    )
    assert load("model.rope_scaling=null", text=text).model.rope_scaling is None
    assert load(text=text.replace("}", ", rope_scaling: null}", 1)).model.rope_scaling is None
    # A card that is asked for later has its own.
    assert load("model.name=llama3-8b", text=text).model.rope_scaling is None
    assert load(text=to_yaml(load(text=text))) == load(text=text)


UNREADABLE = [
    (
        "data.evaluation=[{name: a, path: b, size: 3}]",
        "data.evaluation[0].size (command line): unknown key; did you mean data.evaluation.name?",
    ),
    ("parallel.ttp=2", "parallel.ttp (command line): unknown key; did you mean parallel.tp?"),
    (
        "parallel.dp=2",
        "parallel.dp (command line): unknown key; the data-parallel size is parallel.dp_shard",
    ),
    (
        "batch_size=8",
        "batch_size (command line): unknown key; did you mean train.global_batch_size?",
    ),
    (
        "optimizer.step_in_backward=true",
        "optimizer.step_in_backward (command line): unknown key; removed; ",
    ),
    ("train.lr=1", "train.lr (command line): unknown key; did you mean optimizer.lr?"),
    (
        "parallel=2",
        "parallel = 2 (command line): must be keys and values of pp, dp_replicate",
    ),
    ("model=3", "model = 3 (command line): must be keys and values of name, architecture"),
    ("parallel.tp", "parallel.tp: not an override; write key=value"),
    ("parallel.tp=two", "parallel.tp = two (command line): must be an integer; try 1"),
    ("parallel.tp=[", "parallel.tp = [ (command line): not a YAML value"),
    (
        "optimizer.lr=.nan",
        "optimizer.lr = nan (command line): must be a finite number; try 0.0003",
    ),
    (
        "optimizer.lr=${oc.env:HOME}",
        "optimizer.lr = ${oc.env:HOME} (command line): must be UTF-8 text without ${variables}",
    ),
    (
        "model.name=llama3-9b",
        "model.name = llama3-9b (command line): no such shape card; try llama3-8b",
    ),
]


@pytest.mark.parametrize("override, message", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_name(load: Load, override: str, message: str) -> None:
    said = refused(load, override)
    assert message in said
    assert len(said.splitlines()) == 1


YARN = [
    "model.rope_scaling.type=yarn",
    "model.rope_scaling.factor=4",
    "model.rope_scaling.original_max_positions=64",
]
# An override, the line it gives, and what that line suggests (which must then do).
BROKEN = [
    (
        ["parallel.tp=3"],
        "parallel.tp = 3: must divide model.ffn_hidden = 128 and model.kv_heads = 2; try 1 or 2",
        "parallel.tp=2",
    ),
    (
        [*YARN, "model.rope_scaling.low_freq_factor=2"],
        "low_freq_factor = 2.0: only used with model.rope_scaling.type = llama3, but it is yarn",
        "model.rope_scaling.type=llama3",
    ),
    (
        ["parallel.recompute=every_n"],
        "parallel.recompute_every = null: must be set if and only if parallel.recompute = every_n",
        "parallel.recompute_every=2",
    ),
    (
        ["model.architecture=gpt"],
        "model.max_positions = null: must be at least train.seq_len = ",
        "model.max_positions=4096",
    ),
    (
        ["model.vocab=256"],
        "model.vocab = 256: must be at least 257, the number of token IDs of data",
        "model.vocab=258",
    ),
    (
        ["parallel.pp=8"],
        "parallel.pp = 8: 8 stages (parallel.virtual_stages = 1) need at least as many layers",
        "parallel.pp=4",
    ),
    (
        ["parallel.virtual_stages=2"],
        "parallel.virtual_stages = 2: must be 1 with parallel.schedule = 1f1b",
        "parallel.schedule=interleaved_1f1b",
    ),
    (
        ["train.global_batch_size=15"],
        "train.global_batch_size = 15: must be a multiple of 2 data-parallel ranks x",
        "train.global_batch_size=12",
    ),
    (
        ["parallel.zero_stage=1", "parallel.sharding=NO_SHARD"],
        "means parallel.sharding = SHARD_OPTIMIZER, but that is NO_SHARD",
        "parallel.zero_stage=null",
    ),
    (
        ["parallel.reduce=microbatch", "parallel.reduce_dtype=bf16", "parallel.dp_replicate=2"],
        "would accumulate gradients in bf16, because parallel.reduce_dtype = bf16",
        "parallel.reduce_dtype=fp32",
    ),
    (
        ["parallel.sharding=FULL_SHARD", "parallel.dp_replicate=2"],
        "parallel.sharding = FULL_SHARD: does not support replicas",
        "parallel.sharding=HYBRID_SHARD",
    ),
    (
        ["optimizer.warmup_steps=101"],
        "must be at most train.steps = 100; try 10",
        "optimizer.warmup_steps=10",
    ),
    (
        ["optimizer.schedule=wsd"],
        "optimizer.schedule = wsd: requires optimizer.decay_start",
        "optimizer.decay_start=90",
    ),
    (
        ["data.evaluation=[{name: validation, path: w.txt}]", "train.eval_every=9"],
        "data.evaluation[0].name = validation: must contain only letters",
        "data.evaluation=[{name: validation-1, path: w.txt}]",
    ),
    (
        ["data.documents=mask", "model.attention_dropout=0.1"],
        "data.documents = mask: is not supported with model.attention_dropout",
        "model.attention_dropout=0",
    ),
    (
        ["data.source=text"],
        "data.source = text requires a file or a folder",
        "data.path=corpus.txt",
    ),
    (
        ["checkpoint.every=100", "checkpoint.keep_every=250"],
        "checkpoint.keep_every = 250: must be a multiple of checkpoint.every = 100; try 200 or 300",
        "checkpoint.keep_every=300",
    ),
    (
        ["optimizer.lr=0"],
        "optimizer.lr = 0 (command line): must be above 0; try 0.0003",
        "optimizer.lr=0.0003",
    ),
]


@pytest.mark.parametrize("overrides, message, would_do", BROKEN)
def test_a_broken_rule_names_a_value_that_would_do(
    load: Load, overrides: list[str], message: str, would_do: str
) -> None:
    assert message in refused(load, *overrides)
    load(*overrides, would_do)


def test_all_problems_are_told_at_once_a_line_each(load: Load) -> None:
    said = refused(load, "train.steps=0", "optimizer.lr=-1", "checkpoint.keep=0")
    assert [line.partition(" ")[0] for line in said.splitlines()] == [
        "train.steps",
        "optimizer.lr",
        "checkpoint.keep",
    ]
    many = [
        f"{key}=0"
        for key in (
            "train.steps",
            "train.seq_len",
            "model.layers",
            "model.heads",
            "model.vocab",
            "parallel.tp",
        )
    ]
    assert refused(load, *many).splitlines()[5:] == ["... and 1 more"]


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "",
            "model.layers, model.hidden, model.heads, model.ffn_hidden, model.vocab, train.steps",
        ),
        ("", "or choose a shape card, such as model.name = llama3-8b"),
        ("- 1", "small.yaml: must contain keys and values"),
        ("just words", "small.yaml: must contain keys and values"),
        ("model: {\n", "small.yaml:2: not valid YAML"),
        ("model:\n\tlayers: 2\n", "small.yaml:2: not valid YAML"),
        ("\x00", "small.yaml: not valid YAML"),
        (
            SMALL + "parallel: {tp: 1}\n",
            "parallel.tp = 1 (small.yaml:5): already set at small.yaml:3",
        ),
        (SMALL + "modle: {a: 1}\n", "modle.a (small.yaml:5): unknown key"),
        (
            SMALL + "data: {path: '${oc.env:HOME}'}\n",
            "data.path = ${oc.env:HOME} (small.yaml:5): must be UTF-8 text without",
        ),
        (
            SMALL + "checkpoint: {resume: no}\n",
            "checkpoint.resume = false (small.yaml:5): must be text (YAML reads yes, no",
        ),
        (SMALL + "run_dir: 2024\n", "run_dir = 2024 (small.yaml:5): must be text; try '2024'"),
        (SMALL + "data: !!python/object/apply:os.getcwd []\n", "small.yaml:5: not valid YAML"),
        (SMALL + "x: &x {y: *x}\n", "small.yaml"),
        (
            SMALL + "data: {path: {a: {b: 1}}}\n",
            "data.path = {'a': {'b': 1}} (small.yaml:5): must be text",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_words(load: Load, text: str, message: str) -> None:
    assert message in refused(load, text=text)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a" * (1 << 21)], ids=["not text", "too large"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="not valid YAML|a recipe is a"):
        load_recipe(tmp_path / "odd.yaml", cards={})


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "parallel.offload=true;optimizer.name=muon",
            "parallel.offload = true: keeps momentum on the CPU, but optimizer.name = muon sends",
        ),
        (
            "parallel.offload=true;parallel.zero_stage=1",
            "SHARD_OPTIMIZER, which keeps full parameters on each rank; try",
        ),
        (
            "train.offload_activations=1",
            "unknown key; use parallel.offload=true",
        ),
        (
            "parallel.bucket_mib=2",
            "parallel.bucket_mib = 2.0: not used with parallel.sharding = FULL_SHARD",
        ),
        (
            "train.on_spike=rollback",
            "requires checkpoints, but checkpoint.every = null; try checkpoint.every=100",
        ),
        (
            "data.skip=[{first: 9, last: 3}]",
            "last = 3: must not be below first = 9; try {first: 3, last: 9}",
        ),
        (
            "data.skip=[3, 9]",
            "data.skip[0] = 3 (command line): must be keys and values of first, last",
        ),
        (
            "data.ignore_token_ids=[256, 300]",
            "300 is not a token ID, because model.vocab = 264; try IDs from 0 to 263",
        ),
    ],
)
def test_precision_and_masks_are_checked(load: Load, override: str, message: str) -> None:
    assert message in refused(load, *override.split(";"))


@given(
    pp=st.integers(1, 8),
    dp_shard=st.integers(1, 6),
    tp=st.integers(1, 8),
    virtual=st.integers(1, 3),
    schedule=st.sampled_from(get_args(ScheduleName)),
    batch=st.integers(1, 64),
    vocab=st.integers(1, 600),
    layers=st.integers(1, 12),
    heads=st.integers(1, 12),
    head_dim=st.integers(1, 9),
)
def test_every_layout_is_accepted_or_refused_in_words(
    pp: int,
    dp_shard: int,
    tp: int,
    virtual: int,
    schedule: ScheduleName,
    batch: int,
    vocab: int,
    layers: int,
    heads: int,
    head_dim: int,
) -> None:
    parallel = ParallelConfig(
        pp=pp,
        dp_shard=dp_shard,
        tp=tp,
        virtual_stages=virtual,
        schedule=schedule,
    )
    recipe = Recipe(
        model=ModelConfig(
            layers=layers,
            hidden=heads * head_dim,
            heads=heads,
            ffn_hidden=48,
            vocab=vocab,
        ),
        train=TrainConfig(steps=1, global_batch_size=batch, seq_len=8),
        parallel=parallel,
    )
    try:
        validate(recipe)
    except ConfigError as error:
        for line in str(error).splitlines():
            assert re.match(r"[\w.]+ = .*: .*; try .+|\.\.\. and \d more", line)
    else:
        assert parallel.stages <= layers
        assert heads % tp == 0
        assert head_dim % 2 == 0
        assert (tp - 1) * -(-vocab // tp) < vocab  # every rank has a row
        assert batch == recipe.microbatches * dp_shard
