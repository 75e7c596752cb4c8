"""What was found on a cluster, and the words for what is wrong with it: pure functions of what the ranks have told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median_high

from parallel3d.config.recipe import ParallelConfig
from parallel3d.launch.failure import any_ranks
from parallel3d.planner.hardware.units import GIB
from parallel3d.tools.preflight.expected import RecipeNeeds
from parallel3d.tools.preflight.facts import RankFacts, Versions
from parallel3d.tools.preflight.measure import AxisTimes, Rows

SLOW_RANK = 0.8  # the share of the median of all ranks' products; a rank below is told, because all wait for it
SLOW_LINK = 0.5  # of the median of links of the same kind, or of what the planner takes the link for
CLOCK_S = 1.0  # by which lines in the logs of two hosts are in the wrong order
_MUST_BE_EQUAL = ("torch", "parallel3d", "nccl")  # the ranks cannot train with each other otherwise
_MOST_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """What is wrong, in a line. `breaks` says that the run would fail, and not only be slow or puzzling."""

    text: str
    breaks: bool


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """The slowest group of an axis, or the slowest of its messages, beside what the planner takes it for. A bandwidth
    is the bus bandwidth of nccl-tests."""

    axis: str
    kind: str  # all-reduce or message
    groups: int
    ranks: tuple[int, ...]  # the slowest group's
    bytes_: int
    bandwidth: float  # bytes per second
    latency_s: float
    planned_bandwidth: float
    planned_latency_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that the ranks have told, by rank; `clocks` are by the first rank of each other host. What was not
    measured, because versions differ, is empty."""

    facts: Sequence[RankFacts]
    clocks: Mapping[int, tuple[float, float]]
    products: Sequence[float]
    axes: Sequence[Sequence[AxisTimes]]

    def hosts_of(self, ranks: Sequence[int]) -> str:
        """Returns the hosts of some ranks in words, a long list cut short."""
        hosts = list(dict.fromkeys(self.facts[rank].host for rank in ranks))
        more = f" and {len(hosts) - _MOST_NAMED} more" if len(hosts) > _MOST_NAMED else ""
        return ", ".join(hosts[:_MOST_NAMED]) + more

    def told(self, ranks: Sequence[int]) -> str:
        return f"{any_ranks(ranks)} ({self.hosts_of(ranks)})"

    @property
    def leaders(self) -> list[RankFacts]:
        """What the first rank of each host has told."""
        found: dict[str, RankFacts] = {}
        for each in self.facts:
            found.setdefault(each.host, each)
        return list(found.values())


def bus_bandwidth(size: int, rows: Rows) -> float:
    """Returns the bytes per second of the largest all-reduce in a group of this size, times 2 (n - 1) / n: what each
    rank sends of it (nccl-tests, doc/PERFORMANCE.md)."""
    bytes_, seconds = rows[-1]
    return 2 * (size - 1) / size * bytes_ / seconds


def link_rows(measured: Measured, expected: RecipeNeeds, parallel: ParallelConfig) -> list[LinkRow]:
    """Returns two rows for each axis of the recipe's mesh that is longer than one rank."""
    rows = []
    for axis in (name for name, size in parallel.axes.items() if size > 1):
        times = [each for of_rank in measured.axes for each in of_rank if each.axis == axis]
        groups = {each.ranks: each.all_reduce for each in times}
        slowest = min(groups, key=lambda ranks: bus_bandwidth(len(ranks), groups[ranks]))
        (least, latency), (bytes_, _) = groups[slowest][0], groups[slowest][-1]
        size = len(slowest)
        rows.append(
            LinkRow(
                axis=axis,
                kind="all-reduce",
                groups=len(groups),
                ranks=slowest,
                bytes_=bytes_,
                bandwidth=bus_bandwidth(size, groups[slowest]),
                latency_s=latency,
                planned_bandwidth=2 * (size - 1) / size * bytes_ / expected.all_reduce_s(parallel, axis, bytes_),
                planned_latency_s=expected.all_reduce_s(parallel, axis, least),
            )
        )
        messages = [each for of_rank in times for each in of_rank.messages]
        slow = min(messages, key=lambda each: each.rows[-1][0] / each.rows[-1][1])
        (least, latency), (bytes_, seconds) = slow.rows[0], slow.rows[-1]
        pair = (slow.sender, slow.receiver)
        crosses = measured.facts[slow.sender].host != measured.facts[slow.receiver].host
        rows.append(
            LinkRow(
                axis=axis,
                kind="message",
                groups=len(messages),
                ranks=pair,
                bytes_=bytes_,
                bandwidth=bytes_ / seconds,
                latency_s=latency,
                planned_bandwidth=bytes_ / expected.message_s(bytes_, crosses=crosses),
                planned_latency_s=expected.message_s(least, crosses=crosses),
            )
        )
    return rows


