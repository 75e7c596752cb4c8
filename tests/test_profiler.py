"""Profiles of some steps: which steps and ranks they hold, in a file that Perfetto opens, and a
full GPU's memory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from parallel3d.config.recipe import LoggingConfig
from parallel3d.reporting.profiler import ProfilerWindow

CONFIG = LoggingConfig(profile_steps=(2, 3), profile_ranks=(1,))
CPU = torch.device("cpu")


def test_a_window_holds_its_steps_and_no_others(tmp_path: Path) -> None:
    notes = []
    with ProfilerWindow(CONFIG, tmp_path / "profile", rank=1, device=CPU) as window:
        for step in range(1, 6):
            with window.step(step):
                torch.ones(8, 8) @ torch.ones(8, 8)
            notes.append(window.end_after(step))
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank_1.00000003.pt.trace.json.gz"
    assert notes == [None, None, f"profile of steps 2 to 3: {path}", None, None]
    names = [
        event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ]
    assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
    assert names.count("aten::mm") == 2


def test_a_gpu_that_is_full_leaves_a_picture_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": 512}])
    for device in (CPU, torch.device("cuda")):
        with (
            pytest.raises(torch.OutOfMemoryError),
            ProfilerWindow(LoggingConfig(), tmp_path, rank=3, device=device),
        ):
            raise torch.OutOfMemoryError
    (path,) = tmp_path.iterdir()
    assert path.name == "rank_3.out_of_memory.memory.pickle"
    assert pickle.loads(path.read_bytes()) == {"segments": [{"address": 512}], "device_traces": []}
