"""Amounts as people write them on a command line: 2T tokens, 80GB, 400Gbps, $2.50."""

from __future__ import annotations

import argparse
import math
import re

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {"gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6, "tib": 2.0**40, "tb": 1e12}
# Of rates the case counts: GB/s are bytes, Gb/s bits. A bare number and gb/s are what the options' names say.
_RATES = {
    **{"": 1e9, "gb/s": 1e9, "GB/s": 1e9, "GBps": 1e9, "GB/s/gpu": 1e9, "TB/s": 1e12, "MB/s": 1e6},
    **{"Gbps": 1e9 / 8, "gbps": 1e9 / 8, "Gb/s": 1e9 / 8, "Gbit/s": 1e9 / 8, "Tbps": 1e12 / 8, "Tb/s": 1e12 / 8},
}
_NUMBER = re.compile(r"([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(.*)")


def tokens(text: str) -> float:
    """A count: 2T, 300B, 1e12."""
    return _amount(text, _COUNTS, "a number of tokens, such as 300B, 2T or 1e12")


def memory_bytes(text: str) -> float:
    """Bytes of 80GB (powers of ten) or 80GiB (of two)."""
    return _amount(text, _BYTES, "an amount of memory with its unit, such as 80GB or 75GiB")


def bytes_per_s(text: str) -> float:
    """Bytes per second of 50 or 50GB/s (bytes), 400Gbps or 400Gb/s (bits)."""
    return _amount(text, _RATES, "GB/s, such as 50, 50GB/s or 400Gbps", any_case=False)


def dollars(text: str) -> float:
    """US dollars: 2.5, $2.5 or 2.5/gpu-h."""
    bare = text.strip().removeprefix("$").lower()
    for per in ("/gpu-hour", "/gpu-h", "/gpu/h", "/hour", "/h"):
        bare = bare.removesuffix(per)
    return _amount(bare, {"": 1.0}, "US dollars per GPU-hour, such as 2.5", said=text)


def fraction(text: str) -> float:
    """A share above 0 and at most 1: 0.9 or 90%."""
    share = _amount(text, {"": 1.0, "%": 0.01}, "a share above 0 and at most 1, such as 0.92")
    if share > 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share above 0 and at most 1, such as 0.92")
    return share


def share(text: str) -> float:
    """A share from 0 on and at most 1: 0.04 or 4%."""
    return 0.0 if text.strip() in ("0", "0.0", "0%") else fraction(text)


def _amount(text: str, units: dict[str, float], what: str, *, said: str | None = None, any_case: bool = True) -> float:
    found = _NUMBER.fullmatch(text.strip())
    unit = found[2].strip() if found else ""
    unit = unit.lower() if any_case else unit
    number = float(re.sub("[_,]", "", found[1])) if found else math.nan
    if unit not in units or not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{said or text!r} must be {what}")
    return number * units[unit]
