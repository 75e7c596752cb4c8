"""The sections of a recipe as frozen dataclasses: types, ranges, choices and defaults. pydantic
checks the values (`schema`), and `rules` checks what must fit together. A new key is one line here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import MinLen

from parallel3d.config.flops import block_weights
from parallel3d.config.ranges import in_range
from parallel3d.config.sharding_strategies import (
    Cadence,
    ShardingName,
    default_gather,
    strategy_of,
)
from parallel3d.schedules.balance import PartCosts
from parallel3d.schedules.registry import ScheduleName

Precision = Literal["fp32", "bf16", "bf16_pure", "fp16"]
OptimizerName = Literal["adamw", "sgd", "muon"]
BlockRecompute = Literal["none", "selective", "full"]
Recompute = Literal["none", "selective", "full", "every_n"]
SinkName = Literal["tensorboard", "wandb", "mlflow"]

Text = Annotated[str, MinLen(1)]
Count = Annotated[int, in_range(ge=1, le=2**40)]
Index = Annotated[int, in_range(ge=0, le=2**40)]
Size = Annotated[int, in_range(ge=1, le=2**27)]
Devices = Annotated[int, in_range(ge=1, le=2**20)]
Positive = Annotated[float, in_range(gt=0)]
NonNegative = Annotated[float, in_range(ge=0)]
Fraction = Annotated[float, in_range(ge=0, lt=1)]
Ratio = Annotated[float, in_range(ge=1)]
AboveOne = Annotated[float, in_range(gt=1)]
PositiveFraction = Annotated[float, in_range(gt=0, lt=1)]
Seconds = Annotated[float, in_range(gt=0, le=10000000)]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The stretching of rotary frequencies to a longer context, whose formulas
    `layers/positions.py` has. A key that its type does not read is refused unless it is left at its
    default (`rules_layout`)."""

    type: Literal["llama3", "yarn"]
    # how many times longer the context became
    factor: Ratio
    original_max_positions: int  # tokens of the context before
    # llama3: up to so many turns in it are stretched
    low_freq_factor: Positive = 1.0
    # llama3: from so many turns in it they stay
    high_freq_factor: Positive = 4.0
    # yarn: those that turn more often in it stay
    beta_fast: Positive = 32.0
    # yarn: those that turn less often are stretched
    beta_slow: Positive = 1.0
    # yarn: how much queries and keys grow; None: 0.1 ln(factor) + 1.
    attention_factor: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a transformer. `name` picks a shape card of `models/`; numbers beside it replace
    the card's.

    Example:
        >>> config = parallel3d.ModelConfig(layers=2, hidden=64, heads=4, ffn_hidden=256, vocab=264)
        >>> config.head_size
        16
    """

    name: str | None = None
    architecture: str = "llama"  # llama, gpt, or module:Class (docs/how-to/custom-model.md)
    # what the class of module:Class reads, by name
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    layers: Annotated[int, in_range(ge=1, le=1024)]
    hidden: Size
    heads: Size
    kv_heads: Size | None = None  # None: equal to heads
    head_dim: Size | None = None  # features of one head; None: hidden / heads
    ffn_hidden: Size
    vocab: Size
    rope_theta: AboveOne = 10_000.0
    # llama: rotary frequencies for a longer context; None: as they are
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-5
    tied_embeddings: bool = False
    init_std: Positive = 0.02
    # The probability of dropping a number of the embedding's output, and of what each half of a
    # block adds.
    dropout: Fraction = 0.0
    # ... of attention's probabilities
    attention_dropout: Fraction = 0.0
    qkv_bias: bool = False  # llama: biases on q, k and v (Qwen 2); gpt has biases everywhere
    qk_norm: bool = False  # llama: RMSNorm of each head's queries and keys (Qwen 3)
    # llama: most keys that a query sees (Mistral's sliding window); None: all keys before it
    window: Count | None = None
    max_positions: Size | None = None  # gpt: rows of the table of learned positions

    @property
    def is_custom(self) -> bool:
        """True if the model is a class of the user's, module:Class."""
        return ":" in self.architecture

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """The features of one head: what `head_dim` stands for."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_hidden(self) -> int:
        """The features of all queries, which need not be `hidden`."""
        return self.heads * self.head_size

    def has_window(self, seq_len: int) -> bool:
        """Returns whether the window hides any key in sequences of this length."""
        return self.window is not None and self.window < seq_len

    @property
    def block_weights(self) -> int:
        """The weights of one block's matrices."""
        return block_weights(
            hidden=self.hidden,
            query_hidden=self.query_hidden,
            kv_hidden=self.key_value_heads * self.head_size,
            ffn_hidden=self.ffn_hidden,
            ffn_matrices=2 if self.architecture == "gpt" else 3,  # without a gate, and with one
        )

    def part_costs(self, seq_len: int) -> PartCosts:
        """Returns what embedding, block and head cost, for cutting the model into pipeline
        stages."""
        return PartCosts.of(
            block_weights=self.block_weights,
            hidden=self.hidden,
            query_hidden=self.query_hidden,
            vocab=self.vocab,
            seq_len=seq_len,
        )


