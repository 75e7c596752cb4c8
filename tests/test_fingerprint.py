"""What identifies a run's data: the same elsewhere is no difference, and each change of it is
named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import load_corpora
from parallel3d.data.fingerprint import data_fingerprint, differences
from tests.data_files import write_folder


def fingerprint(data: DataConfig) -> tuple[dict[str, Any], ...]:
    return data_fingerprint(load_corpora(data))


def write_text(folder: Path) -> str:
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"the text of file {number}")
    return str(folder)


def write_tokens(folder: Path) -> str:
    ids = np.random.default_rng(0).integers(0, 256, 200)
    return str(write_folder(folder, [ids], [ids]))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_moved_data_is_the_same_and_changed_data_is_not(kind: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    elsewhere = tmp_path / "elsewhere"
    path = write_text(here) if kind == "text" else write_tokens(here)
    data = DataConfig(
        source=kind,
        path=path,
        validation_fraction=0.25,
    )  # type: ignore[arg-type]
    then = fingerprint(data)
    shutil.move(here, elsewhere)
    moved = replace(data, path=str(elsewhere))
    assert fingerprint(moved) == then
    assert differences(then, fingerprint(moved)) == []
    if kind == "text":
        flip_a_byte(elsewhere / "3.txt")
    else:  # another crc32 is another shard
        header = elsewhere / "tokens.json"
        header.write_text(header.read_text().replace('"crc32": ', '"crc32": 1', 1))
    (difference,) = differences(then, fingerprint(moved))
    assert difference.startswith(f"checksum {then[0]['checksum']}, now ")


def test_what_differs_is_named(tmp_path: Path) -> None:
    data = DataConfig(
        source="text",
        path=write_text(tmp_path / "a"),
        validation_fraction=0.25,
    )
    then = fingerprint(data)
    (tmp_path / "a" / "more.txt").write_text("more")
    told = differences(then, fingerprint(data))
    assert len(told) == 2
    assert told[0].startswith(("train_tokens ", "validation_tokens "))
    assert differences(then, (then[0], then[0])) == ["1 sources, now 2"]
