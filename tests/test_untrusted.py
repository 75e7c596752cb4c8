"""What files of strangers say: names of other files, and text that would steer a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel3d.convert.pretrained import open_safetensors
from parallel3d.errors import CheckpointError, printable
from parallel3d.launch.failure import print_error
from parallel3d.tools.checkpoint.command import main as checkpoint
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.data.command import main as data

Said = pytest.CaptureFixture[str]
INDEX = "model.safetensors.index.json"
STEERING = "\x1b[2J\x1b]0;title\x07\x1b[8m\r\x08\x9b1A\u202e\ud800"


def opened(folder: Path, index: str) -> str:
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors") as told:
        open_safetensors(folder)
    return str(told.value)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "", "a\nb", 3])
def test_a_name_of_an_index_that_leads_out_of_the_folder_is_refused(
    tmp_path: Path, name: object
) -> None:
    message = opened(tmp_path, json.dumps({"weight_map": {"w": name}}))
    assert "is not the name of a file in this folder" in message or "unhashable" in message


def test_text_of_files_cannot_steer_a_terminal(tmp_path: Path, capsys: Said) -> None:
    assert printable("a\tb\nc é 語 \x1b[1mbold\x1b[0m") == "a\tb\nc é 語 \x1b[1mbold\x1b[0m"
    assert printable(STEERING).isprintable()
    print_error(f"a fault: {STEERING}")
    Reply(page=[STEERING]).print(as_json=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": STEERING}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert checkpoint(["import", str(tmp_path)]) == 2
    header = {
        "format": 1,
        "dtype": STEERING,
        "vocab_size": 3,
        "largest_id": 2,
        "end_of_text": None,
        "tokenizer": None,
    }
    (tmp_path / "tokens.json").write_text(json.dumps(header | {"train": [], "validation": []}))
    assert data(["merge", str(tmp_path), "--out", str(tmp_path / "both")]) == 65
    assert data(["inspect", str(tmp_path)]) == 65
    said = "".join(capsys.readouterr())
    assert len(said.splitlines()) == 5
    assert said.replace("\n", "").isprintable()
