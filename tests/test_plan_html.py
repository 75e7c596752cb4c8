"""`parallel3d-plan --html`: the page has the numbers of --json, and text does no harm in it."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from parallel3d.tools.plan import command
from tests.plan_json import Said, plan_json

PIPELINE = "--model llama3-70b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 128 --fix pp=4"
EXPERTS = "--model mixtral-8x7b --gpu h100 --gpus 64 --seq-len 4096 --global-batch 512"
TOO_LARGE = "--model llama3-70b --gpu h100 --gpus 8 --seq-len 8192 --global-batch 512"
PLANS = (
    PIPELINE,
    EXPERTS,
    TOO_LARGE,
    "--model llama3-8b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 512 --tokens 2T",
    "--model llama3-8b --gpu h100 --gpus 32 --seq-len 65536 --global-batch 64 --fix cp=4",
    "--model gpt2-large --gpu a100 --gpus 16 --seq-len 1024 --global-batch 256 --price 2",
    "--model llama3-8b --gpu h800 --gpus 32 --seq-len 8192 --global-batch 64 --schedule zb_v",
    "--model llama3-8b --gpu a100 --gpus 8 --seq-len 4096 --global-batch 8 --objective memory",
    "--model llama3-70b --framework torchtitan --cluster dgx-h100-superpod --gpus 128 "
    "--seq-len 8192 --global-batch 256",
    "--model quickstart --gpu cpu",
)
LARGE = "--gpu-memory 400GB"
EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
)
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_data(file: Path) -> dict[str, Any]:
    (data,) = _DATA.findall(file.read_text())
    found: dict[str, Any] = json.loads(data)
    return found


def evil_model(folder: Path) -> Path:
    """Writes the config.json of a small model as a file with an evil name."""
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 32000,
    }
    name = "".join(EVIL).replace("/", "|")
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("arguments", PLANS)
def test_a_page_has_the_numbers_of_json(arguments: str, tmp_path: Path, capsys: Said) -> None:
    file = tmp_path / "plan.html"
    status = 3 if arguments == TOO_LARGE else 0
    said = plan_json(f"{arguments} --html {file}", capsys, status=status)
    assert page_data(file) == said
    html = file.read_text()
    cells = [float(value) for value in re.findall(r'data-value="(.*?)"', html)]
    for each in said["strategies"]:
        at = cells.index(each["memory_gib"]["total"])
        assert cells[at + 1] == each["tokens_per_s_per_gpu"]
        assert cells[at + 2] == each["mfu"]
        assert cells[at + 3] == each["step_time_s"]
    for each in said["rejected"]:
        assert each["short_gib"] in cells
        assert each["reason"] in unescape(html)
    assert html.count("<svg") == (said["timeline"] is not None)
    layouts = said["priced"]["layouts"]
    assert len(layouts) == said["priced"]["count"] <= said["priced"]["of"]
    speeds = [each["tokens_per_s_per_gpu"] for each in layouts]
    for index, each in enumerate(said["strategies"]):
        assert speeds[index] == each["tokens_per_s_per_gpu"]
    usable = said["input"]["usable_gib"]
    for layout in layouts:
        assert layout["fits"] == (layout["memory_gib"] <= usable)


def test_the_mesh_has_the_bytes_of_each_axis(capsys: Said) -> None:
    """The bytes of Llama 3 70B with at most 21 of 80 layers on a rank, counted by hand."""
    fixed = "tp=4 dp_replicate=2 dp_shard=2 microbatch_size=1 recompute=none gather=microbatch"
    said = plan_json(f"{PIPELINE} {fixed} reduce=step --schedule 1f1b {LARGE}", capsys)
    sent = {each["axis"]: each["sent_gib"] for each in said["mesh"]["axes"]}
    hidden = 2 * 8192 * 8192 / 2**30
    microbatches = 32
    # Two all-gathers and two reduce-scatters in each pass of a block.
    assert sent["tp"] == pytest.approx(6 * hidden * 21 * microbatches)
    # Middle stages send a quarter of the hidden states, forward and backward.
    assert sent["pp"] == pytest.approx(hidden / 2 * microbatches)
    attention = 2 * 8192 * 8192 + 2 * 8192 * 1024
    block = attention + 3 * 8192 * 28672
    ends = 2 * 128256 * 8192
    parameters = (21 * block + ends) / 4 / 2**30
    # Each of 2 ranks sends half of the parameters twice per microbatch, and of the gradients once.
    gathers = 2 * parameters * microbatches
    reductions = 2 * parameters
    assert sent["dp_shard"] == pytest.approx(gathers + reductions, rel=1e-3)
    # An all-reduce of half of the gradients between two replicas.
    assert sent["dp_replicate"] == pytest.approx(reductions, rel=1e-3)


def test_cp_reduces_gradients_without_data_parallelism(capsys: Said) -> None:
    said = plan_json(f"{PLANS[4]} tp=8 dp_shard=1 sharding=NO_SHARD {LARGE}", capsys)
    sent = {each["axis"]: each["sent_gib"] for each in said["mesh"]["axes"]}
    assert sent["dp_shard"] == sent["dp_replicate"] == 0
    gradients = 4 * 8.03e9 / 8
    keys_and_values = 2 * 2 * 65536 * 128
    microbatches = 64
    # An all-reduce of gradients, and 3 all-gathers in each of 32 blocks, all over 4 ranks.
    blocks = 32 * microbatches
    whole = 2 * gradients + 3 * blocks * keys_and_values
    expected = 3 / 4 * whole
    assert sent["cp"] * 2**30 == pytest.approx(expected, rel=1e-3)


def test_experts_exchange_their_tokens(capsys: Said) -> None:
    fixed = "--fix ep=8 tp=1 pp=1 microbatch_size=2 recompute=none"
    said = plan_json(f"{EXPERTS} {fixed} {LARGE}", capsys)
    sent = {each["axis"]: each["sent_gib"] for each in said["mesh"]["axes"]}
    tokens = 2 * 4096
    microbatches = 4
    # Two copies of 7 in 8 tokens, there and back in both passes of 32 blocks.
    copies = 2 * 7 / 8 * tokens * microbatches * 4 * 32
    assert sent["ep"] == pytest.approx(2 * 4096 * copies / 2**30)


def test_only_an_earlier_page_is_replaced(tmp_path: Path, capsys: Said) -> None:
    page = tmp_path / "plan.html"
    words = ["--model", "quickstart", "--gpu", "cpu", "--html"]
    assert command.main([*words, str(page)]) == 0
    assert command.main([*words, str(page)]) == 0
    page.write_text("mine")
    recipe = tmp_path / "plan.yaml"
    for path in (page, tmp_path, Path("/dev/null")):
        assert command.main([*words, str(path), "--emit-recipe", str(recipe)]) == 2
        assert f"--html {path}: exists already" in capsys.readouterr().err
    assert command.main([*words, "/nowhere/plan.html", "--emit-recipe", str(recipe)]) == 2
    assert "--html /nowhere/plan.html: cannot be written" in capsys.readouterr().err
    assert not recipe.exists()
    assert page.read_text() == "mine"
