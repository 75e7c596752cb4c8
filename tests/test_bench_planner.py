"""`bench planner`: both planners are judged on the same runs by the same figures. The other planner
is a stand-in; the real one is asked only where it is installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

from parallel3d.errors import ConfigError
from parallel3d.planner.published.cases import CaseFile, Measurement, PublishedCase, read_cases
from parallel3d.planner.published.score import Prediction, predict_case, prediction, score
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.bench import __main__ as bench
from parallel3d.tools.bench.peers import calculon as calculon_peer
from parallel3d.tools.bench.peers.llm_analysis import LlmAnalysis
from parallel3d.tools.bench.planner import (
    CASES,
    MEMORY,
    THROUGHPUT,
    both_scores,
    row,
    same_runs,
)


@dataclass(frozen=True)
class StandIn:
    """A planner that predicts `slower` times our step and `larger` times our memory, and that every
    run fits."""

    slower: float = 1.0
    larger: float = 1.0
    unknown: str = ""  # the id of a run that it cannot express

    def cannot(self, case: PublishedCase) -> str:
        return "has no word for it" if case.id == self.unknown else ""

    def predict(self, case: PublishedCase) -> Prediction:
        ours = predict_case(case)
        step_time_s, memory_gib = self.slower * ours.step_time_s, self.larger * ours.memory_gib
        return prediction(
            case, parameters=1, fits=True, memory_gib=memory_gib, step_time_s=step_time_s
        )


@pytest.fixture(scope="module")
def published() -> CaseFile:
    return read_cases(CASES, [HARDWARE])


def measured(
    case: PublishedCase, *, step: float, memory: float, status: str = "ok"
) -> PublishedCase:
    """Returns the case with measured figures that are so many times those that we predict."""
    nothing = {
        name: None
        for name in ("metric", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
    }
    none = Measurement(status=status, **nothing, memory_gib=None, memory_kind="reserved")
    ours = predict_case(replace(case, measured=none))
    seconds, gib = step * ours.step_time_s, memory * ours.memory_gib
    timed = replace(none, metric="step_time_s", step_time_s=seconds, memory_gib=gib)
    return replace(case, measured=timed if status == "ok" else none)


def test_a_run_that_the_peer_cannot_express_is_left_out_of_both(published: CaseFile) -> None:
    first, second, third, odd = published.cases[:4]
    others = [measured(case, step=1.25, memory=0.8) for case in (first, second, third)]
    file = CaseFile(cases=(*others, measured(odd, step=9.0, memory=9.0)), skipped=())
    peer = StandIn(slower=0.5, larger=1.6, unknown=odd.id)
    both, left_out = same_runs(file, peer)
    assert left_out == {"has no word for it": 1}
    ours, theirs = score(both), score(both, peer.predict)
    middle, high = (row("t", figure, ours, theirs, of=4) for figure in THROUGHPUT)
    assert (middle.ours, middle.peer, middle.ratio) == pytest.approx(
        (25.0, 150.0, 1 / 6)
    )  # they are errors of throughput, not of time
    assert (high.ours, high.peer) == pytest.approx((25.0, 150.0))
    memory = row("m", MEMORY[0], ours, theirs, of=4)
    assert (memory.ours, memory.peer, memory.ratio) == pytest.approx((25.0, 100.0, 0.25))
    assert (memory.case, memory.bar) == ("m (3 of 4 runs)", 1.0)


def test_a_case_that_a_peer_cannot_answer_after_all_is_an_error(published: CaseFile) -> None:
    """A peer that answers fewer cases would be judged by fewer runs than ours."""

    class Refuses(StandIn):
        def predict(self, case: PublishedCase) -> Prediction:
            raise ValueError("no such layout")

    with pytest.raises(ConfigError, match="Someone: megatron-sc21-t1-1.7b: cannot be priced"):
        both_scores("Someone", Refuses(), CaseFile(cases=published.cases[:2], skipped=()))


def test_without_the_peer_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llm_analysis", None)
    monkeypatch.setitem(sys.modules, "calculon", None)
    for case, advice in (
        ("llm-analysis", "pip install llm-analysis"),
        ("Calculon", "git clone"),
    ):
        assert bench.main(["planner", "--case", case]) == 2
        said = capsys.readouterr().err
        assert advice in said and said.count("\n") == 1


@pytest.mark.skipif(find_spec("llm_analysis") is None, reason="llm-analysis is not installed")
@pytest.mark.filterwarnings("ignore")  # its own
def test_llm_analysis_is_told_the_whole_job(published: CaseFile) -> None:
    # full recompute, no ZeRO
    case = next(case for case in published.cases if case.id == "megatron-sc21-t1-1.7b")
    said = LlmAnalysis(efficiency=0.5).predict(case)
    # SC21 equation 3 repeats the head's forward less
    assert said.tflops_per_gpu == pytest.approx(0.5 * 312, rel=0.03)
    # bf16 weights, float32 gradients, AdamW: 2 + 4 + 12 bytes
    states = 18 * said.parameters / 2**30
    # inputs of 24 recomputed blocks, and the logits
    blocks = 2 * 16 * 2048 * (24 * 2304 + 51200) / 2**30
    assert said.memory_gib == pytest.approx(states + blocks, rel=0.01)
    assert said.fits
    assert LlmAnalysis(efficiency=0.25).predict(case).step_time_s == pytest.approx(
        2 * said.step_time_s
    )


@pytest.mark.skipif(find_spec("calculon") is None, reason="Calculon is not on the path")
@pytest.mark.filterwarnings("ignore")
def test_calculon_meets_the_runs_that_it_was_validated_with(published: CaseFile) -> None:
    cases = tuple(case for case in published.cases if case.source == "korthikanti")
    calculon = calculon_peer.Calculon(approximate=False)
    said = score(CaseFile(cases=cases, skipped=()), calculon.predict)
    assert said.throughput.cases == 4 and said.throughput.worst is not None
    assert said.throughput.worst < 10
