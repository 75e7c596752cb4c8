"""The sections of a recipe as frozen dataclasses: types, ranges, choices and defaults.

`schema` checks each value with pydantic, and `rules` checks values that depend on each other. The
reference of recipe keys is generated from the comments here: the comment before a field, or behind
it on the same line, describes its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import MinLen

from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.ranges import in_range
from parallel3d.config.sharding_strategies import (
    Cadence,
    ShardingName,
    default_gather,
    strategy_of,
)
from parallel3d.schedules.blocks_per_stage import PartCosts
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
PositiveShare = Annotated[float, in_range(gt=0, le=1)]
PositiveFraction = Annotated[float, in_range(gt=0, lt=1)]
Seconds = Annotated[float, in_range(gt=0, le=10000000)]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies for a context longer than the pretraining context.

    Keys that only the other `type` uses are refused unless they have their defaults."""

    # Formula of the scaling. llama3: that of Llama 3.1. yarn: YaRN (arXiv 2309.00071).
    type: Literal["llama3", "yarn"]
    # Ratio of the new context length to the original one.
    factor: Ratio
    # Context length of the original model, in tokens.
    original_max_positions: int
    # llama3: frequencies with at most this many rotations in the original context are divided by
    # `factor`. Those between the bounds are blended.
    low_freq_factor: Positive = 1.0
    # llama3: frequencies with at least this many rotations in the original context stay unchanged.
    high_freq_factor: Positive = 4.0
    # yarn: frequencies with more rotations in the original context than this stay unchanged. Those
    # between the bounds are blended.
    beta_fast: Positive = 32.0
    # yarn: frequencies with fewer rotations in the original context than this are divided by
    # `factor`.
    beta_slow: Positive = 1.0
    # yarn: factor that multiplies queries and keys. None: 0.1 ln(factor) + 1.
    attention_factor: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class TpRule:
    """How tensor parallelism splits the modules of a model that is not built from parallel3d's
    layers. See `parallel3d.Column` and the other styles."""

    # Pattern of module names. `*` matches one part of a name, `**` any number of parts.
    modules: Text
    # Style of the modules (docs/how-to/library.md#write-rules-for-another-model).
    style: Literal["column", "row", "vocab", "replicate", "enter", "divide", "experts"]
    unit: Text | None = None  # column: attribute with the number of features that stay together.
    # column: attribute with the number of pieces that hold q, k and v of one head.
    heads: Text | None = None
    # column: attribute with the number of query heads per key-value head.
    shared: Text | None = None
    # column: number of matrices packed in the weight, or the size of each in units.
    parts: int | tuple[int | str, ...] = 1
    gather_output: bool = False  # column: give the full output to all ranks.
    # replicate: sum the gradients over tp, because the module works on split activations.
    partial_gradient: bool = False
    argument: Text | None = None  # enter: name of the input, if it is passed by keyword.
    attributes: tuple[str, ...] = ()  # divide: attributes that hold counts to divide by tp.


