"""Mistakes of people, drawn by chance from tests/mistakes.py: each is answered in a line or two, within seconds, with
the status that the documentation gives, without a traceback, and with nothing written."""

from __future__ import annotations

import pytest

from tests.mistakes import MISTAKES, answer, drawn, told

PARTS = 4
IN_EVERY_RUN = range(3, 75, 6)  # one of each of a dozen kinds


def check(numbers: range) -> None:
    mistakes = drawn()
    answers = [(number, mistakes[number], answer(mistakes[number])) for number in numbers]
    assert [told(*each) for each in answers if each[2].faults] == []


def test_a_dozen_mistakes_are_answered_in_a_line() -> None:
    check(IN_EVERY_RUN)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all_mistakes_are_answered_in_a_line(part: int) -> None:
    each = MISTAKES // PARTS
    check(range(part * each, (part + 1) * each))
