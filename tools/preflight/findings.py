"""Findings about a cluster: pure functions of what the ranks have reported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high

from parallel3d.config.recipe import ParallelConfig
from parallel3d.launch.failure import any_ranks
from parallel3d.planner.hardware.units import GIB
from parallel3d.tools.preflight.expected import RecipeNeeds
from parallel3d.tools.preflight.facts import RankFacts
from parallel3d.tools.preflight.measure import TimedLink

SLOW_RANK = 0.8  # of the median matmul rate; all ranks wait for a slower one
SLOW_LINK = 0.5  # of the median bandwidth of links of the same kind
CLOCK_S = 1.0  # a larger difference puts the lines of two hosts' logs in the wrong order
_MUST_BE_EQUAL = ("torch", "parallel3d", "nccl")  # or the ranks cannot train with each other
_MOST_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """A problem. `breaks` says that the run would fail, not only be slow."""

    text: str
    breaks: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that the ranks reported, by rank. If versions differ, nothing was measured."""

    facts: Sequence[RankFacts]
    matmuls: Sequence[float]  # FLOP/s
    links: Sequence[TimedLink]

    def ranks_and_hosts(self, ranks: Sequence[int]) -> str:
        hosts = list(dict.fromkeys(self.facts[rank].host for rank in ranks))
        more = f" and {len(hosts) - _MOST_NAMED} more" if len(hosts) > _MOST_NAMED else ""
        return f"{any_ranks(ranks)} ({', '.join(hosts[:_MOST_NAMED])}{more})"

    @property
    def leaders(self) -> list[RankFacts]:
        """Facts of the first rank of each host."""
        found: dict[str, RankFacts] = {}
        for each in self.facts:
            found.setdefault(each.host, each)
        return list(found.values())

    @property
    def clocks_ahead_s(self) -> list[float]:
        """Seconds by which the clock of each host is ahead of that of rank 0."""
        return [each.clock_s - self.facts[0].clock_s for each in self.leaders]

    def ranks_of(self, host: str) -> list[int]:
        return [each.rank for each in self.facts if each.host == host]


def slowest_links(measured: Measured, parallel: ParallelConfig) -> list[TimedLink]:
    """Returns the slowest group and the slowest message of each axis of the mesh."""
    found: dict[tuple[str, str], TimedLink] = {}
    for link in measured.links:
        key = (link.axis, link.kind)
        if link.axis in parallel.axes:
            found[key] = min(link, found.get(key, link), key=lambda each: each.bandwidth)
    return list(found.values())


def find(
    measured: Measured, needs: RecipeNeeds, parallel: ParallelConfig, tp_note: str | None
) -> list[Finding]:
    """Returns all findings, those that break the run first."""
    found = [
        *_versions(measured),
        *_memory(measured, needs, parallel),
        *_hosts(measured, needs),
        *_clocks(measured),
        *_slow_matmuls(measured),
        *_slow_links(measured),
    ]
    if tp_note is not None:
        found.append(Finding(tp_note, False))
    return sorted(found, key=lambda finding: not finding.breaks)


def can_train_together(facts: Sequence[RankFacts]) -> bool:
    """True if the ranks have the same versions of what communicates."""
    return all(len({each.versions.get(name) for each in facts}) == 1 for name in _MUST_BE_EQUAL)


def slow_ranks(matmuls: Sequence[float]) -> list[int]:
    """Returns the ranks whose matmuls are much slower than the median."""
    usual = median_high(matmuls)
    return [rank for rank, rate in enumerate(matmuls) if rate < SLOW_RANK * usual]


def _versions(measured: Measured) -> Iterator[Finding]:
    for name in measured.facts[0].versions:
        counts = Counter(each.versions.get(name, "(none)") for each in measured.facts)
        (usual, _), *others = counts.most_common()
        for version, _ in others:
            ranks = [e.rank for e in measured.facts if e.versions.get(name, "(none)") == version]
            where = measured.ranks_and_hosts(ranks)
            text = f"{name} {version} on {where}, {usual} elsewhere: install one version"
            yield Finding(text, name in _MUST_BE_EQUAL)


