"""The report of a check, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median_high
from typing import Any

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import product
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.tools.preflight.expected import RecipeNeeds
from parallel3d.tools.preflight.findings import Finding, Measured, rate_in_words
from parallel3d.tools.preflight.measure import TimedLink


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Everything that a check reports."""

    recipe: Recipe
    measured: Measured
    needs: RecipeNeeds
    links: Sequence[TimedLink]
    findings: Sequence[Finding]
    seconds: float

    def lines(self) -> Iterator[str]:
        measured, first = self.measured, self.measured.facts[0]
        everyone = measured.ranks_and_hosts([each.rank for each in measured.facts])
        yield f"{everyone}: {product(self.recipe.parallel.axes)}"
        yield "versions  " + ", ".join(f"{name} {value}" for name, value in first.versions.items())
        if len(measured.leaders) > 1:
            apart_s = max(map(abs, measured.clocks_ahead_s))
            yield f"clocks    at most {apart_s:.2f} s apart"
        free = [each.free_bytes for each in measured.facts if each.free_bytes is not None]
        if free:
            needed = max(self.needs.memory_bytes) / GIB
            have = f"at least {min(free) / GIB:.1f} free ({first.device})"
            yield f"memory    a rank needs {needed:.2f} GiB; {have}"
        disks = [e.disk_free_bytes for e in measured.leaders if e.disk_free_bytes is not None]
        if disks:
            needed = self.needs.checkpoints * self.needs.checkpoint_bytes / GIB
            yield f"disk      checkpoints take {needed:.2f} GiB; {min(disks) / GIB:.1f} free"
        if measured.matmuls:
            usual, slowest = median_high(measured.matmuls), min(measured.matmuls)
            who = measured.ranks_and_hosts([measured.matmuls.index(slowest)])
            rates = f"median {usual / 1e9:,.1f} GFLOP/s, slowest {slowest / 1e9:,.1f}: {who}"
            yield f"matmuls   {self.recipe.train.precision}: {rates}"
        for row in self.links:
            speed = f"{rate_in_words(row.bandwidth)}, {row.latency_s * 1e6:,.0f} us"
            yield f"{row.axis} {row.kind}: {speed}, slowest {measured.ranks_and_hosts(row.ranks)}"
        for finding in self.findings:
            yield f"{'breaks' if finding.breaks else 'warning'}: {finding.text}"
        broken = sum(finding.breaks for finding in self.findings)
        verdict = f"{broken} would break the run" if broken else "the recipe can run here"
        yield f"findings: {len(self.findings)}, {verdict} ({self.seconds:.0f} s)"

    def tree(self) -> Any:
        """Returns the report as plain data, with what each rank has reported."""
        ranks = [asdict(each) for each in self.measured.facts]
        for rank, rate in zip(ranks, self.measured.matmuls, strict=False):
            rank["matmul_flops"] = rate
        links = [
            {
                "axis": each.axis,
                "kind": each.kind,
                "ranks": each.ranks,
                "bandwidth": each.bandwidth,
                "latency_s": each.latency_s,
            }
            for each in self.links
        ]
        return rounded(
            {
                "schema": "parallel3d.check/2",
                "layout": self.recipe.parallel.axes,
                "findings": [asdict(each) for each in self.findings],
                "ranks": ranks,
                "needed": asdict(self.needs),
                "links": links,
                "seconds": self.seconds,
            }
        )
