"""Questions as users ask them, with the whole answer: the pages in tests/golden/questions were read line by line.

After a change of the program read what `PARALLEL3D_UPDATE_GOLDEN=1 pytest tests/test_plan_questions.py` changes in
them, and commit it. The recorded score that ranges come from is the test's own, so that a new score changes no page.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan import hardware as plan_hardware
from parallel3d.tools.plan import inputs as plan_inputs
from parallel3d.tools.plan import limits as plan_limits
from parallel3d.tools.plan import memory as plan_memory
from parallel3d.tools.plan import recommend as plan_recommend

GOLDEN = Path(__file__).parent / "golden" / "questions"
FIGURES = {
    "throughput_median": 8.2,
    "throughput_p90": 20.0,
    "throughput_bias": 2.0,
    "memory_median": 4.8,
    "memory_p90": 20.0,
    "memory_bias": 0.0,
    "fit_accuracy": 93.0,
}
ACCURACY = {
    "date": "2026-01-02",
    "throughput_runs": 429,
    "memory_runs": 104,
    "fit_runs": 637,
    "blind": FIGURES,
    "fitted": FIGURES | {"throughput_median": 3.7, "memory_median": 2.8},
    "not_anchored": FIGURES,
    "anchored": FIGURES | {"throughput_median": 5.5, "throughput_p90": 15.0, "memory_median": 4.1, "memory_p90": 19.0},
    "spread": {
        "level": 0.8,
        "throughput": {
            "known": {"all": 0.12, "many": 0.13, "sharded_many": 0.25},
            "unknown": {"all": 0.15, "many": 0.16, "sharded_many": 0.38},
            "anchored": {"all": 0.09, "many": 0.16, "sharded_many": 0.37},
        },
        "memory": {
            "fitted": {"all": 0.07},
            "known": {"all": 0.12, "many": 0.14},
            "unknown": {"all": 0.18, "many": 0.22},
            "anchored": {"all": 0.16, "many": 0.17},
        },
        "data_sheet": 0.11,
    },
    "runs_by_hardware": {"h100-80gb": 87, "a100-80gb": 309, "a100-40gb": 39, "v100-32gb": 3},
}
GEMMA = {
    "model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "max_position_embeddings": 8192,
}  # fmt: skip
QUESTIONS = {
    # a laptop, one card, one box
    "laptop": "--model gpt2 --gpu cpu --gpus 1 --seq-len 1024 --global-batch 8",
    "one_4090": "--model gpt2 --gpu 4090 --gpus 1 --seq-len 1024 --global-batch 64 --tokens 10B",
    "8b_on_8_a100": "--model llama3-8b --gpu a100 --gpus 8 --seq-len 4096 --global-batch 256 --tokens 100B",
    "8b_on_8_h100_long": "--model qwen3-8b --gpu h100 --gpus 8 --seq-len 32768 --global-batch 64",
    "8b_on_two_boxes_of_3090": "--model llama3-8b --gpu 3090 --gpus 16 --seq-len 4096 --global-batch 128 --tokens 20B",
    "8b_on_b200_data_sheet": "--model llama3-8b --gpu b200 --gpus 8 --seq-len 8192 --global-batch 128 --tokens 1T",
    "8b_on_mi300x": "--model llama3-8b --gpu mi300x --gpus 8 --seq-len 8192 --global-batch 128",
    "phi_on_l40s": "--model phi3-mini --gpu l40s --gpus 8 --seq-len 4096 --global-batch 128",
    "gemma_of_a_file": "--model gemma.json --gpu a100 --gpus 16 --seq-len 8192 --global-batch 128",
    "70b_on_8_h100": "--model llama3-70b --gpu h100 --gpus 8 --seq-len 8192 --global-batch 128",
    # clusters, days and prices
    "70b_on_p5": "--model llama3-70b --gpu p5.48xlarge --gpus 256 --seq-len 8192 --global-batch 512 --tokens 1T",
    "70b_on_azure": "--model llama3-70b --gpu nd-h200-v5 --gpus 64 --seq-len 8192 --global-batch 512 --tokens 200B",
    "70b_fixed": "--model llama3-70b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 256 --fix tp=8 pp=4",
    "gpt3_on_1024_a100": "--model gpt3-175b --gpu a100 --gpus 1024 --seq-len 2048 --global-batch 1536 --tokens 300B",
    "70b_measured": "--model llama3-70b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 256 --fix tp=8 pp=4 "
    "--measured mfu=36% memory_gib=52 at tp=8 pp=2 dp_shard=4",
    "measured_in_another_unit": "--model llama3-8b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 256 "
    "--measured tokens_per_s=6500 at tp=2",
    "405b_on_1024_h100": "--model llama3-405b --gpu h100 --gpus 1024 --seq-len 8192 --global-batch 512 "
    "--why tp=8,pp=16",
    "405b_as_meta": "--model llama3-405b --gpu meta-24k-roce --gpus 16384 --seq-len 8192 --global-batch 2048 "
    "--tokens 15.6T",
    "70b_of_megatron": "--model llama3-70b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 128 "
    "--engine megatron-core",
    "sweep_on_a3": "sweep --model llama3-8b --gpu a3-high --gpus 8-128 --seq-len 8192 --global-batch 512 --tokens 1T "
    "--max-days 30",
    "how_few_for_405b": "limits cluster --model llama3-405b --gpu h200 --seq-len 8192 --global-batch 512",
    "memory_of_a_layout": "memory --model llama3-70b --gpu h100 --layout tp=8,pp=4,dp_shard=2 --seq-len 8192 "
    "--global-batch 128",
    # mixtures and long sequences
    "mixtral_here": "--model mixtral-8x7b --gpu h100 --gpus 64 --seq-len 4096 --global-batch 256",
    "mixtral": "--model mixtral-8x7b --gpu h100 --gpus 64 --seq-len 4096 --global-batch 256 --engine megatron-core "
    "--tokens 1T",
    "qwen3_30b": "--model qwen3-30b-a3b --gpu h100 --gpus 8 --seq-len 4096 --global-batch 512 --engine automodel",
    "qwen3_235b": "--model qwen3-235b-a22b --gpu h100 --gpus 256 --seq-len 4096 --global-batch 2048 "
    "--engine megatron-bridge",
    "deepseek_v3": "--model deepseek-v3 --gpu h800 --gpus 2048 --seq-len 4096 --global-batch 15360 "
    "--engine megatron-bridge --tokens 14.8T --price 2",
    "8b_of_128k_tokens": "--model llama3-8b --gpu h100 --gpus 64 --seq-len 131072 --global-batch 32 "
    "--engine megatron-core",
    "shape_of_deepseek": "models deepseek-v3",
    # wrong or impossible
    "cp_here": "--model llama3-8b --gpu h100 --gpus 8 --seq-len 131072 --global-batch 8 --fix cp=8",
    "37_gpus": "--model llama3-8b --gpu h100 --gpus 37 --seq-len 8192 --global-batch 64",
    "no_such_model": "--model llama4-9b --gpu h100 --gpus 8 --seq-len 8192 --global-batch 64",
}  # fmt: skip
# What takes more than a second of a core.
SLOW = (
    *("deepseek_v3", "qwen3_235b", "qwen3_30b", "how_few_for_405b", "405b_on_1024_h100", "405b_as_meta"),
    *("gpt3_on_1024_a100", "70b_of_megatron", "sweep_on_a3", "70b_on_p5", "70b_on_8_h100", "70b_on_azure"),
)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for user in (plan_recommend, plan_inputs, plan_hardware, plan_limits, plan_memory):
        monkeypatch.setattr(user, "recorded_accuracy", lambda: ACCURACY)
    monkeypatch.chdir(tmp_path)
    Path("gemma.json").write_text(json.dumps(GEMMA))


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.long] * (each in SLOW)) for each in QUESTIONS])
def test_the_answer_is_the_one_that_was_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = plan.main(shlex.split(QUESTIONS[name]))
    said = capsys.readouterr()
    told = f"$ parallel3d-plan {QUESTIONS[name]}\n{said.out}{said.err}(exit status {status})\n"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("PARALLEL3D_UPDATE_GOLDEN"):
        file.write_text(told)
    assert told == file.read_text()
    assert told.isascii() and "Traceback" not in told
    assert max(map(len, said.out.splitlines()), default=0) <= 100


def test_every_page_has_its_question() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(QUESTIONS) and len(QUESTIONS) == 32
