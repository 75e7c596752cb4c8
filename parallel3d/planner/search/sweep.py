"""The same run on clusters of several sizes: the best layout of each, how well it scales, and which is the cheapest in
time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.search.constraints import check_fixed
from parallel3d.planner.search.fastest import fastest, search
from parallel3d.planner.search.question import Question, RunLength, Strategy, run_length
from parallel3d.planner.time.step import BlockTimeCache


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """The question on so many devices, with its best layout, or in `none` the reason why no layout fits. `length` is
    that of the run, where its tokens are known."""

    question: Question
    strategy: Strategy | None = None
    none: str = ""
    length: RunLength | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.strategy.cost.tokens_per_s_per_gpu if self.strategy else 0.0


def sweep(question: Question, sizes: Iterable[int], tokens: float | None = None) -> list[ClusterSize]:
    """Answers the question at each size, smallest first; block times are computed once for all of them. Raises
    ConfigError where the question allows no layout at any size, whatever the memory."""
    blocks: BlockTimeCache = {}
    found: list[ClusterSize] = []
    refused: list[ConfigError] = []
    for asked in (replace(question, gpus=gpus) for gpus in sorted(set(sizes))):
        try:
            found.append(_at(asked, tokens, blocks))
        except ConfigError as error:
            refused.append(error)
            found.append(ClusterSize(question=asked, none=str(error)))
    if len(refused) == len(found):
        raise refused[-1]
    return found


def cheapest(sizes: Sequence[ClusterSize], *, most_days: float) -> ClusterSize | None:
    """The fewest GPU-hours among those whose run, of known length, is done in time. None where none is."""
    in_time = [size for size in sizes if size.length is not None and size.length.days <= most_days]
    return min(in_time, key=lambda size: size.length.gpu_hours if size.length else 0.0, default=None)


def _at(question: Question, tokens: float | None, blocks: BlockTimeCache) -> ClusterSize:
    check_fixed(question)
    found = fastest(question, top=1, blocks=blocks)
    if not found:
        nearest = search(question, top=1).rejected[0]
        short = f"{nearest.short_bytes / GIB:.1f} GiB"
        return ClusterSize(question=question, none=f"does not fit: {short} are missing in the leanest layout")
    length = None if tokens is None else run_length(question, found[0], tokens)
    return ClusterSize(question=question, strategy=found[0], length=length)
