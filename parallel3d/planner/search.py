"""The best layouts for a model on a cluster: the whole space of `ParallelConfig`, ranked by predicted step time.

What is left out is left out exactly: a layout is not tried where a rule of `validation` forbids it, where another one
is never slower and never needs more memory (sequence parallelism wherever tp > 1 allows it; 1F1B against GPipe), or
where less recompute already fits. The rest is priced by a closed form, and the finalists by simulating their schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, inf

from parallel3d.config import ParallelConfig, Recompute, ScheduleName
from parallel3d.errors import ConfigError
from parallel3d.pipeline.schedules import STAGES_PER_RANK
from parallel3d.planner.cost import Known, step_cost
from parallel3d.planner.engine import PARALLEL3D
from parallel3d.planner.job import Job, from_config
from parallel3d.planner.memory import quick_worst_bytes, worst_rank
from parallel3d.planner.question import Answer, LeftOut, Question, Rejected, Strategy
from parallel3d.planner.shapes import padded
from parallel3d.sharding.strategy import HYBRID_OF, WHOLE, ShardingName, sharding_faults

_WHOLE_BACKWARD = ("1f1b", "gpipe", "interleaved_1f1b")  # schedules that may reduce for each microbatch
_FINALISTS = 20
_FROM_EACH_WAY, _SPARE_WAYS = 2, 2
_MOST_MICROBATCH = 64  # sequences
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # from the fastest to the leanest


@dataclass(frozen=True)
class _Priced:
    """A layout's memory, and its time by the closed form: infinite where nobody asks for it."""

    parallel: ParallelConfig
    step_time_s: float
    bytes: float


def search(question: Question, *, top: int = 10) -> Answer:
    """The best `top` strategies, each another way of cutting the model: of every tp x pp the best that there is in
    microbatch, virtual stages, split of the data ranks and recompute, which a run can change without changing what its
    ranks hold. Where the question fixes both tp and pp, those are what differs.

    Raises ConfigError where the question allows no layout at all, whatever the memory."""
    _check(question)
    fitting: list[_Priced] = []
    nearest: dict[tuple[int, int], _Priced] = {}  # that does not fit
    leanest: dict[tuple[int, int], _Priced] = {}  # that does
    considered = 0
    for family in _families(question):
        for priced in _price(question, family):
            fits = priced.bytes <= question.usable_bytes
            if priced.step_time_s < inf:
                fitting.append(priced)
            considered += priced.step_time_s < inf or not fits
            key, of_ways = (priced.parallel.tp, priced.parallel.pp), leanest if fits else nearest
            if key not in of_ways or priced.bytes < of_ways[key].bytes:
                of_ways[key] = priced
    if not considered:
        raise ConfigError(_nothing_allowed(question))
    finalists = _finalists(question, fitting, top)
    strategies = _distinct(question, sorted((strategy(question, p.parallel) for p in finalists), key=_rank))
    held = {(p.parallel.tp, p.parallel.pp) for p in fitting}
    rejected = sorted((p for key, p in nearest.items() if key not in held), key=lambda p: p.bytes)
    return Answer(
        strategies=tuple(strategies[:top]),
        leanest=tuple(p.parallel for p in sorted(leanest.values(), key=lambda p: p.bytes)),
        rejected=tuple(_reject(question, p) for p in rejected),
        left_out=tuple(_left_out(question, strategies[:top], fitting, {*nearest})),
        considered=considered,
        fitting=len(fitting),
    )


def _finalists(question: Question, fitting: list[_Priced], top: int) -> list[_Priced]:
    """Those that are priced exactly: the fastest by the closed form, a few of each way of cutting the model."""
    by_time = sorted(fitting, key=lambda p: (p.step_time_s, p.bytes))
    ways: dict[object, list[_Priced]] = {}
    for priced in by_time:
        ways.setdefault(_way(question, priced.parallel), []).append(priced)
    if len(ways) == len(by_time):
        return by_time[: max(_FINALISTS, 2 * top)]
    return [priced for way in list(ways.values())[: top + _SPARE_WAYS] for priced in way[:_FROM_EACH_WAY]]


