"""A plan as a recipe: complete, with what led to each choice in a comment, checked before it is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, cast

from parallel3d.config.recipe import CheckpointConfig, ModelConfig, OptimizerConfig, Precision, Recipe, TrainConfig
from parallel3d.config.rules import validate
from parallel3d.config.rules_optimizer import can_step_in_backward
from parallel3d.config.yaml_text import dump_yaml, read_settings
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.model.named import sliding_window
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.report.json import sharding_of
from parallel3d.planner.report.page import Plan
from parallel3d.planner.report.text import memory_text, si, time_text
from parallel3d.planner.search.question import Strategy
from parallel3d.tools.plan.inputs import ParsedQuestion
from parallel3d.tools.plan.models import Model
from parallel3d.tools.reply import write_output

_PLANNED = ("global_batch_size", "seq_len", "precision")
_TRIAL_STEPS = 100  # where no token budget is given
_LONGEST_COMMENT_COLUMN = 34


def emit_recipe(path: Path, asked: ParsedQuestion, plan: Plan) -> None:
    """Writes the best strategy as a recipe. Raises ConfigError for a model that the trainer does not have."""
    assert plan.best is not None
    recipe = recipe_of_plan(asked, plan, plan.best, run=path.stem)
    validate(recipe)
    write_output("--emit-recipe", path, "".join(f"{line}\n" for line in _lines(recipe, asked, plan, plan.best)))


def recipe_of_plan(asked: ParsedQuestion, plan: Plan, best: Strategy, *, run: str) -> Recipe:
    """Returns the user's own recipe, or the defaults, with the plan's model, batch and layout."""
    q = plan.question
    if not q.program.is_parallel3d:
        raise ConfigError(f"--emit-recipe: the plan is for {q.program.name}; leave out --engine")
    shape = q.shape
    parallel = replace(best.parallel, sharding=sharding_of(best.parallel))
    steps = _steps(plan)
    train = TrainConfig(
        steps=steps,
        global_batch_size=q.global_batch_size,
        seq_len=q.seq_len,
        precision=cast(Precision, q.precision),
    )
    base = asked.model.recipe
    if base is not None:
        planned = {f.name: getattr(train, f.name) for f in fields(train) if f.name in _PLANNED}
        train = replace(base.train, **planned, steps=base.train.steps if plan.tokens is None else steps)
        slice_ = parallel.dp * parallel.microbatch_size
        train = replace(train, eval_sequences=ceil(train.eval_sequences / slice_) * slice_)
        is_early = base.optimizer.step_in_backward and can_step_in_backward(
            parallel, q.global_batch_size, tied_embeddings=shape.tied_embeddings
        )
        optimizer = replace(base.optimizer, step_in_backward=is_early)
        model = replace(base.model, vocab=shape.vocab)
        return replace(base, model=model, train=train, parallel=parallel, optimizer=optimizer)
    large = total_parameters(q.shape) > 15e9  # Llama 2's rates (arXiv 2307.09288, section 2.2)
    optimizer = OptimizerConfig(
        lr=1.5e-4 if large else 3e-4, warmup_steps=0 if plan.tokens is None else min(2000, steps // 10)
    )
    model = _model(asked.model, shape, q.seq_len)
    # About once an hour; a trial needs none.
    every = None if plan.tokens is None else max(1, round(3600 / best.cost.step_time_s))
    return Recipe(
        model=model,
        train=train,
        parallel=parallel,
        optimizer=optimizer,
        checkpoint=CheckpointConfig(every=every),
        run_dir=f"runs/{run}",
    )


def _steps(plan: Plan) -> int:
    q = plan.question
    return _TRIAL_STEPS if plan.tokens is None else ceil(plan.tokens / (q.global_batch_size * q.seq_len))


def _model(model: Model, shape: ModelShape, seq_len: int) -> ModelConfig:
    """Returns the trainer's section for a shape, with what a card or a config.json says beyond the shape."""
    is_gpt = shape.feed_forward == "gelu" and shape.positions == "learned" and shape.biases and shape.layer_norm
    is_llama = shape.feed_forward == "swiglu" and shape.positions == "rope" and not shape.biases
    if not is_gpt and not is_llama:
        raise ConfigError(f"--emit-recipe: the trainer has no module for {shape.name}, only for Llamas and GPTs")
    numbers: dict[str, Any] = dict(
        architecture="gpt" if is_gpt else "llama",
        qkv_bias=shape.qkv_biases,
        qk_norm=shape.qk_norm,
        max_positions=max(shape.position_rows, seq_len) if is_gpt else None,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn_hidden=shape.ffn_hidden,
        vocab=shape.vocab,
        tied_embeddings=shape.tied_embeddings,
    )
    more: dict[str, Any] = {}
    if model.source == "name" and shape.name in shape_cards():
        card = {setting.key: setting.value for setting in read_settings(shape_cards()[shape.name])}
        more = {"name": shape.name, **{key: value for key, value in card.items() if key not in numbers}}
    elif model.source == "config.json" and model.path is not None:
        more = _of_hugging_face(json.loads(model.path.read_text()))
    return ModelConfig(**{**more, **numbers})


