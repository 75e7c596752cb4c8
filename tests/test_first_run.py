"""The commands of docs/tutorials/first-run.md, one after the other as a newcomer types them."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.one_rank import read_metrics

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "first-run.md"


@pytest.mark.long
def test_the_page_goes_from_text_to_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the page's last step opens the model with it")
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    script = "".join(blocks)
    assert script.startswith("pip install")  # what runs this has installed it
    script = script.split("\n", 1)[1]
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = read_metrics(tmp_path / "runs/mine")
    losses = {line["step"]: line["loss"] for line in lines}
    assert losses[10] > 6.3  # log 1024 is 6.9
    assert losses[98] < 5.8 < losses[60] + 0.3
    assert "goes on from step 60" in run.stdout + run.stderr
    assert re.search(r"^step 98 +loss 5\.\d+ +perplexity", run.stdout, re.MULTILINE)
    *_, text = run.stdout.split("perplexity ")
    ours, theirs = re.split(
        r"^.* is in exported/mine: LlamaForCausalLM, float32\n(?:  .*\n)*",
        text,
        flags=re.MULTILINE,
    )
    written = ours[ours.index("\n") + 1 :]
    assert written.startswith("def ")
    assert len(written) > 20
    assert theirs == written, "transformers writes another text"
