"""Reads published runs in the format of tools/cases (its README lists the fields).

Missing fields are taken from the section `inferred`, then from defaults, and listed in `filled`. If
a choice is given as free text, the first word of words.yaml that occurs in it decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from parallel3d.config.recipe import Recompute
from parallel3d.config.yaml_text import read_short
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import Cluster, load_cluster, with_links
from parallel3d.planner.hardware.framework import (
    STACKS,
    FrameworkProfile,
    in_precision,
)
from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.memory.ranks import memory_by_rank, needed_bytes
from parallel3d.planner.model.experts import Experts
from parallel3d.planner.model.named import named_shape
from parallel3d.planner.model.parameters import FlopsDefinition
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.model.shapes import FeedForward, ModelShape, Positions


def _first_number(value: Any) -> Any:
    """Returns the first integer of a text such as "about 128,000", or the value itself."""
    found = re.search(r"\d+", value.replace(",", "")) if isinstance(value, str) else None
    return int(found[0]) if found else value


Count = Annotated[int, BeforeValidator(_first_number), Field(ge=1)]
Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_WORDS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text()
)
# Keys of other collections, whose text determines a field if its own key is missing.
_NOTES = {
    "flops": "tflops_definition",
    "memory_kind": "memory_note",
    "memory_rank": "memory_note",
}
# Names of frameworks with the default stacks `softmax` (for GELU models before Hopper) and `fused`.
_OLD_STACK = re.compile("megatron-(lm|deepspeed)$|nemo megatron|neox|zero-bubble|^deepspeed zero")
_FUSED = re.compile("megatron|core|nemo|bridge|megascale|flagscale|primus|llm.c")
_RECOMPUTES: tuple[Recompute, ...] = ("none", "every_n", "full")


class _Model(BaseModel):
    name: str = "unnamed"
    shape: str | None = None  # known model; only `layers` and `seq_len` override it
    # 0: not stated
    layers: Count = 0
    hidden: Count = 0
    heads: Count = 0
    kv_heads: Count = 0
    head_dim: Count = 0
    ffn_hidden: Count = 0
    ffn_kind: FeedForward = "gelu"
    vocab: Count = 50257
    seq_len: Count = 2048
    tied_embeddings: bool | None = None
    positional: Positions | None = None
    experts: Experts | None = None


class _Hardware(BaseModel):
    gpu: str = "a100-80gb"  # device name, matched with the names of hardware files
    gpus: Count
    gpus_per_node: Count | None = None
    network_gb_per_s: Figure | None = None
    node_gb_per_s: Figure | None = None


class _Parallel(BaseModel):
    tp: Count = 1
    pp: Count = 1
    vpp: Annotated[int, Field(ge=0)] = 1
    schedule: str = "1f1b"
    stage_boundaries: tuple[int, ...] | None = None
    dp_shard: Count = 1
    cp: Count = 1
    ep: Count = 1
    etp: Count = 1
    fsdp: bool = False
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    optimizer_shard: Annotated[int, Field(ge=0)] = 0
    sequence_parallel: bool | None = None  # None: True if attention is flash


class _Train(BaseModel):
    global_batch_sequences: Count = 0
    micro_batch: Count = 1
    precision: Literal["fp8", "bf16", "bf16_pure", "fp16", "fp32"] = "bf16"
    activation_recompute: Literal["none", "selective", "op", "every_n", "full"] | None = None
    recompute_every: Count = 2
    attention: Literal["flash", "softmax"] | None = None  # None: default of the stack
    dropout: bool | None = None
    gradient_bytes: Figure | None = None
    compile: bool = False
    fp8: bool = False


class Measurement(BaseModel):
    """The measured values as the source states them."""

    status: Literal["ok", "oom"] = "ok"
    step_time_s: Figure | None = None
    tokens_per_s_per_gpu: Figure | None = None
    samples_per_s_per_gpu: Figure | None = None
    tflops_per_gpu: Figure | None = None
    mfu_pct: Figure | None = None
    flops: FlopsDefinition = "model"
    peak_memory_gib: Figure | None = None
    memory_kind: MemoryKind = "reserved"
    memory_rank: Literal["worst", "first", "last"] = "worst"

    def speed(self, seq_len: int) -> tuple[str, float] | None:
        """Returns the name and value of the speed to compare, or None if it is unknown or the run
        ran out of memory."""
        if self.status != "ok":
            return None
        samples = self.samples_per_s_per_gpu or 0
        tokens = self.tokens_per_s_per_gpu or samples * seq_len
        figures = {
            "step_time_s": self.step_time_s,
            "tokens_per_s_per_gpu": tokens,
            "tflops_per_gpu": self.tflops_per_gpu,
            "mfu": self.mfu_pct and self.mfu_pct / 100,
        }
        return next(((name, value) for name, value in figures.items() if value), None)


@dataclass(frozen=True)
class PublishedCase:
    """A published run and its measurements."""

    id: str
    source: str
    stack: str
    run: PlannedRun
    measured: Measurement
    speed: tuple[str, float] | None  # Name and value of the speed to compare.
    tags: tuple[str, ...]
    apart: str  # reason to exclude it from the totals, or ""
    filled: tuple[str, ...]  # Fields that the source omits, with the origin of their values.


@dataclass(frozen=True)
class CaseFile:
    """The valid cases of a file, and (id, reason) of each invalid one."""

    cases: tuple[PublishedCase, ...]
    skipped: tuple[tuple[str, str], ...]


def read_cases(path: Path, hardware: list[Path]) -> CaseFile:
    """Reads the cases of a file: a JSON list, or one JSON object per line.

    Invalid cases are skipped with a reason.

    Args:
        path: File with the cases.
        hardware: Folders with hardware files.

    Raises:
        ConfigError: The file cannot be read, or is not a list of cases.
    """
    cases = []
    skipped = []
    for number, tree in enumerate(_trees(path), start=1):
        name = f"row {number}"
        try:
            if not isinstance(tree, Mapping):
                raise ValueError("a case must be an object with sections model, hardware, ...")
            name = str(tree.get("id") or name)
            cases.append(read_case(name, tree, hardware))
        except (ConfigError, ValueError, TypeError, ArithmeticError, LookupError) as problem:
            skipped.append((name, str(problem)))
    return CaseFile(cases=tuple(cases), skipped=tuple(skipped))


def read_case(name: str, tree: Mapping[str, Any], hardware: list[Path]) -> PublishedCase:
    """Parses a case. Raises ValueError or ConfigError if it is not valid."""
    return _Case(name, tree, hardware).published()


_LARGEST_BYTES = 16 << 20


def _trees(path: Path) -> list[Any]:
    try:
        text = read_short(path, "a case has a few kB", _LARGEST_BYTES).decode()
        is_lines = text.lstrip().startswith("{")
        trees = [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
    except (OSError, ValueError, RecursionError) as problem:
        why = getattr(problem, "strerror", problem)
        raise ConfigError(f"{path}: cannot be read as cases ({why})") from problem
    if not isinstance(trees, list) or not trees:
        raise ConfigError(f"{path}: must be a JSON list of cases, or one case per line")
    return trees


_Kind = TypeVar("_Kind", bound=BaseModel)


class _Case:
    """A case with its parsed sections."""

    def __init__(self, name: str, tree: Mapping[str, Any], hardware: list[Path]) -> None:
        self.name = name
        self.tree = tree
        self.filled: list[str] = []
        self.model = self._section("model", _Model)
        self.hardware = self._section("hardware", _Hardware)
        self.parallel = self._section("parallel", _Parallel)
        self.train = self._section("train", _Train)
        self.measured = self._section("measured", Measurement)
        self.cluster = _cluster(self.hardware, hardware)
        self.precision = "fp8" if self.train.fp8 else self.train.precision
        self.framework = self._framework()

    def _section(self, name: str, kind: type[_Kind]) -> _Kind:
        """Parses a section. Raises ValueError that names the first invalid key and its rule."""
        stated = self.tree.get(name) or {}
        inferred = self.tree.get("inferred") or {}
        if not isinstance(stated, Mapping) or not isinstance(inferred, Mapping):
            raise ValueError(f"{name}: must be an object with keys and values")
        given = {}
        for key in kind.model_fields:
            value = stated.get(key, stated.get(_NOTES.get(key)))
            if value is None:
                value = inferred.get(key)
                origin = "default" if value is None else "inferred"
                self.filled.append(f"{name}.{key} ({origin})")
            if value is not None:
                given[key] = _first_word(key, value)
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            if first["type"] == "missing":
                raise ValueError(f"{name}.{key}: is missing") from error
            rule = first["msg"].replace("Input should be", "must be")
            raise ValueError(f"{name}.{key} = {first['input']}: {rule}") from error

    def published(self) -> PublishedCase:
        """Returns the case with its run. Raises ValueError if it is not valid."""
        run = self._run()
        tags = tuple(self.tree.get("tags") or ())
        reasons = {
            "mixture of experts": run.shape.experts is not None,
            "float8": run.precision == "fp8",
            "context parallel": run.layout.cp > 1,
            "one layer": run.shape.layers == 1,
        }
        return PublishedCase(
            id=self.name,
            source=str(self.tree.get("source_key") or "unknown"),
            stack=run.framework.name,
            run=run,
            measured=self.measured,
            speed=None if "toy" in tags else self.measured.speed(run.seq_len),
            tags=tags,
            apart=next((why for why, is_so in reasons.items() if is_so), ""),
            filled=tuple(self.filled),
        )

    def _run(self) -> PlannedRun:
        shape = _shape(self.model)
        run = PlannedRun(
            shape=shape,
            cluster=self.cluster,
            layout=self._layout(shape),
            framework=self.framework,
            seq_len=self.model.seq_len,
            precision=self.precision,
        )
        if self.train.activation_recompute:
            return run
        # If the source does not state the recompute, assume the least that fits, or full.
        for recompute in _RECOMPUTES:
            tried = replace(run, layout=replace(run.layout, recompute=recompute))
            if needed_bytes(tried, memory_by_rank(tried)) <= run.cluster.device.memory_bytes:
                break
        return tried

    def _usual_stack(self) -> str:
        """Returns the stack for a case that does not state it."""
        name = str(self.tree.get("framework")).lower()
        is_old = re.match("a100|a800|v100", self.cluster.device_file)
        if self.train.compile:
            return "compiled"
        if "maxtext" in name:
            return "jax"
        if is_old and self.model.ffn_kind == "gelu" and _OLD_STACK.search(name):
            return "softmax"
        return "fused" if _FUSED.search(name) else "eager"

    def _framework(self) -> FrameworkProfile:
        stack = self.tree.get("stack") or self._usual_stack()
        if stack not in STACKS:
            raise ValueError(f"stack = {stack}: must be one of {', '.join(STACKS)}")
        framework = in_precision(STACKS[stack], self.precision)
        stated = {"attention", "dropout", "gradient_bytes"}
        return replace(framework, **self.train.model_dump(include=stated, exclude_none=True))

    def _layout(self, shape: ModelShape) -> RunLayout:
        """Returns the layout. Raises ValueError if sizes do not divide each other."""
        parallel = self.parallel
        train = self.train
        pp = parallel.pp
        if pp > shape.layers:
            raise ValueError(f"parallel.pp = {pp}: must not exceed model.layers = {shape.layers}")
        others = parallel.tp * pp * parallel.cp
        gpus = self.hardware.gpus
        dp, rest = divmod(gpus, others)
        if rest:
            rule = f"must be a multiple of tp x pp x cp = {others}"
            raise ValueError(f"hardware.gpus = {gpus}: {rule}")
        zero = parallel.zero_stage
        if zero is None:
            zero = 3 if parallel.fsdp or parallel.dp_shard > 1 else 1
        shards = dp * parallel.cp
        if zero < 1:
            shards = 1
        elif zero >= 3 and parallel.dp_shard > 1:  # HSDP replicates sharded parameters.
            shards = parallel.dp_shard * parallel.cp
        shards = min(dp * parallel.cp, parallel.optimizer_shard or shards)
        virtual = max(1, parallel.vpp)
        if shape.layers + 2 < pp * virtual:
            virtual = 1
        # Any, because published runs have schedules and a recompute mode of other frameworks.
        schedule: Any = parallel.schedule
        recompute: Any = train.activation_recompute or "none"
        if virtual > 1:
            schedule = "interleaved_1f1b"
        elif schedule.startswith("interleaved"):
            schedule = "1f1b"
        is_split = parallel.sequence_parallel
        if is_split is None:
            is_split = self.framework.attention == "flash"
        usual = 8 if pp > 1 else 1
        at_once = dp * train.micro_batch
        batch = train.global_batch_sequences or usual * at_once
        microbatches = max(1, round(batch / at_once))
        return RunLayout(
            pp=pp,
            dp_shard=dp,
            **parallel.model_dump(include={"tp", "cp", "ep", "stage_boundaries"}),
            expert_tp=parallel.etp,
            virtual_stages=virtual,
            schedule=schedule,
            microbatch_size=train.micro_batch,
            microbatches=microbatches,
            parameter_shards=shards if zero >= 3 else 1,
            gradient_shards=shards if zero >= 2 else 1,
            optimizer_shards=shards,
            sequence_parallel=is_split,
            recompute=recompute,
            recompute_every=train.recompute_every,
        )


def _first_word(key: str, value: Any) -> Any:
    """Translates a text that a source states into the planner's option, using words.yaml. Returns
    any other value unchanged.
    """
    words = _WORDS.get(key, {})
    if not isinstance(value, str) or value in words.values():
        return value
    return next((meant for word, meant in words.items() if word in value.lower()), value)


def _cluster(stated: _Hardware, folders: list[Path]) -> Cluster:
    """Returns the cluster of a case. Raises ConfigError if no hardware file matches."""
    text = stated.gpu.lower().partition("(")[0].strip().replace(" ", "-")
    name = re.sub(r"[ _-]*(nvidia|amd|sxm\d?|oam|hbm3)[ _-]*", "-", text).strip("-")
    files = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    short = re.sub(r"-\d+gb$", "", name)
    longer = [each for each in sorted(files) if each.startswith(f"{name}-")]
    names = [name, f"{name}-80gb", *longer, short, f"{short}-80gb"]
    name = next((each for each in names if each in files), name)
    return with_links(
        load_cluster(name, folders),
        network_gb_per_s=stated.network_gb_per_s,
        node_gb_per_s=stated.node_gb_per_s,
        gpus_per_node=stated.gpus_per_node,
    )


def _shape(stated: _Model) -> ModelShape:
    """Returns the model's shape. Raises ValueError if a size is missing or not valid."""
    if stated.shape:
        shape = named_shape(stated.shape, {})
        return replace(shape, layers=stated.layers or shape.layers)
    for key in ("layers", "hidden"):
        if not getattr(stated, key):
            raise ValueError(f"model.{key}: is missing; set it, or model.shape")
    hidden = stated.hidden
    heads = stated.heads or max(1, hidden // 128)
    if hidden < heads:
        raise ValueError(f"model.heads = {heads}: must not exceed model.hidden = {hidden}")
    is_gpt = stated.ffn_kind == "gelu"
    positions = stated.positional or ("learned" if is_gpt else "rope")
    tied = is_gpt if stated.tied_embeddings is None else stated.tied_embeddings
    return ModelShape(
        name=stated.name,
        layers=stated.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=min(heads, stated.kv_heads or heads),
        head_dim=stated.head_dim or hidden // heads,
        ffn_hidden=stated.ffn_hidden or 4 * hidden,
        vocab=stated.vocab,
        feed_forward=stated.ffn_kind,
        positions=positions,
        position_rows=stated.seq_len if positions == "learned" else 0,
        tied_embeddings=tied,
        biases=is_gpt,
        layer_norm=stated.ffn_kind != "swiglu",
        embedding_norm=positions == "alibi",
        experts=stated.experts,
    )
