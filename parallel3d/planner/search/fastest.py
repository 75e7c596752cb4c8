"""The best layouts for a model on a cluster: the whole space of `ParallelConfig` (`space`), each way of cutting the
model in the order of predicted step time (`cut`): by a closed form first, the finalists by simulating their schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import worst_rank
from parallel3d.planner.search.candidate import planned_run, strategy
from parallel3d.planner.search.question import Answer, NotShown, Question, Rejected, Strategy
from parallel3d.planner.search.space import families, tp_rule
from parallel3d.planner.search.tp_pp_search import Candidate, TpPpSearch
from parallel3d.planner.time.step import BlockTimeCache
from parallel3d.shards import divisors

_FINALISTS = 20
_FROM_EACH_WAY, _SPARE_WAYS = 2, 2


def search(question: Question, *, top: int = 10) -> Answer:
    """The best `top` strategies, each another way of cutting the model: of every tp x pp the best that there is in
    microbatch, virtual stages, split of the data ranks and recompute, which a run can change without changing what its
    ranks hold. Where the question fixes both tp and pp, those are what differs.

    Raises ConfigError where the question allows no layout at all, whatever the memory."""
    cuts = _cuts(question)
    found, best = _fastest(question, cuts, top, everywhere=True)
    nearest = [priced for cut in cuts if cut not in best and (priced := cut.leanest()) is not None]
    return Answer(
        strategies=tuple(found),
        rejected=tuple(_reject(question, priced) for priced in sorted(nearest, key=lambda p: p.bytes)),
        left_out=tuple(_left_out(question, found, cuts, best)),
        considered=sum(cut.size for cut in cuts),
        checked=sum(cut.checked for cut in cuts),
        fitting=sum(cut.fitting for cut in cuts),
    )


def fastest(question: Question, *, top: int = 1, blocks: BlockTimeCache | None = None) -> list[Strategy]:
    """`search`'s strategies alone; `blocks`: what searches of the same model on other numbers of devices have computed.
    Raises ConfigError likewise."""
    return _fastest(question, _cuts(question, blocks), top, everywhere=False)[0]


def leanest(question: Question, *, top: int = 10) -> list[Strategy]:
    """Of each way of cutting the model the layout that needs least memory, those that fit, the leanest first. Raises
    ConfigError likewise."""
    found = sorted((priced for cut in _cuts(question) if (priced := cut.leanest())), key=lambda priced: priced.bytes)
    return [strategy(question, each.parallel) for each in found[:top] if each.bytes <= question.usable_bytes]


def one_that_fits(question: Question) -> ParallelConfig | None:
    """Any layout that fits: found much sooner than the best. None where none does, and where the question allows no
    layout at all."""
    try:
        _check(question)
    except ConfigError:
        return None
    by_way: dict[tuple[int, int], list[ParallelConfig]] = {}
    for family in families(question):
        by_way.setdefault((family.tp, family.pp), []).append(family)
    # One layout of each way first, the smallest microbatch without virtual stages, which is most often the leanest.
    for few in (True, False):
        for (tp, pp), own in by_way.items():
            found = TpPpSearch(question, tp, pp, own[:1] if few else own[1:]).one_that_fits()
            if found is not None:
                return found.parallel
    return None


def _cuts(question: Question, blocks: BlockTimeCache | None = None) -> list[TpPpSearch]:
    _check(question)
    shared: BlockTimeCache = {} if blocks is None else blocks
    by_way: dict[tuple[int, int], list[ParallelConfig]] = {}
    for family in families(question):
        by_way.setdefault((family.tp, family.pp), []).append(family)
    cuts = [cut for (tp, pp), own in by_way.items() if (cut := TpPpSearch(question, tp, pp, own, shared)).size]
    if not cuts:
        raise ConfigError(_nothing_allowed(question))
    return cuts


def _fastest(
    question: Question, cuts: list[TpPpSearch], top: int, *, everywhere: bool
) -> tuple[list[Strategy], dict[TpPpSearch, Candidate]]:
    """The best, priced exactly; and of each way of cutting the model, or unless `everywhere` of those that may have one
    of them, the best by the closed form."""
    best: dict[TpPpSearch, Candidate] = {}
    orders: dict[TpPpSearch, Iterator[Candidate]] = {}
    for cut in sorted(cuts, key=lambda cut: cut.least_s):
        times = sorted(priced.step_time_s for priced in best.values())
        is_enough = not everywhere and len(times) >= top + _SPARE_WAYS
        orders[cut] = cut.fastest(within_s=times[top + _SPARE_WAYS - 1] if is_enough else inf)
        priced = next(orders[cut], None)
        if priced is not None:
            best[cut] = priced
    is_fixed = question.fixed.tp is not None and question.fixed.pp is not None
    ways = sorted(best, key=lambda cut: (best[cut].step_time_s, best[cut].bytes))[: top + _SPARE_WAYS]
    more = max(_FINALISTS, 2 * top) if is_fixed else _FROM_EACH_WAY
    finalists = [priced for cut in ways for priced in (best[cut], *islice(orders[cut], more - 1))]
    ranked = sorted((strategy(question, priced.parallel) for priced in finalists), key=_rank)
    first: dict[object, Strategy] = {}
    for each in ranked:
        first.setdefault(each.parallel if is_fixed else (each.parallel.tp, each.parallel.pp), each)
    return list(first.values())[:top], best


def _left_out(
    question: Question, told: list[Strategy], cuts: list[TpPpSearch], best: dict[TpPpSearch, Candidate]
) -> Iterator[NotShown]:
    """Every tp x pp that is not told of and has layouts that fit, with how much slower it is; or has none at all, with
    the first rule that it breaks."""
    ways = {(each.parallel.tp, each.parallel.pp) for each in told}
    by_size = {(cut.tp, cut.pp): cut for cut in cuts}
    least_s = min((priced.step_time_s for priced in best.values()), default=0.0)
    for tp in divisors(question.gpus):
        for pp in divisors(question.gpus // tp):
            cut = by_size.get((tp, pp))
            if cut is None:
                yield NotShown(tp=tp, pp=pp, reason=_rule_broken(question, tp, pp))
            elif cut in best and (tp, pp) not in ways:
                slower = best[cut].step_time_s / least_s - 1
                yield NotShown(tp=tp, pp=pp, reason=f"slower: {slower:.0%} more time at its best")


def _rule_broken(question: Question, tp: int, pp: int) -> str:
    shape, fixed, dp = question.shape, question.fixed, question.gpus // (tp * pp)
    rule = tp_rule(question, tp)
    if rule is not None:
        return f"tp {rule}"
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


def _rank(candidate: Strategy) -> tuple[float, float, int]:
    """Fastest first; layouts within a per mille of each other by memory, then by fewer tp ranks."""
    return (float(f"{candidate.cost.step_time_s:.3g}"), candidate.memory.total, candidate.parallel.tp)


def _reject(question: Question, priced: Candidate) -> Rejected:
    memory = worst_rank(planned_run(question, priced.parallel))
    short = priced.bytes - question.usable_bytes
    largest = max(
        ("parameters", "gradients", "optimizer", "activations", "logits", "buffers"),
        key=lambda part: getattr(memory, part),
    )
    return Rejected(
        parallel=priced.parallel,
        reason=f"needs {short / GIB:.1f} GiB more on pipeline rank {memory.rank}, most of all for {largest}",
        short_bytes=short,
    )


def _check(question: Question) -> None:
    if question.gpus < 1:
        raise ConfigError(f"gpus = {question.gpus}: must be at least 1")
    if question.global_batch_size < 1 or question.seq_len < 1:
        raise ConfigError("global batch and sequence length: must be at least 1")


def _nothing_allowed(question: Question) -> str:
    shape, fixed = question.shape, question.fixed
    asked = ", ".join(f"{k} = {v}" for k, v in vars(fixed).items() if v is not None) or "nothing fixed"
    return (
        f"no layout of {question.gpus} devices divides {shape.name} (layers {shape.layers}, heads {shape.heads}, "
        f"kv_heads {shape.kv_heads}) and a batch of {question.global_batch_size} sequences "
        f"({asked}); try another number of devices or a batch that is a multiple of it"
    )