@dataclass(frozen=True, kw_only=True)
class StageNames:
    """Names of the modules by which a model is split into pipeline stages. See
    `parallel3d.SplitSpec`."""

    blocks: Text  # Name of the list of blocks.
    first: tuple[str, ...]  # Modules before the blocks, such as the embedding.
    last: tuple[str, ...]  # Modules after the blocks, in order, such as the last norm and the head.
    added: tuple[str, ...] = ()  # Modules whose output is added to an embedding.
    # Keyword through which forward() takes hidden states. None: in place of the token IDs.
    hidden: Text | None = None
    tuples: bool = False  # True if a block returns a tuple that starts with the hidden states.


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture and size of the transformer. Give `name`, or the sizes, or both: sizes in the
    recipe override those of the shape card, unless `name` is set on the command line.

    Example:
        >>> config = parallel3d.ModelConfig(layers=2, hidden=64, heads=4, ffn_hidden=256, vocab=264)
        >>> config.head_size
        16
    """

    # Name of a shape card in `models/`, such as llama3-8b. None: the recipe gives all sizes.
    name: str | None = None
    # Model class: llama, gpt, transformers for a Hugging Face model (docs/how-to/hugging-face.md),
    # or module:Class for your own class (docs/how-to/custom-model.md).
    architecture: str = "llama"
    # transformers: path of a config.json, or of a folder that has one. It gives all sizes.
    config: Text | None = None
    # Options that a class of your own reads, by name. transformers: keys of the config.json to
    # replace.
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    # transformers and your own class: how tp splits the modules. Empty: the rules of the family.
    tp_rules: tuple[TpRule, ...] = ()
    # transformers and your own class: how pp splits the model. None: the names of the family.
    stages: StageNames | None = None
    layers: Annotated[int, in_range(ge=1, le=1024)]  # Number of transformer blocks.
    hidden: Size  # Size of the hidden states.
    heads: Size  # Number of query heads.
    # Number of key-value heads (grouped-query attention). None: equal to `heads`.
    kv_heads: Size | None = None
    head_dim: Size | None = None  # Size of one attention head. None: `hidden` / `heads`.
    ffn_hidden: Size  # Hidden size of the MLP in each block. With `experts`: in its dense blocks.
    # llama: mixture of experts in place of the MLP (docs/how-to/experts.md). None: a dense model.
    experts: ExpertsConfig | None = None
    vocab: Size  # Vocabulary size. It must be larger than the largest token ID.
    rope_theta: AboveOne = 10_000.0  # llama: base of the rotary frequencies.
    # llama: scaling of the rotary frequencies for a longer context. None: unscaled.
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-5  # Epsilon that RMSNorm or LayerNorm adds to the variance.
    tied_embeddings: bool = False  # Share one weight between the embedding and the head.
    # Standard deviation of the initial weights. The output projections of attention and MLP use
    # `init_std` / sqrt(2 `layers`).
    init_std: Positive = 0.02
    # Dropout probability on the embedding output, and on the attention and MLP outputs of each
    # block.
    dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0  # Dropout probability on the attention probabilities.
    # llama: add biases to the query, key and value projections, as Qwen 2 does. gpt always has
    # biases.
    qkv_bias: bool = False
    # llama: apply RMSNorm to each head of queries and keys, as Qwen 3 does.
    qk_norm: bool = False
    # llama: length of the sliding attention window in tokens, including the query itself (Mistral).
    # None: full causal attention.
    window: Count | None = None
    # gpt: number of learned position embeddings, at least train.seq_len. Required for gpt.
    max_positions: Size | None = None

    @property
    def is_custom(self) -> bool:
        """True if `architecture` names a class outside this project."""
        return ":" in self.architecture or self.architecture == "transformers"

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Size of one attention head, with the default of `head_dim` filled in."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_hidden(self) -> int:
        """Total size of all query heads. It can differ from `hidden`."""
        return self.heads * self.head_size

    def has_window(self, seq_len: int) -> bool:
        """Returns True if the window hides keys in sequences of this length."""
        return self.window is not None and self.window < seq_len

    def has_experts(self, layer: int) -> bool:
        """Returns True if the block with this index has experts instead of an MLP."""
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def block_weights(self) -> float:
        """Mean number of weights in the matrices of a block that compute a token."""
        if self.experts is None:
            return self._weights_of_block(0)
        dense = min(self.experts.dense_layers, self.layers)
        sum_ = dense * self._weights_of_block(0)
        sum_ += (self.layers - dense) * self._weights_of_block(self.layers - 1)
        return sum_ / self.layers

    def _weights_of_block(self, layer: int) -> int:
        ffn_hidden = self.ffn_hidden
        router = 0
        if self.experts is not None and self.has_experts(layer):
            ffn_hidden = self.experts.per_token * self.experts.hidden + self.experts.shared_hidden
            router = self.hidden * self.experts.count
        attention = 2 * self.query_hidden + 2 * self.key_value_heads * self.head_size
        matrices = 2 if self.architecture == "gpt" else 3  # llama's MLP has a gate
        return router + self.hidden * (attention + matrices * ffn_hidden)

    def part_costs(self, seq_len: int) -> PartCosts:
        """Returns the costs of embedding, block and head, used to balance the pipeline stages
        unless `stage_boundaries` is set."""
        dense = 0 if self.experts is None else min(self.experts.dense_layers, self.layers - 1)
        return PartCosts.of(
            block_weights=self._weights_of_block(self.layers - 1),
            hidden=self.hidden,
            query_hidden=self.query_hidden,
            vocab=self.vocab,
            seq_len=seq_len,
            dense_blocks=dense,
            dense_weights=self._weights_of_block(0),
        )


class Coordinates(NamedTuple):
    """Coordinates of a rank on the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return ", ".join(f"{axis} {place}" for axis, place in self._asdict().items())


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout of a run: the size of each axis of the mesh, and how each axis is used.

    The number of workers is `pp` x `dp_replicate` x `dp_shard` x `cp` x `tp`. Ranks are numbered
    with `tp` innermost, then `cp`, `dp_shard`, `dp_replicate` and `pp`.

    Example:
        >>> layout = parallel3d.ParallelConfig(pp=2, dp_shard=4, tp=2)
        >>> layout.world_size, layout.strategy
        (16, 'FULL_SHARD')
    """

    # Number of pipeline ranks. The blocks of the model are divided over them.
    pp: Devices = 1
    # Number of replicas of the model. Each replica trains on its own part of the batch.
    dp_replicate: Devices = 1
    # Number of data-parallel ranks that share one replica, as `sharding` says. Each trains on its
    # own part of the batch.
    dp_shard: Devices = 1
    # Number of context-parallel ranks. Each sequence is split over them, and parameters are sharded
    # over dp_shard x cp ranks (docs/how-to/long-context.md). 2 x `cp` must divide train.seq_len.
    cp: Devices = 1
    # Number of tensor-parallel ranks. The matrices of each layer are split over them. It must
    # divide model.heads, model.ffn_hidden and, with `sequence_parallel`, train.seq_len / `cp`. It
    # must divide model.kv_heads or be a multiple of it.
    tp: Devices = 1
    # Number of expert-parallel ranks. The experts of a layer are divided over them. It must divide
    # dp_shard x cp x tp and model.experts.count, and be a multiple of tp. None: equal to tp.
    ep: Devices | None = None
    # Number of pipeline stages on each pipeline rank. Interleaved schedules need at least 2.
    virtual_stages: Count = 1
    # Index of the first block of each stage, except the first stage. None: balanced by cost.
    stage_boundaries: tuple[int, ...] | None = None
    # Pipeline schedule: the order of forward and backward passes (docs/reference/schedules.md).
    schedule: ScheduleName = "1f1b"
    microbatch_size: Count = 1  # Number of sequences in one forward pass of one data-parallel rank.
    # Strategy that says which of parameters, gradients and optimizer states are split over dp_shard
    # (docs/reference/sharding.md). None: by `zero_stage`, else HYBRID_SHARD if dp_replicate > 1,
    # else FULL_SHARD.
    sharding: ShardingName | None = None
    # ZeRO stage, as another way to choose `sharding`. None: `sharding` decides.
    zero_stage: Literal[0, 1, 2, 3] | None = None
    # How long all-gathered parameters are kept. step: until the last backward pass of the step.
    # microbatch: for one microbatch, and with ZeRO-3 for one forward or backward pass of a block.
    # None: microbatch for ZeRO-3 without a pipeline, else step.
    gather: Cadence | None = None
    # When gradients are reduced over the data-parallel ranks: once per step, or after each
    # microbatch, which needs less memory and more communication.
    reduce: Cadence = "step"
    # Dtype of the gradients that data-parallel ranks send to each other.
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    # Number of blocks whose parameters are all-gathered ahead of their use. None: torch's default,
    # which is 1.
    prefetch: Count | None = None
    # Keep sharded parameters, gradients and optimizer states in CPU memory. A block's parameters
    # are on the GPU only while they are all-gathered.
    offload: bool = False
    # NO_SHARD and SHARD_OPTIMIZER: minimum size of a gradient bucket in MiB. None: 10 on CPUs, 100
    # on GPUs.
    bucket_mib: Positive | None = None
    # Split the sequence over the tensor-parallel ranks in norms, dropout and residual additions,
    # which saves activation memory.
    sequence_parallel: bool = False
    # Activations that are recomputed in the backward pass instead of saved. selective: those inside
    # attention. full: all of a block, except its input. every_n: as full, for every
    # `recompute_every`-th block, beginning with the first.
    recompute: Recompute = "none"
    # every_n: distance between recomputed blocks, at most model.layers. Required with every_n, and
    # only then.
    recompute_every: Count | None = None
    # Set `dp_shard` from the number of workers that torchrun or srun started. The global batch
    # stays the same.
    elastic: bool = False

    @property
    def strategy(self) -> ShardingName:
        """Sharding strategy that `sharding`, `zero_stage` and `dp_replicate` select."""
        return strategy_of(self.sharding, self.zero_stage, self.dp_replicate)

    @property
    def gather_cadence(self) -> Cadence:
        """`gather`, with its default filled in."""
        return self.gather or default_gather(self.strategy, self.pp)

    @property
    def expert_ranks(self) -> int:
        """`ep`, with its default filled in."""
        return self.tp if self.ep is None else self.ep

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which divide the global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Number of ranks over which parameters can be sharded."""
        return self.dp_shard * self.cp

    @property
    def sequence_chunks(self) -> int:
        """Number of chunks of each sequence, of which a rank holds two, or the only one."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def stages(self) -> int:
        """Number of pipeline stages of the model, over all pipeline ranks."""
        return self.pp * self.virtual_stages

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis of the layout, outermost first."""
        return {axis: getattr(self, axis) for axis in Coordinates._fields}

    @property
    def label(self) -> str:
        """Axes with several ranks, such as `pp 2 x tp 2`, or `one process`."""
        sizes = [f"{axis} {size}" for axis, size in self.axes.items() if size > 1]
        return " x ".join(sizes) or "one process"

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a rank. Ranks count row-major over `axes`, tp innermost."""
        place = {}
        for axis, size in reversed(self.axes.items()):
            rank, place[axis] = divmod(rank, size)
        return Coordinates(**place)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run, batch sizes, precision, numerical checks, evaluation and device."""

    steps: Size  # Number of optimizer steps.
    # Number of sequences in one step, over all data-parallel ranks. It must be a multiple of
    # dp_replicate x dp_shard x microbatch_size.
    global_batch_size: Size
    # Number of sequences in the global batch of the first step. The batch grows from there to
    # `global_batch_size`. None: the batch has its full size from the start.
    batch_warmup_start: Count | None = None
    # Number of sequences by which the batch grows each time. None: `batch_warmup_start`.
    batch_warmup_increment: Count | None = None
    # Number of steps until the batch has its full size. Required with `batch_warmup_start`.
    batch_warmup_steps: Count | None = None
    seq_len: Size  # Length of a sequence in tokens.
    # Seed of the initial weights, the order of the data and dropout.
    seed: Index = 0
    # Dtypes of the run. fp32: float32. bf16, fp16: compute in 16 bits, with float32 weights and
    # optimizer states. bf16_pure: all in bfloat16. optimizer.state_dtype and parallel.reduce_dtype
    # override those of states and gradient reductions.
    precision: Precision = "fp32"
    # Number of tokens whose logits are in memory at a time. None: all tokens of the microbatch,
    # unless their logits take 1 GiB on a CPU, or 4 GiB on a GPU with 80 GB.
    loss_chunk_tokens: Count | None = None
    # Factor of the z-loss, the squared log of the softmax normalizer, in the training loss.
    # Validation losses do not include it.
    z_loss: NonNegative = 0.0
    # Compile each block with torch.compile. Only the parts between matmuls are compiled if tp > 1,
    # the schedule splits the backward pass, recompute is selective, or data.documents = mask.
    compile: bool = False
    # Use only deterministic kernels. An operator that does not have one raises an error.
    deterministic: bool = False
    # Maximum global gradient norm. Larger gradients are scaled down. None: no clipping.
    grad_clip: Positive | None = 1.0
    # Reaction to a loss or gradient norm that is not finite. stop: end the run. skip: leave out the
    # update and continue. With fp16, the loss scale is first lowered as far as 1.
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # skip: number of consecutive steps that may be left out before the run ends.
    nonfinite_in_a_row: Count = 10
    # Reaction to a spike of the loss or gradient norm. warn: log the first of consecutive spikes.
    # skip: leave out the update. rollback: as skip, but also return to an earlier checkpoint, if
    # any, and leave out the sequences of the last `spike_steps` steps.
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    # Number of previous finite steps that define a normal loss and gradient norm. Detection starts
    # after half of them.
    spike_window: Annotated[int, in_range(ge=4, le=10000)] = 128
    # Minimum distance of a spike from the median of the window, in robust standard deviations
    # (1.4826 times the median absolute deviation).
    spike_deviations: Positive = 6.0
    # Minimum ratio of the loss of a spike to the median loss of the window.
    spike_loss_ratio: Ratio = 1.1
    # Minimum ratio of the gradient norm of a spike to the median norm of the window.
    spike_norm_ratio: Ratio = 3.0
    # rollback: number of steps whose sequences are left out. The last of them is the spike.
    spike_steps: Count = 2
    # Number of consecutive spikes that skip or rollback handles before the run ends. rollback:
    # spikes up to `spike_window` steps apart count as consecutive.
    spikes_in_a_row: Count = 5
    # Number of steps between evaluations. The last step is evaluated, too. None: no evaluation.
    eval_every: Count | None = None
    # Number of validation sequences in each evaluation. With `eval_every` it must be a multiple of
    # dp_replicate x dp_shard x microbatch_size.
    eval_sequences: Size = 64
    # Classes that observe the run, each as package.module:Class (docs/how-to/train.md).
    callbacks: tuple[str, ...] = ()
    # Number of tokens to generate and print after the last step. 0: none.
    sample_tokens: Index = 0
    # Prompt of the text that is generated after the last step.
    sample_prompt: Text = "def "
    # Top-k sampling: the next token is one of the k most likely ones. 1: greedy, or as the
    # generation_config.json next to model.config says.
    sample_top_k: Count = 1
    # Nucleus sampling: the next token is one of the likeliest, whose probabilities sum to this. 1:
    # all of the top k.
    sample_top_p: PositiveShare = 1.0
    # Sampling temperature. Logits are divided by it.
    sample_temperature: Positive = 1.0
    # Seed for drawing tokens. None: train.seed.
    sample_seed: Index | None = None
    # Device of the workers. auto: a GPU if the worker sees one, else the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Number of steps between comparisons of the values that ranks hold in common, such as
    # replicated parameters. None: no comparison.
    compare_replicas_every: Count | None = None
    # Maximum time in seconds that workers wait for each other until the first step is done. This
    # includes connecting, loading and compiling.
    start_timeout_s: Seconds = 1800.0
    # Maximum time in seconds that workers wait for each other after the first step.
    timeout_s: Seconds = 300.0


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scale for train.precision = fp16. It keeps small gradients from underflowing.

    It follows the rule of torch.amp.GradScaler. Other precisions do not use this section."""

    initial: Positive = 65536.0  # Loss scale of the first step.
    # Factor that multiplies the scale after `interval` consecutive steps with finite gradients, up
    # to a scale of 2^127.
    growth: AboveOne = 2.0
    # Factor that multiplies the scale after a step with gradients that are not finite.
    backoff: PositiveFraction = 0.5
    # Number of consecutive steps with finite gradients before the scale grows.
    interval: Count = 2000


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate.

    Keys that the chosen optimizer does not use, and `decay_start` and `decay_shape` without wsd,
    are refused unless they have their defaults.
    """

    # Update rule. muon: Muon for the matrices of the blocks, AdamW for all other parameters.
    name: OptimizerName = "adamw"
    lr: Positive = 3e-4  # Peak learning rate.
    # Weight decay of matrices and embeddings. Norms and biases are not decayed.
    weight_decay: NonNegative = 0.1
    # Decay rates of the first and second moments, for adamw and the AdamW part of muon.
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    # Epsilon that is added to the root of the second moment, for adamw and the AdamW part of muon.
    eps: Positive = 1e-8
    # Momentum of sgd and muon. None: 0.9 for sgd, 0.95 for muon.
    momentum: Fraction | None = None
    # Use Nesterov momentum in sgd and muon. None: false for sgd, true for muon.
    nesterov: bool | None = None
    # muon: peak learning rate of the matrices of the blocks. None: `lr`.
    muon_lr: Positive | None = None
    # muon: factor on the learning rate of each matrix. match_rms_adamw: 0.2 sqrt(max(rows,
    # columns)), so that the `lr` and `weight_decay` of AdamW can be reused. original: sqrt(max(1,
    # rows / columns)). None: match_rms_adamw.
    lr_adjust: Literal["original", "match_rms_adamw"] | None = None
    # muon: number of Newton-Schulz iterations. None: 5.
    ns_steps: Annotated[int, in_range(ge=1, le=99)] | None = None
    # muon: dtype of the Newton-Schulz iterations and of the matrices sent for them. None: bf16.
    ns_dtype: Literal["fp32", "bf16"] | None = None
    # Dtype of the optimizer states (moments and momentum). None: the dtype of the weights that the
    # optimizer updates.
    state_dtype: Literal["fp32", "bf16"] | None = None
    # Number of steps of the linear warmup from 0 to `lr`. Not used by range_test.
    warmup_steps: Index = 0
    # Learning rate after the warmup. constant: stays at `lr`. linear, cosine: decays right after
    # the warmup. wsd: stays at `lr` up to step `decay_start`, then decays. range_test: grows by a
    # constant factor in each step (`parallel3d-train range-test`).
    schedule: Literal["constant", "linear", "cosine", "wsd", "range_test"] = "cosine"
    # wsd: last step at the peak learning rate. Required with wsd.
    decay_start: Count | None = None
    # wsd: shape of the decay. sqrt: 1 - sqrt(progress). None: linear.
    decay_shape: Literal["linear", "cosine", "sqrt"] | None = None
    # Last step of the decay. The learning rate is `min_lr_ratio` of its peak from then on. None:
    # train.steps.
    decay_steps: Count | None = None
    # Final learning rate as a fraction of the peak. range_test: initial rate as a fraction of `lr`.
    min_lr_ratio: Annotated[float, in_range(ge=0, le=1)] = 0.1

    @property
    def resolved(self) -> OptimizerConfig:
        """This section with `OPTIMIZER_DEFAULTS` filled in."""
        missing = {
            key: value
            for key, value in OPTIMIZER_DEFAULTS[self.name].items()
            if getattr(self, key) is None
        }
        return replace(self, **missing)