def _of_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "rope_theta": "rope_theta",
        "rms_norm_eps": "norm_eps",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "init_std",
    }
    found: dict[str, Any] = {ours: float(config[theirs]) for theirs, ours in names.items() if theirs in config}
    return {**found, "window": sliding_window(config)}


def _lines(recipe: Recipe, asked: ParsedQuestion, plan: Plan, best: Strategy) -> Iterator[str]:
    q, known = plan.question, plan.accuracy
    yield f"# {q.shape.name} on {q.gpus} x {q.cluster.device.name}: planned by parallel3d-plan, the best of"
    answer = plan.answer
    yield f"# {answer.considered:,} layouts in the order of time, with the memory of {answer.checked:,} of them."
    yield f"#   step    {best.cost.step_time_s:.3g} s: {time_text(best.cost.parts)}"
    yield f"#   speed   {best.cost.tokens_per_s_per_gpu:,.0f} tokens/s a device, MFU {best.cost.mfu:.1%}"
    yield f"#   memory  GiB on pipeline rank {best.memory.rank}: {memory_text(best.memory)}"
    if known is not None:
        yield f"#   error   median {known.throughput_median:.1f}% of speed, {known.memory_median:.1f}% of memory"
        yield f"#           on published runs of other programs, scored {known.date}"
    comments = dict(_comments(recipe, asked, plan, best))
    tree = asdict(recipe)
    for section, keys in tree.items():
        if not isinstance(keys, dict):
            yield from ("", *_entry(section, keys, "", ""))
            continue
        yield ""
        yield f"{section}:"
        for key, value in keys.items():
            if key == "stage_boundaries" and value is None:
                continue
            yield from _entry(key, value, comments.get(f"{section}.{key}", ""), "  ")


def _entry(key: str, value: object, comment: str, indent: str) -> Iterator[str]:
    plain = list(value) if isinstance(value, tuple) else value
    text = f"{key}: {json.dumps(plain)}" if isinstance(plain, list) else dump_yaml({key: plain}).rstrip("\n")
    yield f"{indent}{text:<{_LONGEST_COMMENT_COLUMN}}# {comment}" if comment else f"{indent}{text}"


def _comments(recipe: Recipe, asked: ParsedQuestion, plan: Plan, best: Strategy) -> Iterator[tuple[str, str]]:
    """Yields (key, comment): why each choice was made, with its figure."""
    q, parallel, parts, step = plan.question, best.parallel, best.cost.parts, best.cost.step_time_s
    node = q.cluster.gpus_per_node
    if parallel.pp > 1:
        yield (
            "parallel.pp",
            f"its bubble takes {parts.pp_bubble / step:.1%} of a step, transfers {parts.pp_p2p / step:.1%}",
        )
    if parallel.tp > 1:
        where = "within a node" if parallel.tp <= node else "across nodes"
        yield "parallel.tp", f"{where} of {node}; its traffic takes {parts.tp / step:.1%} of a step"
    yield "parallel.dp_shard", f"{parts.dp / step:.1%} of a step is data-parallel traffic that nothing hides"
    if parallel.virtual_stages > 1:
        yield "parallel.virtual_stages", "stages on each rank: a smaller bubble for more transfers"
    several = "es" * (recipe.microbatches > 1)
    yield "parallel.microbatch_size", f"sequences; {recipe.microbatches} microbatch{several} a step"
    if parallel.recompute != "none":
        yield "parallel.recompute", f"{parts.recompute / step:.1%} of a step; without it does not fit"
    else:
        share = best.memory.total / q.cluster.device.memory_bytes
        yield "parallel.recompute", f"it fits without: {share:.0%} of a device's memory"
    tokens = q.global_batch_size * q.seq_len
    budget = f"{si(plan.tokens)} tokens" if plan.tokens else f"a trial: a step is {si(tokens)} tokens"
    if asked.model.recipe is None or plan.tokens is not None:
        yield "train.steps", budget
    yield "train.global_batch_size", f"sequences: {si(tokens)} tokens"
    if asked.model.recipe is None:
        if recipe.checkpoint.every is not None:
            yield "checkpoint.every", "steps: about an hour"
        yield "optimizer.lr", "Llama 2's for this size; yours may differ"
        yield "data.source", "a stand-in that is there everywhere; your corpus: source: text, path: ..."
