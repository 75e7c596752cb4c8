"""What people ask of a recipe and this version does not have, with the reason, so that an error says more than that a
key or a value is none. No torch.
"""

from __future__ import annotations

# (key, value) -> the reason, and what would do.
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


def why_no_value(key: str, value: object) -> str | None:
    """The reason why `value` is none that the key could have; None where it is no more than a slip."""
    name = str(value).lower()
    return _VALUES.get((key, _ALIASES.get(name, name)))


def why_no_key(leaf: str) -> str | None:
    """Likewise of a key, by the last part of its name."""
    if "offload" in leaf:
        return (
            "CPU offload is not offered: it is for GPUs, and this version is tested on CPUs alone; split more over "
            "parallel.dp_shard, or try parallel.recompute=full"
        )
    return None
