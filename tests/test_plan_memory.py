"""`parallel3d-plan memory`: the states of a model by strategy and GPUs, and narrower ones."""

from __future__ import annotations

import pytest

import parallel3d
from tests.plan_json import Said, plan_json

GIB = 2**30
LLAMA2_7B = 6_738_415_616


def test_states_are_those_of_the_zero_stages(capsys: Said) -> None:
    tree = plan_json("memory --model llama2-7b", capsys)
    assert tree["bytes_per_parameter"] == [6, 4, 8]
    # bytes of a parameter on each of 64 GPUs; in bf16 a copy of the float32 weights computes
    bytes_ = {
        "NO_SHARD": 2 + 4 + 4 + 8,
        "SHARD_OPTIMIZER": 2 + 4 + (4 + 8) / 64,
        "SHARD_GRAD_OP": 2 + (4 + 4 + 8) / 64,
        "FULL_SHARD": (4 + 4 + 8) / 64,
    }
    for name, each in bytes_.items():
        expected = each * LLAMA2_7B / GIB
        assert tree["gib_per_gpu"][name]["64"] == pytest.approx(expected, rel=1e-3)
        assert tree["gib_per_gpu"][name]["1"] == pytest.approx(18 * LLAMA2_7B / GIB, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "bytes_"),
    [({"optimizer_bits": 8}, 2), ({"optimizer_bits": 16}, 4), ({"precision": "bf16_pure"}, 4)],
)
def test_narrow_states_save_their_bytes_of_each_parameter(
    options: dict[str, object], bytes_: int
) -> None:
    layout = {"layout": {"dp_shard": 8}, "seq_len": 4096, "global_batch": 8}
    usual = parallel3d.estimate_memory(model="llama2-7b", gpu="h100", **layout)
    narrow = parallel3d.estimate_memory(model="llama2-7b", gpu="h100", **layout, **options)
    assert usual.optimizer - narrow.optimizer == (8 - bytes_) * LLAMA2_7B / 8
