"""The rules of the house: plain English, imports that point one way, small rooms, one meaning a name.

The rules are in `tests/house.py`; each finding says its file, its line and what to do.
"""

from __future__ import annotations

import house
import pytest
from house import LINKED, ROOT


@pytest.mark.parametrize("rule", house.RULES)
def test_no_file_breaks_the_rule(rule: str) -> None:
    findings = [str(finding) for finding in house.RULES[rule]()]
    assert not findings, f"{house.RULES[rule].__doc__}\n" + "\n".join(findings)


def test_the_table_of_rooms_has_every_room_once() -> None:
    rooms = [room for floor in house.floors() for room in floor.rooms]
    assert len(rooms) == len(set(rooms)) > 20


def test_a_file_of_a_linked_folder_is_found_once() -> None:
    names = [source.name for source in house.everything()]
    assert len(names) == len(set(names))
    assert all(any(name.startswith(f"{folder}/") for name in names) for folder in (*LINKED, "parallel3d", "tests"))
    assert (ROOT / "parallel3d" / "tools").is_symlink()
