"""The commands `parallel3d-plan` and `parallel3d-plan memory` as Python functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.report.page import Plan
from parallel3d.tools.plan.command import COMMAND_LINE
from parallel3d.tools.plan.memory import asked_layout
from parallel3d.tools.plan.recommend import make_plan


def plan(**options: Any) -> Plan:
    """Plans the layout of a run, as `parallel3d-plan` does. `repr()` of the result is the report.

    Args:
        options: Options of the command, with `_` instead of `-`. A flag is given as True. `fix` and
            `why` may be dicts.

    Returns:
        Plan: `best.parallel` is the `ParallelConfig` of the best layout. `best` is None if no
            layout fits. `result.strategies` has at most `top` (default 10) layouts, best first.

    Raises:
        ConfigError: An option is unknown, missing or not valid.

    Example:
        >>> found = parallel3d.plan(
        ...     model="llama3-8b", gpu="h100", gpus=64, seq_len=8192, global_batch=512
        ... )
        >>> found.best.parallel.dp_shard
    """
    return make_plan(COMMAND_LINE.parse("recommend", _words(options)))[0]


def estimate_memory(**options: Any) -> RankMemory:
    """Estimates the peak memory of a layout, as `parallel3d-plan memory` does.

    Args:
        options: Options of the command, as for `plan`. `layout` may be a dict.

    Returns:
        Bytes per device, by kind of memory, on the pipeline rank with the highest peak.

    Raises:
        ConfigError: An option is unknown, missing or not valid, or the layout breaks a rule.

    Example:
        >>> memory = parallel3d.estimate_memory(
        ...     model="llama3-8b", gpu="h100", layout={"tp": 2, "dp_shard": 4}, seq_len=8192,
        ...     global_batch=512,
        ... )
        >>> memory.total / 2**30, memory.optimizer / 2**30
    """
    return asked_layout(COMMAND_LINE.parse("memory", _words(options)))[1].memory


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        if isinstance(value, Mapping):
            values = [f"{key}={item}".replace("=True", "=true") for key, item in value.items()]
        for item in values:
            yield flag if item is True else f"{flag}={item}"
