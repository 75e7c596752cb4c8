"""Which documents are for validation: a file's name decides, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from parallel3d.data.corpus import split_documents
from parallel3d.data.source import Document
from parallel3d.errors import ConfigError

fractions = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)
name_sets = st.sets(st.text("abc/.", min_size=1, max_size=8), min_size=2, max_size=40)


def documents(names: set[str]) -> list[Document]:
    return [Document(name=name, path=Path(name), stop=1) for name in sorted(names)]


@given(name_sets, fractions)
def test_each_document_is_in_one_part_and_neither_part_is_empty(
    names: set[str], fraction: float
) -> None:
    found = documents(names)
    split = split_documents(found, fraction)
    assert split.train
    assert split.validation
    assert sorted((*split.train, *split.validation), key=lambda document: document.name) == found


# Enough files, and no extreme fraction, so that seldom one is in a part only because that would be
# empty.
@given(
    st.sets(st.text("abcdef", min_size=1), min_size=12, max_size=40),
    st.text("xyz", min_size=1),
    st.floats(0.3, 0.7),
)
def test_adding_a_file_moves_no_other(names: set[str], added: str, fraction: float) -> None:
    before, after = (
        split_documents(documents(names), fraction),
        split_documents(documents({*names, added}), fraction),
    )
    # else one may be there only to fill an empty part
    assume(len(before.train) > 1 and len(before.validation) > 1)
    assert set(before.train) <= set(after.train)
    assert set(before.validation) <= set(after.validation)


def test_the_split_is_pinned_so_that_a_resumed_run_validates_on_the_same_files() -> None:
    found = documents({f"{letter}.txt" for letter in "abcdefghijklmnopqrst"})
    assert (
        "".join(document.name[0] for document in split_documents(found, 0.25).validation)
        == "acdgjnos"
    )


@given(st.integers(2, 10**12), fractions)
def test_a_single_file_gives_its_last_bytes(size: int, fraction: float) -> None:
    split = split_documents([Document(name="a", path=Path("a"), stop=size)], fraction)
    (train,), (validation,) = split.train, split.validation
    assert (train.start, train.stop, validation.stop) == (0, validation.start, size)
    assert 0 < train.stop < size
    assert abs((validation.stop - validation.start) - size * fraction) <= 1


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_fraction_that_leaves_a_part_empty_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError) as caught:
        split_documents(documents({"a", "b"}), fraction)
    assert (
        str(caught.value)
        == f"data.validation_fraction = {fraction}: must lie between 0 and 1; try 0.05"
    )
