"""Builds the command that trains a plan's best layout with Megatron-LM or another framework.

framework_command.toml lists the options of each framework and the sources that document them.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.search.request import Strategy
from parallel3d.tools.plan.models import Model

FRAMEWORKS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def framework_command(best: Strategy, model: Model, steps: int) -> str:
    """Returns the command that trains for `steps` steps, preceded by a comment.

    Raises ConfigError if the framework is unsupported or has no option for a setting of the plan.
    """
    name = best.request.framework.name
    if name not in FRAMEWORKS:
        known = " or ".join(FRAMEWORKS)
        raise ConfigError(
            f"--emit-command: does not support {name}; try --framework {known}, or for parallel3d "
            "--emit-recipe plan.yaml"
        )
    framework = FRAMEWORKS[name]
    values = {**_values(best, model), "steps": steps}
    lines = framework["options"].splitlines()
    for key, words in framework["choices"].items():
        value = str(values[key])
        if value not in words:
            told = f"{name} has no option for {key} = {value}"
            raise ConfigError(f"--emit-command: {told}; {words['else']}")
        lines += words[value].splitlines()
    return framework["note"] + " \\\n    ".join(_words(lines, values))


def _words(lines: Iterable[str], values: Mapping[str, Any]) -> Iterator[str]:
    """Yields options with their values. True gives a flag without value; None and False omit the
    option.
    """
    for line in lines:
        option, _, value = line.format(**values).partition(" ")
        if value in ("", "True"):
            yield option
        elif value not in ("None", "False"):
            yield f"{option} {shlex.quote(value)}"


def _values(best: Strategy, model: Model) -> dict[str, Any]:
    """Returns the values that framework_command.toml uses, from the request, shape and layout."""
    q = best.request
    shape = q.shape
    layout = best.run.layout
    per_node = min(q.gpus, q.cluster.gpus_per_node)
    experts = shape.experts
    config = model.config
    scaling = config.rope_scaling if config else None
    has_bias = experts is not None and experts.router_bias
    layers = [stage.layers for stage in best.run.stages]
    depth = max(layers)
    is_even = depth == min(layers)
    cut = "|".join(f"t*{count}" for count in layers)
    known = FRAMEWORKS["torchtitan"]["configurations"]
    configuration = known.get(str(total_parameters(shape)), "MODULE FUNCTION")
    return {
        **vars(q),
        **vars(shape),
        **vars(layout),
        "per_node": per_node,
        "nodes": q.gpus // per_node,
        "gpus_beyond_nodes": q.gpus % per_node,
        "configuration": configuration.split(),
        "rotary_base": int(config.rope_theta) if config else "ROTARY_BASE",
        "scaling": scaling,
        "rope_scaling": scaling and scaling.type,
        "sliding_window": shape.attended(q.seq_len) < q.seq_len,
        "is_grouped": shape.kv_heads < shape.heads,
        "has_latent": shape.latent is not None,
        "has_experts": experts is not None,
        "router_bias": has_bias,
        "aux_loss": None if has_bias else 0.01,
        "shared_hidden": experts and (experts.shared_hidden or None),
        "sparse_layers": shape.layers - shape.first_dense,
        "depth": depth,
        "is_even": is_even,
        "cut": f"E{cut}L",
        "uneven_stages": 0 if is_even else layout.virtual_stages,
        "recomputed": ceil(depth / layout.recompute_every),
        "tied_in_pipeline": shape.tied_embeddings and layout.pp > 1,
        "ep_across_replicas": layout.shard_ranks * layout.tp % layout.ep > 0,
        "rank_tokens": layout.microbatch_size * q.seq_len,
        "step_tokens": q.global_batch_size * q.seq_len,
    }
