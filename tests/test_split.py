"""Which documents are for validation: a file's name decides, and nothing else does."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data.corpus import split_documents
from parallel3d.data.source import Document

fractions = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)
name_sets = st.sets(st.text("abc/.", min_size=1, max_size=8), min_size=2, max_size=40)


def documents(names: set[str]) -> list[Document]:
    return [Document(name=name, path=Path(name), stop=1) for name in sorted(names)]


@given(name_sets, fractions)
def test_each_document_is_in_one_part_and_neither_part_is_empty(
    names: set[str], fraction: float
) -> None:
    found = documents(names)
    train, validation = split_documents(found, fraction)
    assert train
    assert validation
    assert sorted((*train, *validation), key=lambda document: document.name) == found


# Enough files, and no extreme fraction, so that seldom one is in a part only because that would be
# empty.


def test_the_split_is_pinned_so_that_a_resumed_run_validates_on_the_same_files() -> None:
    found = documents({f"{letter}.txt" for letter in "abcdefghijklmnopqrst"})
    _, validation = split_documents(found, 0.25)
    assert "".join(document.name[0] for document in validation) == "acdgjnos"