def _memory(measured: Measured, needs: RecipeNeeds, parallel: ParallelConfig) -> Iterator[Finding]:
    sharing = [[each.rank] for each in measured.facts]  # each has a GPU
    if measured.facts[0].device == "CPU":
        sharing = [measured.ranks_of(each.host) for each in measured.leaders]
    for ranks in sharing:
        free = measured.facts[ranks[0]].free_bytes
        needed = sum(needs.memory_bytes[parallel.coordinates(rank).pp] for rank in ranks)
        if free is not None and needed > free:
            yield Finding(
                f"{measured.ranks_and_hosts(ranks)}: the recipe needs {needed / GIB:.1f} GiB and "
                f"{free / GIB:.1f} are free; end what else runs there, or try "
                "parallel.recompute=full or a smaller parallel.microbatch_size",
                True,
            )


def _hosts(measured: Measured, needs: RecipeNeeds) -> Iterator[Finding]:
    """Finds folders and data that cannot be used, and disks that are too small."""
    needed = needs.checkpoints * needs.checkpoint_bytes
    for each in measured.leaders:
        yield from (Finding(f"{each.host}: {problem}", True) for problem in each.problems)
        if each.disk_free_bytes is not None and each.disk_free_bytes < needed:
            yield Finding(
                f"{each.host}: run_dir has {each.disk_free_bytes / GIB:.1f} GiB free, and "
                f"{needs.checkpoints} checkpoints take {needed / GIB:.1f}; try a larger disk or "
                "a smaller checkpoint.keep",
                True,
            )


def _clocks(measured: Measured) -> Iterator[Finding]:
    for each, ahead_s in zip(measured.leaders, measured.clocks_ahead_s, strict=True):
        if abs(ahead_s) > CLOCK_S:
            way = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"
            text = f"{each.host}: its clock is {way} that of rank 0; set it by NTP"
            yield Finding(text, False)


def _slow_matmuls(measured: Measured) -> Iterator[Finding]:
    if not measured.matmuls:
        return
    usual, slow = median_high(measured.matmuls), slow_ranks(measured.matmuls)
    for host in dict.fromkeys(measured.facts[rank].host for rank in slow):
        ranks = [rank for rank in slow if measured.facts[rank].host == host]
        rate = min(measured.matmuls[rank] for rank in ranks)
        yield Finding(
            f"{measured.ranks_and_hosts(ranks)}: matmuls at {rate / 1e9:,.1f} GFLOP/s, "
            f"{rate / usual:.2f} of the median {usual / 1e9:,.1f}; every step waits for it: look "
            "for other programs there, heat and power limits",
            False,
        )


def _slow_links(measured: Measured) -> Iterator[Finding]:
    """Compares the links between hosts in each direction with each other, and likewise the links
    within hosts, at the largest size that all have."""
    hosts = [each.host for each in measured.facts]
    messages = [each for each in measured.links if each.kind == "message"]
    for is_within in (True, False):
        alike = [
            each for each in messages if (hosts[each.ranks[0]] == hosts[each.ranks[1]]) == is_within
        ]
        size = min((each.rows[-1][0] for each in alike), default=0)
        slowest: dict[str, float] = {}
        for each in alike:
            sender, receiver = (hosts[rank] for rank in each.ranks)
            way = f"within {sender}" if is_within else f"from {sender} to {receiver}"
            slowest[way] = min(size / dict(each.rows)[size], slowest.get(way, math.inf))
        usual = median_high(slowest.values()) if slowest else 0.0
        for way, rate in slowest.items():
            if rate < SLOW_LINK * usual:
                text = (
                    f"{way} messages go at {rate_in_words(rate)}, {rate_in_words(usual)} is usual"
                )
                yield Finding(text, False)


def rate_in_words(bytes_per_s: float) -> str:
    if bytes_per_s > 1e8:
        return f"{bytes_per_s / 1e9:,.3g} GB/s"
    return f"{bytes_per_s / 1e6:,.3g} MB/s"