# Defaults of each optimizer, for keys that are None.
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
    """Local SGD or DiLoCo: the replicas of dp_replicate train independently and synchronize every
    `sync_every` steps. docs/how-to/local-sgd.md says when to use it."""

    # Number of steps between synchronizations. None: local SGD is off, and gradients are reduced
    # over dp_replicate in every step.
    sync_every: Count | None = None
    # Learning rate of the outer optimizer, which applies the mean change of the replicas.
    outer_lr: Positive = 0.7
    outer_momentum: Fraction = 0.9  # Momentum of the outer optimizer.
    nesterov: bool = True  # Use Nesterov momentum in the outer optimizer.


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One corpus of a data mixture and its weight."""

    path: Text  # File, folder or prefix of the corpus, as in data.path.
    # Relative number of sequences drawn from this corpus.
    weight: NonNegative = 1.0
    # Name of the corpus in logs and metrics. None: the last part of `path`.
    name: str | None = None

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).name or self.path


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """New weights for the corpora of a data mixture, from a given step on."""

    # First step with these weights. Steps count from 1, as in metrics.jsonl.
    from_step: Annotated[int, in_range(ge=2)]
    # Weights of the corpora, one for each entry of data.sources, in the same order.
    weights: tuple[NonNegative, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """A further evaluation set, in addition to the validation part of the training data."""

    name: str  # Name of the set in logs and metrics.
    # File, folder or prefix of the set, as in data.path. Its kind is data.source, or text if
    # data.source is stdlib.
    path: str
    # Number of sequences to evaluate, from the start of the set. None: all.
    sequences: Count | None = None


@dataclass(frozen=True, kw_only=True)
class SequenceRange:
    """A range of consecutive training sequences. Sequences count from 0 in the order of the run."""

    first: Index  # Index of the first sequence of the range.
    last: Index  # Index of the last sequence of the range.


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data. All documents form one stream of tokens, which is cut into sequences. Their
    order depends on the data and the seed, but not on the layout."""

    # Kind of the data. stdlib: the source code of the Python standard library. text: text files.
    # tokens: files of token IDs.
    source: Literal["stdlib", "text", "tokens"] = "stdlib"
    # Location of the data. text: a file, or a folder that is searched for `pattern`. tokens: a
    # folder with a tokens.json, or PREFIX of Megatron's PREFIX.bin and PREFIX.idx. None: only for
    # stdlib, or if `sources` is set.
    path: str | None = None
    # text: pattern of the file names to read if `path` is a folder. Subfolders are searched too.
    pattern: str = "*.txt"
    # Tokenizer of the text: bytes, or the path of a tokenizer.json.
    tokenizer: str = "bytes"
    # Token of the tokenizer.json that ends a document, such as `<|endoftext|>`. None: found by its
    # usual names.
    end_of_text: str | None = None
    # Attention across documents in one sequence. join: a token attends to all tokens before it.
    # mask: it attends only to its own document, and positions start at 0 in each document.
    documents: Literal["join", "mask"] = "join"
    # Fraction of the data that is kept for validation: of the files, of the bytes of a single file,
    # or of the documents of Megatron's files, at least one. A folder of tokens has its own
    # validation part.
    validation_fraction: PositiveFraction = 0.05
    # Token IDs that do not count as labels in the loss, such as padding.
    ignore_token_ids: tuple[int, ...] = ()
    # Further evaluation sets, evaluated every train.eval_every steps.
    evaluation: tuple[EvaluationConfig, ...] = ()
    # Corpora of a data mixture, instead of `path`. All are of the kind `source`.
    sources: tuple[SourceConfig, ...] = ()
    # Changes of the weights of `sources` during the run, in the order of their steps.
    stages: tuple[WeightsConfig, ...] = ()
    # Ranges of sequences that the run leaves out. Later sequences take their place.
    skip: tuple[SequenceRange, ...] = ()

    @property
    def corpora(self) -> tuple[DataConfig, ...]:
        """One copy of this section for each of `sources`, or this section if there are none."""
        return tuple(
            replace(self, path=source.path, sources=(), stages=()) for source in self.sources
        ) or (self,)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming. Checkpoints are in run_dir/checkpoints. They resume in any layout."""

    # Number of steps between checkpoints. The last step and a run that a signal stops are saved,
    # too. None: no checkpoints.
    every: Count | None = None
    keep: Count = 2  # Number of newest checkpoints to keep.
    # Keep all checkpoints whose step is a multiple of this number, which must be a multiple of
    # `every`. None: keep none for this reason.
    keep_every: Count | None = None
    # Number of checkpoints with the lowest validation losses to keep, in addition to `keep`.
    keep_best: Index = 0
    # Copy the state to host memory and write it while training continues. The run waits for the
    # last save.
    in_background: bool = False
    # Reaction to a save that fails. stop: end the run. warn: log it and train on, unless it is the
    # last save or exceeds `grace_s`.
    on_error: Literal["stop", "warn"] = "stop"
    # Time limit in seconds for the save after SIGTERM, SIGHUP or Ctrl-C. None: no limit.
    grace_s: Positive | None = None
    # Checkpoint to resume. none: start a new run. auto: the newest complete one in run_dir, if any.
    # Else the path of a checkpoint.
    resume: Text = "none"
    # Allow resuming even if the training data differs from that of the checkpoint.
    allow_other_data: bool = False
    # Initial weights of a new run: the path of a checkpoint, of a run's folder, or of a folder in
    # Hugging Face format. None: random weights.
    start_from: Text | None = None
    # Scheduled checkpoints that are also exported in Hugging Face format, to run_dir/export. last:
    # the one of the last step.
    export: Literal["none", "last", "all"] = "none"


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, metrics, profiles and dashboards."""

    # Number of steps between log lines, which are also in metrics.jsonl. The first, the last and
    # evaluated steps are logged, too.
    every: Count = 10
    # Peak dense TFLOP/s of one device, for the computation of MFU. None: looked up by the name of
    # the GPU.
    peak_tflops: Positive | None = None
    # Step whose pipeline actions are recorded in run_dir as a trace for Perfetto. None: no step.
    timeline: Count | None = None
    # First and last step that torch.profiler records. None: no profile.
    profile_steps: tuple[int, int] | None = None
    # Ranks that torch.profiler records.
    profile_ranks: tuple[Index, ...] = (0,)
    # Dashboards that also receive the lines of metrics.jsonl: tensorboard, wandb, mlflow.
    sinks: tuple[SinkName, ...] = ()
    # Project of the run in Weights & Biases, or its experiment in MLflow.
    project: Text = "parallel3d"
    # Name of the run in the dashboards. None: the name of the folder run_dir.
    run_name: Text | None = None


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Size of the global batch in each step, with a batch warmup.

    The batch begins with `start` sequences and grows by `increment` at a time, evenly over
    `warmup_steps`, to `full`. `increment` must divide `full - start`. Early gradients agree with
    each other, so a large batch gains little at first (McCandlish et al. 2018, arXiv 1812.06162).

    The size depends only on the step and the recipe. Every layout therefore sees the same sequences
    in the same steps, and a run can resume at any step."""

    full: int
    start: int
    increment: int = 1
    warmup_steps: int = 0

    @property
    def rises(self) -> int:
        """Number of times that the batch grows."""
        return (self.full - self.start) // self.increment

    def at(self, step: int) -> int:
        """Returns the number of sequences in the batch of `step`. Steps count from 0."""
        if step >= self.warmup_steps:
            return self.full
        return self.start + self.increment * (self.rises * step // self.warmup_steps)

    def before(self, step: int) -> int:
        """Returns the number of sequences in all batches before `step`, which is the index of its
        first sample."""
        grown = (
            max(0, step - -(-rise * self.warmup_steps // self.rises))
            for rise in range(1, self.rises + 1)
        )
        return self.start * step + self.increment * sum(grown)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Complete description of a run, as read from one YAML file.

    Example:
        >>> recipe = parallel3d.load_recipe(Path("my.yaml"), cards=shape_cards())
        >>> recipe.train.steps, recipe.parallel.tp, recipe.microbatches
        (200, 2, 4)
    """

    # pydantic refuses unknown keys and non-finite numbers in all sections.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}

    # Architecture and size of the transformer.
    model: ModelConfig
    # Length of the run, batch sizes, precision, numerical checks and evaluation.
    train: TrainConfig
    # Layout: the size and the use of each axis of the mesh.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # Optimizer and learning rate.
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # Loss scale for train.precision = fp16.
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    # Local SGD or DiLoCo.
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    # Training data and evaluation sets.
    data: DataConfig = field(default_factory=DataConfig)
    # Saving and resuming.
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    # Log lines, metrics, profiles and dashboards.
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    # Folder for everything that the run writes. None: `runs/<recipe name>`.
    run_dir: Text | None = None

    @property
    def microbatches(self) -> int:
        """Number of microbatches per step and data-parallel rank, for a batch of full size."""
        return self.train.global_batch_size // (self.parallel.dp * self.parallel.microbatch_size)

    @property
    def own_seq_len(self) -> int:
        """Number of tokens of each sequence on one rank."""
        return self.train.seq_len // self.parallel.cp

    @property
    def batch_sizes(self) -> BatchSizes:
        """Size of the global batch in each step."""
        train = self.train
        full = self.train.global_batch_size
        start = train.batch_warmup_start or full
        increment = train.batch_warmup_increment or start
        steps = train.batch_warmup_steps or 0
        return BatchSizes(full=full, start=start, increment=increment, warmup_steps=steps)

    @property
    def of_one_replica(self) -> Recipe:
        """Recipe that one replica of local SGD runs, with `dp_replicate` 1 and its share of the
        full batch size."""
        share = self.train.global_batch_size // self.parallel.dp_replicate
        alone = replace(self.parallel, dp_replicate=1)
        return replace(self, parallel=alone, train=replace(self.train, global_batch_size=share))


# Condition -> keys that are used only under that condition. A condition is a key and the values
# that it may have. If the value of the key is a number or null, any value other than its default
# will do, and the value here is an example for error messages.
READ_IF = {
    "model.architecture transformers": "model.config",
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
    "train.sample_top_k 40": "train.sample_temperature train.sample_seed train.sample_top_p",
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
