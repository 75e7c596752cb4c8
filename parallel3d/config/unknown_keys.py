"""Hints for unknown keys of a recipe."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches

# Hints for keys of other frameworks, of earlier versions, and of features that do not exist here.
_DATA_PARALLEL = (
    "the data-parallel size is parallel.dp_shard (sharded) x parallel.dp_replicate (replicated); "
    "try parallel.dp_shard=2"
)
_NO_BALANCE_LOSS = (
    "not supported, because it depends on the microbatch; try model.experts.bias_rate=0.001"
)
_NO_ADAFACTOR = "removed together with Adafactor; try optimizer.name=adamw"
_HINTS = {
    "dp": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "capacity_factor": "not supported, because other layouts would drop other tokens; remove it",
    "aux_loss_coef": _NO_BALANCE_LOSS,
    "router_aux_loss_coef": _NO_BALANCE_LOSS,
    "offload": ("use parallel.offload=true, which keeps sharded states on the CPU"),
    "gradient_accumulation_steps": (
        "computed from train.global_batch_size and parallel.microbatch_size; set those"
    ),
    "stochastic_rounding": "removed; try train.precision=bf16, whose weights are float32",
    "beta2_decay": _NO_ADAFACTOR,
    "update_clip": _NO_ADAFACTOR,
    "label_smoothing": "removed",
    "step_in_backward": "removed; to hold fewer gradients try parallel.sharding=FULL_SHARD",
}
# Names that other frameworks use for each key.
_OTHER_NAMES = {
    "parallel.tp": (
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
        "tp_size"
    ),
    "parallel.pp": (
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size"
    ),
    "parallel.cp": "context_parallel context_parallel_size context_parallel_degree cp_size",
    "parallel.ep": "expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    "model.experts.count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "model.experts.per_token": "num_experts_per_tok moe_top_k top_k router_topk",
    "model.experts.hidden": "moe_intermediate_size moe_ffn_hidden_size",
    "parallel.microbatch_size": "micro_batch_size mbs local_batch_size per_device_train_batch_size",
    "parallel.recompute": (
        "activation_checkpoint activation_checkpointing gradient_checkpointing "
        "recompute_granularity"
    ),
    "train.global_batch_size": "batch_size train_batch_size gbs",
    "train.steps": "max_steps num_steps total_steps max_iters train_iters training_steps",
    "train.seq_len": (
        "seq_length sequence_length max_seq_len max_seq_length block_size context_length"
    ),
    "train.grad_clip": "clip_grad max_grad_norm max_norm gradient_clipping gradient_clip_val",
    "train.precision": "dtype mixed_precision mixed_precision_param",
    "train.eval_every": "eval_interval eval_steps eval_freq",
    "optimizer.lr": "learning_rate max_lr peak_lr",
    "optimizer.min_lr_ratio": "min_lr min_lr_factor",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup_iters warmup_iters",
    "optimizer.decay_steps": "lr_decay_iters lr_decay_steps",
    "optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type lr_decay_style",
    "model.layers": "num_layers n_layer n_layers num_hidden_layers",
    "model.hidden": "hidden_size d_model n_embd dim",
    "model.heads": "num_heads n_head n_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads num_query_groups",
    "model.ffn_hidden": "ffn_hidden_size intermediate_size d_ff",
    "model.vocab": "vocab_size",
    "data.path": "data_path dataset dataset_path",
    "checkpoint.every": "save_interval save_steps save_every",
    "checkpoint.keep": "save_total_limit keep_last",
    "checkpoint.keep_best": "save_top_k",
    "checkpoint.in_background": "async_save async_mode",
    "checkpoint.resume": "load resume_from_checkpoint",
    "checkpoint.start_from": "init_from pretrained_checkpoint initial_load_path finetune",
    "logging.every": "log_interval logging_steps log_freq log_every",
    "run_dir": "output_dir save_dir out_dir dump_folder",
}
for _key, _names in _OTHER_NAMES.items():
    _HINTS |= dict.fromkeys(_names.split(), f"did you mean {_key}?")


def advice_on(name: str, known: Collection[str]) -> str:
    """Returns advice on an unknown key: a hint from `_HINTS`, the key that was probably meant, or
    all `known` keys of its section."""
    name = re.sub(r"\[\d+]", "", name)
    section, _, leaf = name.rpartition(".")
    leaf = leaf.lower().replace("-", "_")
    if "offload" in leaf:
        leaf = "offload"
    if leaf in _HINTS:
        return _HINTS[leaf]
    own = [key for key in known if key.rpartition(".")[0] == section]
    by_leaf = {key.rpartition(".")[2]: key for key in known}
    near = (
        get_close_matches(name, own, 1, cutoff=0.8)
        or [by_leaf[key] for key in get_close_matches(leaf, by_leaf, 1, cutoff=0.7)]
        or get_close_matches(name, known, 1)
    )
    if near:
        return f"did you mean {near[0]}?"
    own = own or [key for key in known if "." not in key]
    return f"known are {', '.join(own)}"
