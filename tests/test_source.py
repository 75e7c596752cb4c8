"""The files of a corpus, and the errors where a recipe names no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.config.recipe import DataConfig
from parallel3d.data.source import Document, find_documents
from parallel3d.errors import ConfigError, DataError


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def folder(root: Path, pattern: str = "*.txt") -> DataConfig:
    return DataConfig(source="text", path=str(root), pattern=pattern)


def names(config: DataConfig) -> list[str]:
    return [document.name for document in find_documents(config)]


def refusal(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        find_documents(config)
    return str(caught.value)


def test_a_folder_is_searched_recursively_and_sorted_by_relative_path(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "b.txt": "b",
            "a/z.txt": "z",
            "a.txt": "a",
            "a/empty.txt": "",
            "notes.md": "n",
        },
    )
    assert names(folder(tmp_path)) == ["a.txt", "a/z.txt", "b.txt"]
    assert names(folder(tmp_path, "**/*.txt")) == ["a.txt", "a/z.txt", "b.txt"]
    assert names(folder(tmp_path, "a/*.txt")) == ["a/z.txt"]
    assert names(folder(tmp_path, "*")) == ["a.txt", "a/z.txt", "b.txt", "notes.md"]


@pytest.mark.parametrize(
    "config, words",
    [
        (DataConfig(path="a.md"), "data.path = a.md: not for data.source = stdlib"),
        (DataConfig(source="text", path="gone"), "data.path = gone: no such file or folder at "),
        (DataConfig(source="text", path="a.md/b"), "data.path = a.md/b: no such file or folder"),
        (
            folder(Path(), "*.txt"),
            "data.path = .: contains no text in files that match data.pattern = *.txt",
        ),
    ],
)
def test_a_recipe_that_names_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: DataConfig, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"a.md": "a", "b.md": "b", "c.py": "c"})
    assert words in refusal(config)


def test_a_binary_file_is_refused_by_its_first_zero_byte(tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_bytes(b"\x65\x01\x66\x00")
    with pytest.raises(DataError, match=r"tokens\.txt: binary file, not text: byte 3 is zero"):
        Document(name=path.name, path=path, stop=4).read()
    with pytest.raises(DataError, match="byte 3 is zero"):
        Document(name=path.name, path=path, start=2, stop=4).read()