def find(
    measured: Measured, expected: RecipeNeeds, parallel: ParallelConfig, rows: Sequence[LinkRow], tp_note: str | None
) -> list[Finding]:
    """Returns all findings, those that break the run first."""
    found = [
        *_versions(measured),
        *_memory(measured, expected, parallel),
        *_disk(measured, expected),
        *_data(measured),
        *_clocks(measured),
        *_products(measured),
        *_links(measured),
        *(_beside_the_plan(measured, rows) if expected.is_known else ()),
        *([Finding(tp_note, False)] if tp_note else ()),
    ]
    return sorted(found, key=lambda finding: not finding.breaks)


def must_differ(facts: Sequence[RankFacts]) -> bool:
    """True if the ranks cannot train with each other, so that nothing is measured."""
    return any(len({getattr(each.versions, name) for each in facts}) > 1 for name in _MUST_BE_EQUAL)


def slow_ranks(products: Sequence[float]) -> list[int]:
    """Returns the ranks whose products are slower than the median's by so much that they are told of."""
    usual = median_high(products)
    return [rank for rank, rate in enumerate(products) if rate < SLOW_RANK * usual]


def _versions(measured: Measured) -> Iterator[Finding]:
    for name in (field.name for field in fields(Versions)):
        ranks: dict[str, list[int]] = {}
        for each in measured.facts:
            ranks.setdefault(getattr(each.versions, name), []).append(each.rank)
        if len(ranks) > 1:
            *others, usual = sorted(ranks, key=lambda version: len(ranks[version]))
            for version in others:
                where = measured.hosts_of(ranks[version])
                text = f"{name} {version or '(none)'} on {where}, {usual or '(none)'} elsewhere: install one version"
                yield Finding(text, name in _MUST_BE_EQUAL)


def _memory(measured: Measured, expected: RecipeNeeds, parallel: ParallelConfig) -> Iterator[Finding]:
    if not expected.memory_bytes:
        return
    needed = [expected.memory_bytes[parallel.coordinates(each.rank).pp] for each in measured.facts]
    for leader in measured.leaders:
        ranks = [each for each in measured.facts if each.host == leader.host]
        if leader.device == "CPU":  # whose ranks share the memory of their host
            sums = [(sum(needed[each.rank] for each in ranks), leader.free_bytes, [each.rank for each in ranks])]
        else:
            sums = [(needed[each.rank], each.free_bytes, [each.rank]) for each in ranks]
        for bytes_, free, who in sums:
            if free is not None and bytes_ > free:
                yield Finding(
                    f"{measured.told(who)}: the recipe needs {bytes_ / GIB:.1f} GiB and {free / GIB:.1f} are free; end "
                    "what else runs there, or try parallel.recompute=full or a smaller parallel.microbatch_size",
                    True,
                )


def _disk(measured: Measured, expected: RecipeNeeds) -> Iterator[Finding]:
    needed = expected.checkpoints * (expected.checkpoint_bytes or 0.0)
    for each in measured.leaders:
        if each.disk_problem:
            # Without checkpoints only rank 0 writes.
            yield Finding(f"{each.host}: {each.disk_problem}", expected.checkpoints > 0 or each.rank == 0)
        elif each.disk_free_bytes is not None and each.disk_free_bytes < needed:
            yield Finding(
                f"{each.host}: run_dir has {each.disk_free_bytes / GIB:.1f} GiB free, and {expected.checkpoints} "
                f"checkpoints take {needed / GIB:.1f}; try a larger disk or a smaller checkpoint.keep",
                True,
            )