class Coordinates(NamedTuple):
    """The coordinates of a rank on the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    def __str__(self) -> str:
        return ", ".join(f"{axis} {place}" for axis, place in self._asdict().items())


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The size of each axis of the mesh, and how it is used. The fields pp to tp are the axes,
    outermost first.

    Example:
        >>> layout = parallel3d.ParallelConfig(pp=2, dp_shard=4, tp=2)
        >>> layout.world_size, layout.strategy
        (16, 'FULL_SHARD')
    """

    pp: Devices = 1
    dp_replicate: Devices = 1
    dp_shard: Devices = 1
    tp: Devices = 1
    virtual_stages: Count = 1  # stages on each pipeline rank
    # first block of each stage but the first; None: balanced by cost
    stage_boundaries: tuple[int, ...] | None = None
    schedule: ScheduleName = "1f1b"
    microbatch_size: Count = 1  # sequences
    # None: HYBRID_SHARD where dp_replicate > 1, else FULL_SHARD
    sharding: ShardingName | None = None
    # 0 to 3: ZeRO's number of the strategy
    zero_stage: Literal[0, 1, 2, 3] | None = None
    # Gathered parameters are freed after each step, or after each microbatch.
    # None: microbatch for ZeRO-3 without a pipeline, else step
    gather: Cadence | None = None
    # whether gradients are summed over the data ranks once a step, or for each microbatch
    reduce: Cadence = "step"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # the type in which gradients are sent
    # blocks whose parameters are gathered ahead; None: as torch chooses
    prefetch: Count | None = None
    # Parameters, gradients and optimizer states are on the CPU; a unit's parameters are on the GPU
    # while it computes.
    offload: bool = False
    # The least gradients that are reduced in one go; None: `usual_bucket_mib`.
    bucket_mib: Positive | None = None
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    recompute_every: Count | None = None  # every_n: every so-many-th block is recomputed in full
    # Under torchrun or srun dp_shard is what their number of workers leaves for it, and need not be
    # given.
    elastic: bool = False

    @property
    def strategy(self) -> ShardingName:
        """The strategy that `sharding` and `zero_stage` stand for."""
        return strategy_of(self.sharding, self.zero_stage, self.dp_replicate)

    @property
    def gather_cadence(self) -> Cadence:
        """`gather`, or its default for this layout."""
        return self.gather or default_gather(self.strategy, self.pp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def dp(self) -> int:
        """The number of ranks that the global batch is divided over."""
        return self.dp_replicate * self.dp_shard

    @property
    def stages(self) -> int:
        """The number of pipeline stages in the whole model."""
        return self.pp * self.virtual_stages

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh's axes, outermost first."""
        return {axis: getattr(self, axis) for axis in Coordinates._fields}

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of `rank`, which counts row-major over `axes`, tp innermost."""
        place = {}
        for axis, size in reversed(self.axes.items()):
            rank, place[axis] = divmod(rank, size)
        return Coordinates(**place)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of a run, its batches, its precision and its device."""

    steps: Size
    global_batch_size: Size  # sequences
    # sequences of the first steps' global batch; None: no warm-up
    batch_warmup_start: Count | None = None
    # sequences that the batch grows by at a time; None: batch_warmup_start
    batch_warmup_increment: Count | None = None
    batch_warmup_steps: Count | None = None  # steps until the batch has its full size
    seq_len: Size  # tokens
    seed: Index = 0
    precision: Precision = "fp32"
    # tokens whose logits exist at a time; None: all, unless they are large
    loss_chunk_tokens: Count | None = None
    # Both are part of the loss that is trained on, and not of a validation's.
    z_loss: NonNegative = 0.0  # the factor of the squared log of softmax's sum
    # torch.compile each block, or with tp > 1 or a split backward what is between its products
    compile: bool = False
    deterministic: bool = False  # deterministic algorithms alone, where torch has others
    # largest global gradient norm; None: no clipping
    grad_clip: Positive | None = 1.0
    # skip: leave out a step whose loss or gradient is not finite, and go on
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # the steps that `skip` leaves out one after the other, before it ends the run
    nonfinite_in_a_row: Count = 10
    # What is done about a step whose loss or gradient norm stands out (training/guard.py). skip:
    # its update is left out. rollback: the run goes back to a checkpoint, and leaves out the
    # sequences of the last steps.
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    # finite steps that a step is compared with
    spike_window: Annotated[int, in_range(ge=4, le=10000)] = 128
    # a spike is so many above their median, ...
    spike_deviations: Positive = 6.0
    # ... and its loss more than so many times that
    spike_loss_ratio: Ratio = 1.1
    # ... or its gradient norm than that of the norms
    spike_norm_ratio: Ratio = 3.0
    # rollback: the steps up to the spike, and with it, whose sequences are left out
    spike_steps: Count = 2
    # the spikes that `skip` or `rollback` mend one after the other, before they end the run
    spikes_in_a_row: Count = 5
    eval_every: Count | None = None  # steps; None: no validation
    eval_sequences: Size = 64
    callbacks: tuple[str, ...] = ()  # classes that watch the run, each as package.module:Class
    sample_tokens: Index = 0  # tokens generated after the last step; 0: none
    sample_prompt: Text = "def "
    sample_top_k: Count = 1  # the likeliest tokens, of which one is drawn; 1: greedy
    # divides the logits of what is drawn
    sample_temperature: Positive = 1.0
    sample_seed: Index | None = None  # None: train.seed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # steps between comparisons of what ranks must hold alike; None: none
    compare_replicas_every: Count | None = None
    # The longest that workers wait for each other until the first step is done, which loads,
    # compiles and connects ...
    start_timeout_s: Seconds = 1800.0
    timeout_s: Seconds = 300.0  # ... and from then on


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """The factor on the loss with train.precision = fp16, which keeps small gradients from
    vanishing."""

    initial: Positive = 65536.0
    # the factor after `interval` steps with finite gradients
    growth: AboveOne = 2.0
    # the factor after a step whose gradients are not finite
    backoff: PositiveFraction = 0.5
    interval: Count = 2000


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and its rate: a linear warm-up, then as `schedule` says, by default a cosine
    down to `min_lr_ratio` of the peak at `decay_steps`.

    A key that the optimizer does not read is refused unless it is left at its default (`rules`).
    None stands for the optimizer's own default, which docs/reference/optimizers-and-precision.md gives."""

    name: OptimizerName = "adamw"
    lr: Positive = 3e-4
    # applies to matrices, not to norms and biases
    weight_decay: NonNegative = 0.1
    # betas and eps are AdamW's, which steps all parameters with adamw, and with muon all but the
    # blocks' matrices.
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    # sgd and muon read it
    momentum: Fraction | None = None
    nesterov: bool | None = None  # sgd and muon read it
    # The peak rate of muon's matrices; None: lr.
    muon_lr: Positive | None = None
    # muon: how a matrix's shape changes its rate
    lr_adjust: Literal["original", "match_rms_adamw"] | None = None
    ns_steps: Annotated[int, in_range(ge=1, le=99)] | None = None  # muon: Newton-Schulz iterations
    # muon: the type of the iterations and of what is sent for them
    ns_dtype: Literal["fp32", "bf16"] | None = None
    # the type of moments and momentum; None: the parameters' type
    state_dtype: Literal["fp32", "bf16"] | None = None
    warmup_steps: Index = 0
    schedule: Literal["constant", "linear", "cosine", "wsd", "range_test"] = "cosine"
    decay_start: Count | None = None  # wsd: the step up to which the rate stays at its peak
    # wsd: how the rate falls from there; None: linear
    decay_shape: Literal["linear", "cosine", "sqrt"] | None = None
    decay_steps: Count | None = None  # the step at which the rate has come down; None: train.steps
    min_lr_ratio: Annotated[float, in_range(ge=0, le=1)] = 0.1

    @property
    def resolved(self) -> OptimizerConfig:
        """This section with the optimizer's own defaults in the place of None, where it has a
        default."""
        missing = {
            key: value
            for key, value in OPTIMIZER_DEFAULTS[self.name].items()
            if getattr(self, key) is None
        }
        return replace(self, **missing)


# What None stands for in the keys of an optimizer.
OPTIMIZER_DEFAULTS: dict[OptimizerName, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"momentum": 0.9, "nesterov": False},
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "lr_adjust": "match_rms_adamw",
        "ns_steps": 5,
        "ns_dtype": "bf16",
    },
}