def _way(question: Question, parallel: ParallelConfig) -> object:
    is_fixed = question.fixed.tp is not None and question.fixed.pp is not None
    return parallel if is_fixed else (parallel.tp, parallel.pp)


def _distinct(question: Question, ranked: list[Strategy]) -> list[Strategy]:
    """The first of each way."""
    first: dict[object, Strategy] = {}
    for each in ranked:
        first.setdefault(_way(question, each.parallel), each)
    return list(first.values())


def _left_out(
    question: Question, told: list[Strategy], fitting: list[_Priced], too_large: set[tuple[int, int]]
) -> Iterator[LeftOut]:
    """Every tp x pp that is not told of, with the first rule that it breaks, or how much slower it is."""
    fastest: dict[tuple[int, int], float] = {}
    for priced in fitting:
        key = (priced.parallel.tp, priced.parallel.pp)
        fastest[key] = min(priced.step_time_s, fastest.get(key, inf))
    ways = {(each.parallel.tp, each.parallel.pp) for each in told}
    best = min(fastest.values(), default=inf)
    for tp in _divisors(question.gpus):
        for pp in _divisors(question.gpus // tp):
            if (tp, pp) in fastest and (tp, pp) not in ways:
                yield LeftOut(tp=tp, pp=pp, reason=f"slower: {fastest[tp, pp] / best - 1:.0%} more time at its best")
            elif (tp, pp) not in fastest and (tp, pp) not in too_large:
                yield LeftOut(tp=tp, pp=pp, reason=_rule_broken(question, tp, pp))


def _rule_broken(question: Question, tp: int, pp: int) -> str:
    shape, fixed, dp = question.shape, question.fixed, question.gpus // (tp * pp)
    if gcd(shape.heads, shape.kv_heads, shape.ffn_hidden) % tp:
        return f"tp must divide heads {shape.heads}, kv_heads {shape.kv_heads} and ffn_hidden {shape.ffn_hidden}"
    if pp > shape.layers:
        return f"{shape.layers} layers cannot fill {pp} stages"
    if question.global_batch_size % dp:
        return f"a batch of {question.global_batch_size} does not divide over {dp} data ranks"
    for name, value in (("tp", tp), ("pp", pp)):
        asked, most = getattr(fixed, name), getattr(fixed, f"max_{name}")
        if asked is not None and asked != value:
            return f"{name} is fixed at {asked}"
        if most is not None and value > most:
            return f"--max-{name} {most}"
    return "none of its layouts has what else is fixed"


def job_of(question: Question, parallel: ParallelConfig) -> Job:
    """A layout as a job. Where tp does not divide the vocabulary the model is planned with a padded one, which its
    recipe must then have too (`shapes.padded`)."""
    return Job(
        shape=padded(question.shape, parallel.tp),
        cluster=question.cluster,
        layout=from_config(parallel, question.global_batch_size),
        engine=question.engine,
        seq_len=question.seq_len,
        precision=question.precision,
    )


def strategy(question: Question, parallel: ParallelConfig) -> Strategy:
    """A layout priced exactly, whether it fits or not."""
    job = job_of(question, parallel)
    return Strategy(parallel=parallel, memory=worst_rank(job), cost=step_cost(job))


def _rank(candidate: Strategy) -> tuple[float, float, int]:
    """Fastest first; layouts within a per mille of each other by memory, then by fewer tp ranks."""
    return (float(f"{candidate.cost.step_time_s:.3g}"), candidate.memory.total, candidate.parallel.tp)


def _reject(question: Question, priced: _Priced) -> Rejected:
    memory = worst_rank(job_of(question, priced.parallel))
    short = priced.bytes - question.usable_bytes
    largest = max(
        ("parameters", "gradients", "optimizer", "activations", "logits", "buffers"),
        key=lambda part: getattr(memory, part),
    )
    return Rejected(
        parallel=priced.parallel,
        reason=f"needs {short / 2**30:.1f} GiB more on pipeline rank {memory.rank}, most of all for {largest}",
        short_bytes=short,
    )


def _check(question: Question) -> None:
    if question.gpus < 1:
        raise ConfigError(f"gpus = {question.gpus}: must be at least 1")
    if question.global_batch_size < 1 or question.seq_len < 1:
        raise ConfigError("global batch and sequence length: must be at least 1")


def _families(question: Question) -> Iterator[ParallelConfig]:
    """Layouts that differ in more than recompute and the split of the data ranks: tp, pp, schedule, microbatch."""
    shape, fixed = question.shape, question.fixed
    for tp in _tensor_sizes(question):
        for pp in _divisors(question.gpus // tp):
            if pp > shape.layers or not _allowed(pp, fixed.pp) or fixed.max_pp is not None and pp > fixed.max_pp:
                continue
            dp = question.gpus // (tp * pp)
            if question.global_batch_size % dp:
                continue
            for microbatch in _divisors(question.global_batch_size // dp):
                if microbatch > _MOST_MICROBATCH or not _allowed(microbatch, fixed.microbatch_size):
                    continue
                microbatches = question.global_batch_size // (dp * microbatch)
                for schedule, virtual in _schedules(question, pp, microbatches):
                    yield ParallelConfig(
                        pp=pp,
                        dp_shard=dp,
                        tp=tp,
                        virtual_stages=virtual,
                        schedule=schedule,
                        microbatch_size=microbatch,
                        sequence_parallel=_sequence_parallel(question, tp),
                    )


def _tensor_sizes(question: Question) -> Iterator[int]:
    shape, fixed = question.shape, question.fixed
    together = gcd(shape.heads, shape.kv_heads, shape.ffn_hidden)
    for tp in _divisors(gcd(together, question.gpus)):
        if _allowed(tp, fixed.tp) and (fixed.max_tp is None or tp <= fixed.max_tp):
            yield tp


def _sequence_parallel(question: Question, tp: int) -> bool:
    if question.fixed.sequence_parallel is not None:
        return question.fixed.sequence_parallel and tp > 1
    return tp > 1 and question.seq_len % tp == 0


def _schedules(question: Question, pp: int, microbatches: int) -> Iterator[tuple[ScheduleName, int]]:
    """Schedules and stages per rank: without a pipeline 1F1B alone, which is gradient accumulation."""
    fixed = question.fixed
    names = (fixed.schedule,) if fixed.schedule is not None else question.schedules if pp > 1 else ("1f1b",)
    for name in names:
        for virtual in _stages_per_rank(name, question.shape.layers, pp):
            if _allowed(virtual, fixed.virtual_stages) and (virtual == 1 or microbatches % pp == 0):
                yield name, virtual


def _stages_per_rank(name: ScheduleName, layers: int, pp: int) -> list[int]:
    """One where the schedule has one; two on a V; else every number that divides the layers, or where none does all
    up to 8."""
    rule, deepest = STAGES_PER_RANK[name], layers // pp
    if rule.usual == 1:
        return [1]
    if pp == 1 or deepest < 2:
        return []
    if rule.most is not None:
        return [rule.usual]
    even = [v for v in range(2, deepest + 1) if layers % (pp * v) == 0]
    return even or list(range(2, min(deepest, 8) + 1))


def _price(question: Question, family: ParallelConfig) -> Iterator[_Priced]:
    """A family's layouts by the closed form: each split of the data ranks with the least recompute that fits."""
    fixed = question.fixed
    kinds = [kind for kind in _RECOMPUTE if _allowed(kind, fixed.recompute)]
    # Of a single block recompute keeps more than it saves; of several, full recompute is the leanest.
    leanest_last = question.shape.layers > family.pp
    known: Known = {}
    for split in _splits(question, family):
        for way in _strategies(question, split):
            fastest = None
            for priced in _recomputed(question, way, kinds, known, leanest_last=leanest_last):
                yield priced
                fastest = priced.parallel.recompute if priced.bytes <= question.usable_bytes else None
            # Parameters freed after each microbatch are leaner, and slower: for what does not fit as it is.
            leaner = _freed(question, way)
            if leaner is not None and fastest != kinds[0]:
                yield from _recomputed(question, leaner, kinds, known, leanest_last=leanest_last)


def _recomputed(
    question: Question, split: ParallelConfig, kinds: list[Recompute], known: Known, *, leanest_last: bool
) -> Iterator[_Priced]:
    """One with the least recompute that fits, after those with less."""
    if leanest_last and len(kinds) > 1:
        leanest = replace(split, recompute=kinds[-1])
        bytes_ = quick_worst_bytes(job_of(question, leanest))
        yield _Priced(leanest, inf, bytes_)  # the time is not asked for where less of it fits
        if bytes_ > question.usable_bytes:
            return
    for kind in kinds:
        parallel = replace(split, recompute=kind)
        job = job_of(question, parallel)
        bytes_ = quick_worst_bytes(job)
        fits = bytes_ <= question.usable_bytes
        yield _Priced(parallel, step_cost(job, exact=False, known=known).step_time_s if fits else inf, bytes_)
        if fits:
            return


def _splits(question: Question, family: ParallelConfig) -> Iterator[ParallelConfig]:
    fixed = question.fixed
    for shards in _divisors(family.dp_shard):
        replicas = family.dp_shard // shards
        if _allowed(shards, fixed.dp_shard) and _allowed(replicas, fixed.dp_replicate):
            yield replace(family, dp_shard=shards, dp_replicate=replicas)


def _strategies(question: Question, split: ParallelConfig) -> Iterator[ParallelConfig]:
    """The strategies of `sharding/` that differ at this split: parameters split and kept for a step, which is what
    SHARD_GRAD_OP is, too; over all data ranks also parameters whole and the optimizer's states split; with nothing
    split NO_SHARD."""
    fixed = question.fixed
    if question.engine.name != PARALLEL3D.name or split.dp == 1:
        yield split  # other programs' runs are told apart by dp_shard alone
        return
    names: list[ShardingName] = ["FULL_SHARD"] if split.dp_shard > 1 else ["NO_SHARD"]
    if split.dp_shard > 1 and split.dp_replicate == 1:
        names.append("SHARD_OPTIMIZER")
    if fixed.sharding is not None:
        names = [fixed.sharding]
    for name in names:
        way = replace(split, sharding=HYBRID_OF.get(name, name) if split.dp_replicate > 1 else name)
        if way.dp_replicate == 1 and name in HYBRID_OF.values():
            continue  # nothing is repeated
        if fixed.gather or fixed.reduce:
            way = replace(way, gather=fixed.gather or "step", reduce=fixed.reduce or "step")
            if next(sharding_faults(way), None) is not None:
                continue
        yield way


def _freed(question: Question, way: ParallelConfig) -> ParallelConfig | None:
    """The layout with parameters gathered and gradients reduced for each microbatch, where that is another one."""
    fixed, is_own = question.fixed, question.engine.name == PARALLEL3D.name
    several = question.global_batch_size > way.dp * way.microbatch_size
    can = is_own and several and way.dp_shard > 1 and way.sharding not in WHOLE and way.schedule in _WHOLE_BACKWARD
    return (
        replace(way, gather="microbatch", reduce="microbatch") if can and not (fixed.gather or fixed.reduce) else None
    )


def _allowed(value: object, fixed: object) -> bool:
    return fixed is None or value == fixed


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nothing_allowed(question: Question) -> str:
    shape, fixed = question.shape, question.fixed
    asked = ", ".join(f"{k} = {v}" for k, v in vars(fixed).items() if v is not None) or "nothing fixed"
    return (
        f"no layout of {question.gpus} devices divides {shape.name} (layers {shape.layers}, heads {shape.heads}, "
        f"kv_heads {shape.kv_heads}) and a batch of {question.global_batch_size} sequences "
        f"({asked}); try another number of devices or a batch that is a multiple of it"
    )
