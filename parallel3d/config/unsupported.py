"""Keys and values that people try and this version does not support, with the reason that an error line gives."""

from __future__ import annotations

# (key, value) -> the reason, and a value that would do
_VALUES = {
    ("train.precision", "fp8"): (
        "float8 is not offered: only GPUs multiply in it (H100 and newer), and this version is tested on CPUs alone; "
        "try bf16"
    ),
    ("optimizer.name", "adamw8bit"): (
        "8-bit states are not offered: their blocks depend on the layout, and another could not resume them; "
        "try adamw with optimizer.state_dtype=bf16, or adafactor"
    ),
}
_ALIASES = {"float8": "fp8", "adam8bit": "adamw8bit", "adamw_8bit": "adamw8bit"}


def hint_for_value(key: str, value: object) -> str | None:
    """Returns why this version does not support a value of a key; None for a value that nobody would expect."""
    name = str(value).lower()
    return _VALUES.get((key, _ALIASES.get(name, name)))


# A key as other programs call it, or an axis that this version lacks -> the hint.
_TWO_WAYS = "the data ranks are parallel.dp_shard (sharded) x parallel.dp_replicate (copies); try parallel.dp_shard=2"
_ELSEWHERE = {
    "dp": _TWO_WAYS,
    "data_parallel_size": _TWO_WAYS,
    "cp": "context parallelism is not there yet; try parallel.tp=2 with parallel.sequence_parallel=true",
    "ep": "expert parallelism is not there yet, nor are models with experts; try parallel.dp_shard=2",
    "tensor_parallel_size": "did you mean parallel.tp?",
    "tensor_model_parallel_size": "did you mean parallel.tp?",
    "pipeline_parallel_size": "did you mean parallel.pp?",
    "pipeline_model_parallel_size": "did you mean parallel.pp?",
    "micro_batch_size": "did you mean parallel.microbatch_size?",
    "mbs": "did you mean parallel.microbatch_size?",
    "gradient_accumulation_steps": "it follows from train.global_batch_size and parallel.microbatch_size; set those",
}


def hint_for_key(leaf: str) -> str | None:
    """Returns what to do in the place of an unsupported key, by the last part of its name; None for any other key."""
    if "offload" in leaf:
        return (
            "CPU offload is not offered: it is for GPUs, and this version is tested on CPUs alone; split more over "
            "parallel.dp_shard, or try parallel.recompute=full"
        )
    return _ELSEWHERE.get(leaf)