@dataclass(frozen=True, kw_only=True)
class LocalSgdConfig:
    """Replicas (dp_replicate) that train apart and synchronise every `sync_every` steps: local SGD
    or DiLoCo. docs/how-to/local-sgd.md says when to use them."""

    # steps; None: gradients are summed over dp_replicate in every step
    sync_every: Count | None = None
    outer_lr: Positive = 0.7
    outer_momentum: Fraction = 0.9
    nesterov: bool = True


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A source of a mixture: what `data.path` would name, and its weight beside the other
    sources."""

    path: Text
    weight: NonNegative = 1.0
    name: str | None = None  # what the run calls it; None: the last part of `path`

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).name or self.path


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Other weights of the sources, from a step on."""

    # the first step with these weights, counted from 1 as in metrics.jsonl
    from_step: Annotated[int, in_range(ge=2)]
    # one for each source
    weights: tuple[NonNegative, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """A named set of sequences on which the run is evaluated, beside the part of its own data kept
    for validation."""

    name: str
    # as `data.path`, read as `data.source` says; the standard library's source stands for text here
    path: str
    sequences: Count | None = None  # the first ones of the set; None: all


@dataclass(frozen=True, kw_only=True)
class SequenceRange:
    """Sequences that follow each other in the order of a run, by the first and the last number,
    which count from 0."""

    first: Index
    last: Index


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of the tokens. Sequences are windows of one stream, in an order that the seed
    alone decides."""

    # stdlib: the Python standard library's own source files
    source: Literal["stdlib", "text", "tokens"] = "stdlib"
    # text: a file, or a folder searched for files that match `pattern`; tokens: a folder with a
    # tokens.json, or PREFIX, where PREFIX.bin and PREFIX.idx are Megatron's.
    path: str | None = None
    pattern: str = "*.txt"
    tokenizer: str = "bytes"  # bytes, or the path of a tokenizer.json
    # the token of a tokenizer.json that ends a document; None: found by its name
    end_of_text: str | None = None
    # join: a token sees all before it in its sequence. mask: its own document alone, whose
    # positions begin at 0.
    documents: Literal["join", "mask"] = "join"
    # The share of the files (of the bytes, where there is a single file; of the documents, where
    # they are Megatron's) that is kept for validation. A folder of tokens has a part of its own for
    # that.
    validation_fraction: PositiveFraction = 0.05
    ignore_token_ids: tuple[int, ...] = ()  # labels that are not learned, such as padding
    # further sets to evaluate on, after each train.eval_every steps
    evaluation: tuple[EvaluationConfig, ...] = ()
    # several corpora of the kind `source`, in the place of `path`
    sources: tuple[SourceConfig, ...] = ()
    stages: tuple[WeightsConfig, ...] = ()  # weights of `sources` that follow the first ones
    # sequences that the run leaves out; those behind them move up
    skip: tuple[SequenceRange, ...] = ()

    @property
    def corpora(self) -> tuple[DataConfig, ...]:
        """This section for each of the corpora that it names: one for each source, or itself."""
        return tuple(
            replace(self, path=source.path, sources=(), stages=()) for source in self.sources
        ) or (self,)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Count | None = None  # steps; None: no checkpoints
    keep: Count = 2  # the newest checkpoints to keep
    # steps: a checkpoint of each multiple stays for good; None: of none
    keep_every: Count | None = None
    # the checkpoints to keep beside them whose validation losses are lowest
    keep_best: Index = 0
    in_background: bool = False  # train on while a copy in the host's memory is written
    # warn: say that a save has failed, and train on to the next one
    on_error: Literal["stop", "warn"] = "stop"
    # Seconds after SIGTERM, SIGHUP or Ctrl-C within which the state must be saved; None: however
    # long it takes.
    grace_s: Positive | None = None
    resume: Text = "none"  # none | auto (the newest of run_dir) | the path of a checkpoint
    allow_other_data: bool = False  # resume also where the data is not that of the checkpoint
    # The path of a checkpoint, or of a run's folder, whose weights a new run begins with; None:
    # with drawn ones.
    start_from: Text | None = None
    # Which of the checkpoints saved on time are also written to run_dir/export, as a folder that
    # transformers opens.
    export: Literal["none", "last", "all"] = "none"


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    every: Count = 10  # steps
    # The dense peak of one device, of which MFU is the share; None: that of the planner's hardware
    # file of its name.
    peak_tflops: Positive | None = None
    # the step whose actions all ranks record into run_dir; None: no step
    timeline: Count | None = None
    # the first and last step that torch.profiler records
    profile_steps: tuple[int, int] | None = None
    # the ranks that it records
    profile_ranks: tuple[Index, ...] = (0,)
    sinks: tuple[SinkName, ...] = ()  # dashboards that get the lines of metrics.jsonl as well
    # the project of Weights & Biases and the experiment of MLflow that the run belongs to
    project: Text = "parallel3d"
    run_name: Text | None = None  # the run's name there; None: that of run_dir's folder


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The sequences in the batch of step 0, 1, ...: `start` at first, then `increment` more at a
    time, evenly over `warmup_steps`, after which the batch is `full`. `increment` divides full -
    start. Early gradients agree with each other, so that a large batch buys little (McCandlish et
    al. 2018, arXiv 1812.06162).

    The size depends on the step and the recipe alone, never on the layout, so that every layout
    sees the same sequences in the same steps, and a run resumes in the middle by arithmetic."""

    full: int
    start: int
    increment: int = 1
    warmup_steps: int = 0

    @property
    def rises(self) -> int:
        """The number of times that the batch grows."""
        return (self.full - self.start) // self.increment

    def at(self, step: int) -> int:
        """Returns the size of the batch of `step`, which counts from 0."""
        if step >= self.warmup_steps:
            return self.full
        return self.start + self.increment * (self.rises * step // self.warmup_steps)

    def before(self, step: int) -> int:
        """Returns the sequences in all batches before `step`, which is the number of its first
        sample."""
        grown = (
            max(0, step - -(-rise * self.warmup_steps // self.rises))
            for rise in range(1, self.rises + 1)
        )
        return self.start * step + self.increment * sum(grown)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a run, as one YAML file says it.

    Example:
        >>> recipe = parallel3d.load_recipe(Path("my.yaml"), cards=shape_cards())
        >>> recipe.train.steps, recipe.parallel.tp, recipe.microbatches
        (200, 2, 4)
    """

    # for pydantic; it holds for all sections
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run_dir: Text | None = None  # None: runs/<recipe name>

    @property
    def microbatches(self) -> int:
        """The microbatches that each pipeline runs per step (fewer during a warm-up of the
        batch)."""
        return self.train.global_batch_size // (self.parallel.dp * self.parallel.microbatch_size)

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch of each step. Without a start of the warm-up the batch is always
        full."""
        train = self.train
        full = self.train.global_batch_size
        start = train.batch_warmup_start or full
        increment = train.batch_warmup_increment or start
        steps = train.batch_warmup_steps or 0
        return BatchSizes(full=full, start=start, increment=increment, warmup_steps=steps)

    @property
    def of_one_replica(self) -> Recipe:
        """The recipe of one replica's run, on its share of the batch, if replicas train apart."""
        share = self.train.global_batch_size // self.parallel.dp_replicate
        alone = replace(self.parallel, dp_replicate=1)
        return replace(self, parallel=alone, train=replace(self.train, global_batch_size=share))


# The keys that are read only if another key has one of some values. A number must not have its
# default; the value that stands here is an example.
READ_IF = {
    "model.architecture llama": (
        "model.rope_theta model.qkv_bias model.qk_norm model.window model.rope_scaling"
    ),
    "model.architecture gpt": "model.max_positions",
    "model.rope_scaling.type llama3": (
        "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor"
    ),
    "model.rope_scaling.type yarn": (
        "model.rope_scaling.beta_slow model.rope_scaling.beta_fast "
        "model.rope_scaling.attention_factor"
    ),
    "train.precision fp16": (
        "loss_scale.initial loss_scale.growth loss_scale.backoff loss_scale.interval"
    ),
    "data.source text tokens": "data.path data.sources",
    "train.batch_warmup_start 8": "train.batch_warmup_steps train.batch_warmup_increment",
    "train.on_nonfinite skip": "train.nonfinite_in_a_row",
    "train.on_spike rollback": "train.spike_steps",
    "train.on_spike skip rollback": "train.spikes_in_a_row",
    "train.sample_top_k 40": "train.sample_temperature train.sample_seed",
    "train.eval_every 100": "data.evaluation checkpoint.keep_best",
    "optimizer.schedule wsd": "optimizer.decay_start optimizer.decay_shape",
    "checkpoint.every 100": "checkpoint.export",
    "local_sgd.sync_every 20": "local_sgd.outer_lr local_sgd.outer_momentum local_sgd.nesterov",
    "optimizer.name adamw muon": "optimizer.betas optimizer.eps",
    "optimizer.name sgd muon": "optimizer.momentum optimizer.nesterov",
    "optimizer.name muon": (
        "optimizer.muon_lr optimizer.lr_adjust optimizer.ns_steps optimizer.ns_dtype"
    ),
}
