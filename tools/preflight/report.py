"""What a check has found, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median_high
from typing import Any

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import product
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.tools.preflight.expected import RecipeNeeds
from parallel3d.tools.preflight.findings import Finding, LinkRow, Measured


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """All that a check says."""

    recipe: Recipe
    measured: Measured
    expected: RecipeNeeds
    links: Sequence[LinkRow]
    findings: Sequence[Finding]
    seconds: float

    def page(self) -> Iterator[str]:
        """Yields the lines of the page: what there is, what the links give, and the findings."""
        measured, expected, first = self.measured, self.expected, self.measured.facts[0]
        leaders = measured.leaders
        ranks, hosts = len(measured.facts), measured.hosts_of(range(len(measured.facts)))
        axes = product({name: size for name, size in self.recipe.parallel.axes.items() if size > 1}) or "one rank"
        yield f"{ranks} rank{'s' * (ranks > 1)} on {len(leaders)} host{'s' * (len(leaders) > 1)} ({hosts}), {axes}"
        said = [f"{name} {value}" for name, value in asdict(first.versions).items() if value]
        yield f"versions  {', '.join(said)}"
        if measured.clocks:
            rank, (ahead, unsure) = max(measured.clocks.items(), key=lambda each: abs(each[1][0]))
            yield f"clocks    at most {abs(ahead):.3f} s apart (+- {unsure:.3f}): {measured.facts[rank].host}"
        free = [each.free_bytes for each in measured.facts if each.free_bytes is not None]
        if free:
            needs = f"the fullest rank needs {max(expected.memory_bytes) / GIB:.2f} GiB, " * bool(expected.memory_bytes)
            of = "a host" if first.device == "CPU" else "a GPU"
            yield f"memory    {needs}{of} has at least {min(free) / GIB:.1f} free ({first.device})"
        disks = [each.disk_free_bytes for each in leaders if each.disk_free_bytes is not None]
        if disks and expected.checkpoint_bytes is not None:
            takes_gib = expected.checkpoints * expected.checkpoint_bytes / GIB
            takes = f"{expected.checkpoints} checkpoints take {takes_gib:.2f} GiB"
            yield f"disk      {takes}, {min(disks) / GIB:.1f} are free at {self.recipe.run_dir}"
        if (data := first.data) is not None and not data.problem:
            read = f"{len(data.digests)} of {data.files} file{'s' * (data.files > 1)}"
            yield f"data      {data.bytes_ / GIB:.3g} GiB; blocks of {read} were compared"
        if measured.products:
            usual, slowest = median_high(measured.products), min(measured.products)
            who = measured.told([measured.products.index(slowest)])
            rates = f"median {usual / 1e9:,.1f} GFLOP/s a rank, slowest {slowest / 1e9:,.1f}: {who}"
            yield f"products  {self.recipe.train.precision}: {rates}"
        if self.links:
            yield ""
            yield f"{'axis':<14}{'':<12}{'groups':>6}{'GB/s':>9}{'planned':>9}{'us':>10}{'planned':>9}  slowest"
        for row in self.links:
            speeds = f"{row.bandwidth / 1e9:>9.3g}{row.planned_bandwidth / 1e9:>9.3g}"
            times = f"{row.latency_s * 1e6:>10,.0f}{row.planned_latency_s * 1e6:>9,.0f}"
            yield f"{row.axis:<14}{row.kind:<12}{row.groups:>6}{speeds}{times}  {measured.told(row.ranks)}"
        yield ""
        for finding in self.findings:
            yield f"{'breaks' if finding.breaks else 'warning'}: {finding.text}"
        broken = sum(finding.breaks for finding in self.findings)
        verdict = f"{broken} would break the run" if broken else "the recipe can run here"
        yield f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}, {verdict} ({self.seconds:.0f} s)"

    def tree(self) -> Any:
        """Returns the same as plain data, with what each rank has told."""
        measured, expected = self.measured, self.expected
        tree = {
            "schema": "parallel3d.check/1",
            "layout": self.recipe.parallel.axes,
            "findings": [asdict(each) for each in self.findings],
            "ranks": [
                {**asdict(each), "products_per_s": measured.products[each.rank] if measured.products else None}
                for each in measured.facts
            ],
            "clocks": [{"rank": rank, "ahead_s": ahead, "unsure_s": u} for rank, (ahead, u) in measured.clocks.items()],
            "needed": {
                "memory_bytes_by_pipeline_rank": expected.memory_bytes,
                "checkpoints": expected.checkpoints,
                "checkpoint_bytes": expected.checkpoint_bytes,
            },
            "links": [asdict(each) for each in self.links],
            "seconds": self.seconds,
        }
        return rounded(tree)