def _data(measured: Measured) -> Iterator[Finding]:
    told = [(each, each.data) for each in measured.leaders if each.data is not None]
    whole = [(each, data) for each, data in told if not data.problem]
    yield from (Finding(f"{each.host}: {data.problem}", True) for each, data in told if data.problem)
    kinds = [(data.all_names, data.digests) for _, data in whole]
    if len(set(kinds)) < 2:
        return
    usual = max(kinds, key=kinds.count)
    for (each, data), kind in zip(whole, kinds, strict=True):
        if kind != usual:
            theirs = dict(usual[1])
            file = next((name for name, digest in data.digests if theirs.get(name) != digest), None)
            what = f"{file} differs" if file else f"the names or sizes of its {data.files} files differ"
            yield Finding(f"{each.host}: data: {what} from the other hosts; copy the data anew", True)


def _clocks(measured: Measured) -> Iterator[Finding]:
    for rank, (ahead, unsure) in measured.clocks.items():
        if abs(ahead) - unsure > CLOCK_S:
            way = "ahead of" if ahead > 0 else "behind"
            text = f"{measured.facts[rank].host}: its clock is {abs(ahead):.1f} s {way} that of rank 0; set it by NTP"
            yield Finding(text, False)


def _products(measured: Measured) -> Iterator[Finding]:
    if not measured.products:
        return
    usual, slow = median_high(measured.products), slow_ranks(measured.products)
    for host in dict.fromkeys(measured.facts[rank].host for rank in slow):
        ranks = [rank for rank in slow if measured.facts[rank].host == host]
        rate = min(measured.products[rank] for rank in ranks)
        yield Finding(
            f"{measured.told(ranks)}: matrix products at {rate / 1e9:,.1f} GFLOP/s, {rate / usual:.2f} of the median "
            f"{usual / 1e9:,.1f}; every step waits for it: look for other programs there, heat and power limits",
            False,
        )


def _links(measured: Measured) -> Iterator[Finding]:
    """Compares messages between hosts with each other, and messages within hosts: at the largest size that all had. Of
    a slow one between hosts that host is named of whose messages in this direction all are slow, and of two such hosts
    the one that has more of them; both, where that is the same."""
    messages = [message for of_rank in measured.axes for each in of_rank for message in each.messages]
    hosts = [each.host for each in measured.facts]
    within: dict[str, float] = {}  # the slowest of each host
    between: dict[tuple[str, str], float] = {}
    for is_within in (True, False):
        kind = [each for each in messages if (hosts[each.sender] == hosts[each.receiver]) == is_within]
        common = min((each.rows[-1][0] for each in kind), default=0)
        for each in kind:
            rate = common / next(seconds for bytes_, seconds in each.rows if bytes_ == common)
            pair = hosts[each.sender], hosts[each.receiver]
            if is_within:
                within[pair[0]] = min(rate, within.get(pair[0], rate))
            else:
                between[pair] = min(rate, between.get(pair, rate))
    for host, rate in within.items():
        usual = median_high(within.values())
        if rate < SLOW_LINK * usual:
            text = f"messages between its ranks at {_rate(rate)}, those within other hosts at {_rate(usual)}"
            yield Finding(f"{host}: {text}", False)
    usual = median_high(between.values()) if between else 0.0
    slow = {pair for pair, rate in between.items() if rate < SLOW_LINK * usual}
    told: dict[str, float] = {}
    for sender, receiver in slow:
        rate = between[sender, receiver]
        sent = [pair in slow for pair in between if pair[0] == sender]
        received = [pair in slow for pair in between if pair[1] == receiver]
        evidence = len(sent) * all(sent) - len(received) * all(received)
        if evidence > 0:
            text = f"{sender}: what it sends goes at"
        elif evidence < 0:
            text = f"{receiver}: what it receives comes at"
        else:
            text = f"from {sender} to {receiver} messages go at"
        told[text] = min(rate, told.get(text, rate))
    for text, rate in told.items():
        yield Finding(f"{text} {_rate(rate)}, {_rate(usual)} is usual", False)


def _beside_the_plan(measured: Measured, rows: Sequence[LinkRow]) -> Iterator[Finding]:
    for row in rows:
        if row.bandwidth < SLOW_LINK * row.planned_bandwidth:
            yield Finding(
                f"{row.axis}: {row.kind} of {measured.told(row.ranks)} at {_rate(row.bandwidth)}, and the planner "
                f"counts on {_rate(row.planned_bandwidth)}: NCCL_DEBUG=INFO says which links are used",
                False,
            )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.3g} GB/s" if bytes_per_s > 1e8 else f"{bytes_per_s / 1e6:,.3g} MB/s"
