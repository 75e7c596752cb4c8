"""Findings of a check, and its report as text and JSON, from the facts and measurements of all
ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median_high
from textwrap import shorten
from typing import Any

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import product
from parallel3d.launch.failure import any_ranks
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.tools.preflight.facts import RankFacts, RecipeNeeds
from parallel3d.tools.preflight.measure import TimedLink

# A rank is slow below this fraction of the median matmul rate. All others wait for it.
SLOW_RANK = 0.8
SLOW_LINK = 0.5  # A link is slow below this fraction of the median bandwidth of its kind.
# Largest accepted clock difference in seconds. A larger one mixes up the order of log lines.
CLOCK_S = 1.0
# Software whose versions must agree, or ranks cannot train together.
_MUST_BE_EQUAL = ("torch", "parallel3d", "nccl")


@dataclass(frozen=True)
class Finding:
    """A problem. If `breaks` is True, the run would fail. Otherwise it is a warning."""

    text: str
    breaks: bool


def can_train_together(facts: Sequence[RankFacts]) -> bool:
    """Returns True if all ranks have the same versions of the software that communicates."""
    return all(len({each.versions.get(name) for each in facts}) == 1 for name in _MUST_BE_EQUAL)


def slow_ranks(matmuls: Sequence[float]) -> list[int]:
    """Returns the ranks whose matmul rate is below `SLOW_RANK` times the median."""
    usual = median_high(matmuls)
    return [rank for rank, rate in enumerate(matmuls) if rate < SLOW_RANK * usual]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """All results of a check. If software versions prevent training, nothing was measured."""

    recipe: Recipe
    needs: RecipeNeeds
    facts: Sequence[RankFacts]
    matmuls: Sequence[float] = ()  # FLOP/s
    links: Sequence[TimedLink] = ()
    seconds: float = 0.0

    def findings(self) -> list[Finding]:
        """Returns all findings, those that break the run first."""
        found = [
            *self._versions(),
            *self._memory(),
            *self._hosts(),
            *self._slow_matmuls(),
            *self._slow_links(),
        ]
        return sorted(found, key=lambda finding: not finding.breaks)

    def lines(self) -> Iterator[str]:
        recipe = self.recipe
        first = self.facts[0]
        findings = self.findings()
        everyone = self._named([each.rank for each in self.facts])
        yield f"{everyone}: {product(recipe.parallel.axes)}"
        yield "versions  " + ", ".join(f"{name} {value}" for name, value in first.versions.items())
        free = [each.free_bytes for each in self.facts if each.free_bytes is not None]
        if free:
            needed = f"a rank needs {max(self.needs.memory_bytes) / GIB:.2f} GiB"
            yield f"memory    {needed}; at least {min(free) / GIB:.1f} free ({first.device})"
        disks = [each.disk_free_bytes for each in self.facts if each.disk_free_bytes is not None]
        if disks:
            needed = f"checkpoints take {self._disk_bytes / GIB:.2f} GiB"
            yield f"disk      {needed}; {min(disks) / GIB:.1f} free"
        if self.matmuls:
            usual = median_high(self.matmuls)
            slowest = min(self.matmuls)
            who = self._named([self.matmuls.index(slowest)])
            rates = f"median {usual / 1e9:,.1f} GFLOP/s, slowest {slowest / 1e9:,.1f}: {who}"
            yield f"matmuls   {recipe.train.precision}: {rates}"
        for row in self._slowest_links():
            who = self._named(row.ranks)
            yield f"{row.axis} {row.kind}: {_rate(row.bandwidth)}, slowest {who}"
        for finding in findings:
            yield f"{'breaks' if finding.breaks else 'warning'}: {finding.text}"
        broken = sum(finding.breaks for finding in findings)
        verdict = f"{broken} would break the run" if broken else "the recipe can run here"
        yield f"findings: {len(findings)}, {verdict} ({self.seconds:.0f} s)"

    def tree(self) -> Any:
        return rounded(
            {
                "schema": "parallel3d.check/3",
                "layout": self.recipe.parallel.axes,
                "findings": [asdict(each) for each in self.findings()],
                "ranks": [asdict(each) for each in self.facts],
                "matmul_flops": self.matmuls,
                "needed": asdict(self.needs),
                "links": [asdict(each) for each in self._slowest_links()],
                "seconds": self.seconds,
            }
        )

    def _named(self, ranks: Sequence[int]) -> str:
        hosts = dict.fromkeys(self.facts[rank].host for rank in ranks)
        return f"{any_ranks(ranks)} ({shorten(', '.join(hosts), 100)})"

    @property
    def _disk_bytes(self) -> float:
        return self.needs.checkpoints * self.needs.checkpoint_bytes

    def _by_host(self) -> dict[str, list[RankFacts]]:
        found: defaultdict[str, list[RankFacts]] = defaultdict(list)
        for each in self.facts:
            found[each.host].append(each)
        return found

    def _slowest_links(self) -> list[TimedLink]:
        """Returns the slowest all-reduce and the slowest message of each axis."""
        found: dict[tuple[str, str], TimedLink] = {}
        for link in sorted(self.links, key=lambda each: each.bandwidth):
            found.setdefault((link.axis, link.kind), link)
        return list(found.values())

    def _versions(self) -> Iterator[Finding]:
        for name in self.facts[0].versions:
            own = [each.versions.get(name, "(none)") for each in self.facts]
            (usual, _), *others = Counter(own).most_common()
            for version, _ in others:
                where = self._named([rank for rank, each in enumerate(own) if each == version])
                text = f"{name} {version} on {where}, {usual} elsewhere: install one version"
                yield Finding(text, name in _MUST_BE_EQUAL)

    def _memory(self) -> Iterator[Finding]:
        # On GPUs, each rank has its own memory. On CPUs, ranks of a host share it.
        sharing = [[each] for each in self.facts]
        if self.facts[0].device == "CPU":
            sharing = list(self._by_host().values())
        for facts in sharing:
            free = facts[0].free_bytes
            ranks = [each.rank for each in facts]
            stages = [self.recipe.parallel.coordinates(rank).pp for rank in ranks]
            needed = sum(self.needs.memory_bytes[stage] for stage in stages)
            if free is not None and needed > free:
                yield Finding(
                    f"{self._named(ranks)}: the recipe needs {needed / GIB:.1f} GiB, but only "
                    f"{free / GIB:.1f} GiB are free; end other processes there, or try "
                    "parallel.recompute=full or a smaller parallel.microbatch_size",
                    True,
                )

    def _hosts(self) -> Iterator[Finding]:
        """Yields findings about unusable folders and data, small disks, and wrong clocks."""
        needed = self._disk_bytes
        for host, (each, *_) in self._by_host().items():
            for problem in each.problems:
                yield Finding(f"{host}: {problem}", True)
            free = each.disk_free_bytes
            ahead_s = each.clock_s - self.facts[0].clock_s
            if free is not None and free < needed:
                has = f"run_dir has {free / GIB:.1f} GiB free"
                take = f"{self.needs.checkpoints} checkpoints take {needed / GIB:.1f}"
                advice = "try a larger disk or a smaller checkpoint.keep"
                yield Finding(f"{host}: {has}, but {take}; {advice}", True)
            if abs(ahead_s) > CLOCK_S:
                way = "ahead of" if ahead_s > 0 else "behind"
                text = f"its clock is {abs(ahead_s):.1f} s {way} that of rank 0; use NTP"
                yield Finding(f"{host}: {text}", False)

    def _slow_matmuls(self) -> Iterator[Finding]:
        slow = slow_ranks(self.matmuls) if self.matmuls else []
        for facts in self._by_host().values():
            ranks = [each.rank for each in facts if each.rank in slow]
            if ranks:
                usual = median_high(self.matmuls)
                rate = min(self.matmuls[rank] for rank in ranks)
                yield Finding(
                    f"{self._named(ranks)}: matmuls at {rate / 1e9:,.1f} GFLOP/s, "
                    f"{rate / usual:.2f} of the median {usual / 1e9:,.1f}; every step waits for "
                    "it: check for other processes, heat and power limits",
                    False,
                )

    def _slow_links(self) -> Iterator[Finding]:
        """Yields findings about slow messages. Links between hosts are compared with each other,
        and so are links within hosts.
        """
        between: dict[str, float] = {}  # Lowest bandwidth in bytes/s, keyed by direction.
        within: dict[str, float] = {}
        for each in self.links:
            if each.kind == "message":
                sender, receiver = (self.facts[rank].host for rank in each.ranks)
                slowest = between
                way = f"from {sender} to {receiver}"
                if sender == receiver:
                    slowest = within
                    way = f"within {sender}"
                slowest[way] = min(each.bandwidth, slowest.get(way, each.bandwidth))
        for slowest in (between, within):
            usual = median_high(slowest.values()) if slowest else 0.0
            for way, rate in slowest.items():
                if rate < SLOW_LINK * usual:
                    text = f"messages at {_rate(rate)}, the median is {_rate(usual)}"
                    yield Finding(f"{way} {text}", False)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s"
