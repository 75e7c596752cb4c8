"""What a case says in words, read into values. Every phrase that is looked for stands in one of these tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.model.flops import FlopsDefinition

RunOption = Literal[
    "names_transformer_impl",  # the run is Megatron-Core's, whose options name a transformer implementation
    "deterministic",  # attention's backward without atomics, gradients added by kernels of their own
    "softmax_attention",  # matrix products around a softmax in the place of a tiled kernel
    "async_tp",  # tp traffic cut into pieces beside the matrix products
    "framework_norms",  # norms of the framework's own operators (Hagemann et al. 2023, section 4)
    "light_ends",  # the first and the last stage have one layer less
]
_OPTION_PATTERNS: dict[RunOption, str] = {  # what the notes of a case say where its `options` say nothing
    "names_transformer_impl": r"transformer-impl",
    "deterministic": r"deterministic-mode",
    "softmax_attention": r"attention backend unfused|transformer-impl local",
    "async_tp": r"(?i)async[ -]?tp(?: on\b|;)",
    "framework_norms": r"flash_attention2'",
    "light_ends": r"one layer less",
}
_DEVICES = (  # part of `hardware.gpu` in lower case -> hardware file; the first that matches decides
    ("h100-96", "h100-96gb-hbm2e"),
    ("h100-80gb-pcie", "h100-pcie"),
    ("h100", "h100-80gb"),
    ("h800", "h100-80gb"),
    ("h200", "h200"),
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("a800", "a800-80gb"),
    ("a100-40", "a100-40gb"),
    ("a100", "a100-80gb"),
    ("v100", "v100-32gb"),
    ("mi300", "mi300x"),
    ("mi250", "mi250x"),
)
_SCHEDULES = {"gpipe": "gpipe", "afab": "gpipe", "zb-1p": "zb-1p", "zb-2p": "zb-2p"}  # others are taken as 1F1B
_COUNTS = {None: 1, "four": 4, "eight": 8}
_OMNI_PATH = re.compile(r"(\d+|eight|four)\s*(?:x\s*)?opa links")
_NETWORK = re.compile(r"(?:\b(\d+|eight|four)(?:\s*x\s*|\s+)(?:[a-z]+\s+)?)?\b(\d{2,4})\s*(?:gbps|gb/s|gb\b|gbit)")
_OMNI_PATH_GBIT = 100.0  # one link (Intel Omni-Path 100 series)
_NVLINK_GB_PER_S = 25.0  # one NVLink 3 or 4, a direction


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """What a case's memory figure is: a kind of memory, on one of the pipeline ranks."""

    kind: MemoryKind
    rank: Literal["worst", "first", "last"]


def run_options(stated: Mapping[str, Any], notes: str) -> frozenset[RunOption]:
    """The options of a run: those that its case states, and else those that its notes speak of."""
    names: tuple[RunOption, ...] = get_args(RunOption)
    return frozenset(name for name in names if stated.get(name, re.search(_OPTION_PATTERNS[name], notes)))


def dropout_of(notes: str) -> float | None:
    """The dropout that the notes give; None where they give no figure."""
    found = re.search(r"dropout (\d*\.\d+)", notes)
    return float(found.group(1)) if found else None


def year_of(source: str) -> int:
    """The latest year in the words of a source, 0 where it has no year."""
    return max((int(found) for found in re.findall(r"(?<!\d)20[12]\d(?=[-_./01]|\b)", source)), default=0)


def hardware_file(gpu: str) -> str | None:
    """The hardware file of a device by its name in lower case; None where no table has it."""
    return next((file for part, file in _DEVICES if part in gpu), None)


def schedule_of(name: str) -> str:
    """Returns the schedule of a pipeline without virtual stages by its name in lower case."""
    return _SCHEDULES.get(name, "1f1b")


def precision_of(train: Mapping[str, Any], gpu: str) -> str:
    """The precision of a run by the words of its section `train`: fp8, fp16 or bf16, which V100s do not have."""
    text = str(train.get("precision") or "").lower()
    if train.get("fp8") or "fp8" in text:
        return "fp8"
    return "fp16" if "fp16" in text and "bf16" not in text or "V100" in gpu else "bf16"


def network_gb_per_s(text: str, gpus_per_node: int) -> float | None:
    """Reads GB/s per device and direction from a source's own words, None where they state no figure."""
    words = text.lower()
    if omni := _OMNI_PATH.search(words):
        return _count(omni.group(1)) * _OMNI_PATH_GBIT / 8 / gpus_per_node
    found = _NETWORK.search(words)
    if not found:
        return None
    return _count(found.group(1)) * float(found.group(2)) / 8 / (1 if "per gpu" in words else gpus_per_node)


def node_gb_per_s(text: str) -> float | None:
    """GB/s per device and direction within a node by the number of NVLinks, None where it is not stated."""
    links = re.search(r"(\d+) inter-gpu connects", text.lower())
    return int(links.group(1)) * _NVLINK_GB_PER_S if links else None


def flops_definition(text: str) -> FlopsDefinition:
    """What a source's TFLOP/s or MFU counts, from its own words; the plan's own definition where they say nothing."""
    words = text.lower()
    if "8 x 12" in words:
        return "blocks_recompute"
    if "6 n s" in words or "6n" in words:
        return "palm"
    if "96 b s l h^2" in words or ("recompute" in words or "recomputation" in words) and "no recompute" not in words:
        return "megatron_recompute"
    return "causal" if "causal attention once" in words else "model"


def measured_memory(note: str, *, moments_at_start: bool) -> MeasuredMemory:
    """Reads from its note which memory a figure is. A note that names no kind is taken to mean what is reserved.

    `moments_at_start`: the program makes the optimizer's states before its first step, so that a figure "after 1
    iteration" has them too.
    """
    note = note.lower()
    rank: Literal["worst", "first", "last"] = (
        "last" if "last rank" in note else "first" if "rank 0" in note else "worst"
    )
    if "nvidia-smi" in note:
        return MeasuredMemory(kind="device", rank=rank)
    allocated, reserved = note.find("allocated"), note.find("reserved")
    if allocated >= 0 and (reserved < 0 or allocated < reserved) and "which of the two" not in note:
        is_first = re.search(r"after 1 iteration\b", note) and not moments_at_start
        return MeasuredMemory(kind="allocated in the first step" if is_first else "allocated", rank=rank)
    return MeasuredMemory(kind="reserved", rank=rank)


def _count(text: str | None) -> int:
    return _COUNTS[text] if text in _COUNTS else int(text or 1)
