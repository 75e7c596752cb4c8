"""`parallel3d-train --from-deepspeed ds.json`: the keys of a recipe that a DeepSpeed configuration stands for, and what
becomes of each of its own keys. The names and the defaults are those of DeepSpeed's page of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.config.hugging_face import read_config_json
from parallel3d.config.yaml_text import dump_yaml, shown
from parallel3d.errors import ConfigError

_OFF = (False, None, 0, "none", "null", "")
_LONGEST_KEY = 200
_AUTO = "auto"  # which transformers' Trainer replaces by what its own arguments say
_FIXED_BY_TORCH = "torch's fully_shard decides it; parallel.prefetch says how many blocks are gathered ahead"
_BUCKETS = "has a default of its own here; parallel.bucket_mib is the key"
_NO_OFFLOAD = "nothing is kept in the host's memory or on disk here; parallel3d-plan finds a layout that fits without"
_OTHER_LAYOUT = "a checkpoint is not bound to its layout here, and any other reads it"
_ASK_THE_PLANNER = "parallel3d-plan asks this question here"
# Keys, or sections, that change nothing here -> why.
_NO_MEANING = {
    "activation_checkpointing": "a model's own code decides there what is recomputed; parallel.recompute does here",
    "aio": "nothing is kept on disk",
    "autotuning": _ASK_THE_PLANNER,
    "bf16.check_grad_overflow": "a norm that is not finite is always looked for, and its rank and parameter are named",
    "bf16.immediate_grad_update": "belongs to DeepSpeed's engine",
    "checkpoint": _OTHER_LAYOUT,
    "comms_logger": "logging.timeline records a step with all that is sent",
    "csv_monitor": "metrics.jsonl is always written",
    "dataloader_drop_last": "sequences are windows of one stream, and no batch is short",
    "disable_allgather": "parallel.zero_stage decides it",
    "dump_state": "parallel3d-train --print-config prints the recipe",
    "fp16.auto_cast": "what computes in 16 bits follows from train.precision",
    "fp16.consecutive_hysteresis": "the scale falls at each overflow",
    "gradient_predivide_factor": "gradients are summed in parallel.reduce_dtype, and divided once",
    "graph_harvesting": "belongs to DeepSpeed's engine",
    "log_level": "belongs to DeepSpeed's engine",
    "managed_gradient_accumulation": "microbatches are always summed here",
    "memory_breakdown": "metrics.jsonl has the peak, and parallel3d-plan memory the kinds",
    "monitor_config": "logging.sinks names dashboards",
    "nebula": "checkpoint.in_background saves beside training",
    "prescale_gradients": "gradients are summed in parallel.reduce_dtype, and divided once",
    "sparse_gradients": "an embedding's gradient is dense here, with the same numbers",
    "tensorboard": "run_dir is where the files go",
    "timers": "metrics.jsonl has times, and logging.timeline records a step",
    "use_data_before_expert_parallelism": "there are no ranks of experts here",
    "vocabulary_size": "model.vocab says it",
    "wandb": "the library's own variables say it, such as WANDB_ENTITY",
    "wall_clock_breakdown": "metrics.jsonl has times, and logging.timeline records a step",
    "zero_allow_untested_optimizer": "every optimizer works with every layout here",
    "zero_force_ds_cpu_optimizer": "optimizers step on the device",
    "zero_optimization.allgather_bucket_size": _BUCKETS,
    "zero_optimization.allgather_partitions": "parameters are always gathered in one piece a block",
    "zero_optimization.contiguous_gradients": _FIXED_BY_TORCH,
    "zero_optimization.elastic_checkpoint": _OTHER_LAYOUT,
    "zero_optimization.enable_sanity_checks": "belongs to DeepSpeed's engine",
    "zero_optimization.grad_hooks": "gradients are always reduced beside the backward",
    "zero_optimization.ignore_unused_parameters": "a parameter without a gradient is an error here",
    "zero_optimization.leaf_module": "blocks are the units that are gathered",
    "zero_optimization.legacy_stage1": "belongs to DeepSpeed's engine",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the float32 weights",
    "zero_optimization.log_trace_cache_warnings": "belongs to DeepSpeed's engine",
    "zero_optimization.memory_efficient_linear": "belongs to DeepSpeed's engine",
    "zero_optimization.override_module_apply": "belongs to DeepSpeed's engine",
    "zero_optimization.overlap_comm": "gradients are always reduced beside the backward",
    "zero_optimization.pipeline_loading_checkpoint": _OTHER_LAYOUT,
    "zero_optimization.reduce_bucket_size": _BUCKETS,
    "zero_optimization.reduce_scatter": "gradients are scattered where parallel.zero_stage shards them",
    "zero_optimization.round_robin_gradients": _FIXED_BY_TORCH,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon's momentum is always in the device's memory",
    "zero_optimization.stage3_allgather_sequential": _FIXED_BY_TORCH,
    "zero_optimization.stage3_max_live_parameters": _FIXED_BY_TORCH,
    "zero_optimization.stage3_max_reuse_distance": _FIXED_BY_TORCH,
    "zero_optimization.stage3_model_persistence_threshold": _FIXED_BY_TORCH,
    "zero_optimization.stage3_module_granularity_threshold": _FIXED_BY_TORCH,
    "zero_optimization.stage3_param_persistence_threshold": _FIXED_BY_TORCH,
    "zero_optimization.stage3_prefetch_bucket_size": _FIXED_BY_TORCH,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _FIXED_BY_TORCH,
    "zero_optimization.sub_group_size": "the optimizer steps all parts of this rank at once",
    "zero_optimization.use_multi_rank_bucket_allreduce": _FIXED_BY_TORCH,
}
# Keys, or sections, of what there is not here -> why, unless they are off.
_NOT_HERE = {
    "amp": "Apex's mixed precision; train.precision=bf16 or fp16 is torch's way",
    "comet": "logging.sinks has tensorboard, wandb and mlflow",
    "compression_training": "nothing is pruned or quantized while it trains",
    "curriculum_learning": "sequences are of one length",
    "data_efficiency": "sequences are of one length, and no token is dropped",
    "data_types": "sums and states have the type that train.precision gives them",
    "eigenvalue": "belongs to quantization, which is not here",
    "expert_parallel": "the experts of a mixture are not spread over ranks",
    "fp16.fp16_master_weights_and_grads": "the master weights of fp16 are float32",
    "gradient_allreduce_op": "the loss is the mean over the counted tokens of the whole batch, and no sum",
    "hybrid_engine": "it generates between steps of reinforcement learning",
    "progressive_layer_drop": "no layer is left out",
    "quantize_training": "weights are not quantized",
    "seq_parallel_communication_data_type": "a sequence is not split over ranks outside of tp",
    "sequence_parallel_size": "a sequence is not split over ranks outside of tp (Ulysses)",
    "sparse_attention": "model.window is the one sparse attention",
    "tensor_parallel": "parallel.tp splits the project's own models; docs/layers-in-your-model.md splits others",
    "weight_quantization": "weights are not quantized",
    "zero_optimization.cpu_offload": _NO_OFFLOAD,
    "zero_optimization.cpu_offload_param": _NO_OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _NO_OFFLOAD,
    "zero_optimization.mics_hierarchical_params_gather": "each group gathers from its own ranks alone",
    "zero_optimization.offload_optimizer": _NO_OFFLOAD,
    "zero_optimization.offload_param": _NO_OFFLOAD,
    "zero_optimization.zenflow": _NO_OFFLOAD,
    "zero_optimization.zero_hpz_partition_size": "no second copy is kept in a node; dp_replicate is the nearest",
    "zero_optimization.zeropp_loco_param": "gradients are sent as parallel.reduce_dtype says",
    "zero_optimization.zero_quantized_gradients": "gradients are sent as parallel.reduce_dtype says",
    "zero_optimization.zero_quantized_nontrainable_weights": "parameters are gathered in the type that they compute in",
    "zero_optimization.zero_quantized_weights": "parameters are gathered in the type that they compute in",
}
_AS_HERE = {  # these values change nothing
    **{"gradient_allreduce_op": "mean", "sequence_parallel_size": 1, "seq_parallel_communication_data_type": "fp32"}
}
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # DeepSpeed's defaults
_SGD = {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}  # torch's
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adamw", _ADAM),
    "adamw": ("adamw", _ADAM),
    "sgd": ("sgd", _SGD),
}
# The schedules -> ours, and the default of the smallest rate's share of the peak.
_SCHEDULES = {"WarmupLR": ("constant", None), "WarmupDecayLR": ("linear", 0.0), "WarmupCosineLR": ("cosine", 0.0001)}
_ALWAYS_NEEDED = {"model": "model.name, or its numbers", "train.seq_len": "train.seq_len", "train.steps": "train.steps"}


@dataclass
class Translation:
    """What has become of a DeepSpeed configuration: the keys of a recipe with their values, and a line on each of
    DeepSpeed's own keys in one of four lists, or in `open` where its value must still be given."""

    keys: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # there is something like it, which does not do the same
    idle: list[str] = field(default_factory=list)  # has no meaning here
    refused: list[str] = field(default_factory=list)  # there is nothing like it: the training would be another
    open: list[str] = field(default_factory=list)

    def to_yaml(self) -> str:
        """Returns the keys as the YAML of a recipe, below comments on what is still to be given."""
        tree: dict[str, Any] = {}
        for name, value in self.keys.items():
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        return "".join([*(f"# to be given: {line}\n" for line in self.open), dump_yaml(tree) if tree else ""])

    def lines(self) -> Iterator[str]:
        """Yields the lists for people, each under its heading."""
        headings = {
            "taken": self.taken,
            "taken, with a difference": self.differs,
            "without a meaning here": self.idle,
            "to be given": self.open,
            "refused": self.refused,
        }
        for heading, found in headings.items():
            if found:
                yield f"{heading}:"
                yield from (f"  {line}" for line in found)


def from_deepspeed(path: Path) -> Translation:
    """Translates a DeepSpeed configuration. Raises ConfigError for a file that cannot be read as JSON, and for a
    word where a number must be."""
    config = dict(_flat(read_config_json(path)))
    for key in config:
        if len(key) > _LONGEST_KEY or not key.isprintable():
            raise ConfigError(f"{path}: {shown(key)}: no key of DeepSpeed has such a name; delete it")
    return _Translator(config, str(path)).translate()


class _Translator:
    """Takes the keys of a configuration one by one; what is left in the end is unknown."""

    def __init__(self, config: dict[str, Any], file: str) -> None:
        self._config, self._file, self._done = config, file, Translation()

    def translate(self) -> Translation:
        done = self._done
        self._logging()
        self._precision()
        self._optimizer()
        self._schedule()
        self._layout()
        self._is_off_or_refused()
        for key, value in self._config.items():
            why = _find(_NO_MEANING, key)
            if why is not None:
                done.idle.append(f"{key} = {shown(value)}: {why}")
            else:
                done.refused.append(f"{key} = {shown(value)}: is no key of DeepSpeed's that is known here")
        self._config.clear()
        missing = [words for name, words in _ALWAYS_NEEDED.items() if name not in done.keys]
        done.open.append(f"{', '.join(missing)}, and data.path (docs/data.md)")
        return done

    def _logging(self) -> None:
        """Takes what is printed and where, and the profiler."""
        self._take("steps_per_print", "logging.every", _whole)
        self._take("wandb.project", "logging.project")
        for key in ("tensorboard.job_name", "wandb.job_name"):
            self._take(key, "logging.run_name")
        for sink in ("tensorboard", "wandb"):
            if self._pop(f"{sink}.enabled") is True:
                sinks = self._done.keys.setdefault("logging.sinks", [])
                sinks.append(sink)
                self._tell(f"{sink}.enabled", True, "logging.sinks")
        is_profiled, step = self._pop("flops_profiler.enabled"), self._pop("flops_profiler.profile_step")
        rest = [key for key in self._config if key.startswith("flops_profiler.")]
        for key in rest:
            self._done.idle.append(f"{key} = {shown(self._pop(key))}: torch.profiler writes a trace")
        if is_profiled:
            number = self._number("flops_profiler.profile_step", 1 if step is None else step)
            self._set("logging.profile_steps", [int(number), int(number)], "flops_profiler.profile_step", step)
            self._tell("flops_profiler.enabled", True, "logging.profile_steps")
        elif is_profiled is not None:
            self._done.idle.append("flops_profiler.enabled = false: off, as here")
        if not is_profiled and step is not None:
            self._done.idle.append(f"flops_profiler.profile_step = {shown(step)}: the profiler is off")

    def _precision(self) -> None:
        """Takes the type that the model computes in, and the scale of fp16's loss."""
        done = self._done
        cast, cast_to = self._pop("torch_autocast.enabled"), self._pop("torch_autocast.dtype")
        bf16 = "bfloat16" if any(_is_in(key, "bfloat16") for key in self._config) else "bf16"  # the older name
        enabled = {name: self._pop(f"{name}.enabled") for name in ("fp16", bf16)}
        for name, value in enabled.items():
            ours = "fp16" if name == "fp16" else "bf16"
            if value == _AUTO:
                done.open.append(f"train.precision, {ours} or another ({name}.enabled = auto)")
            elif value:
                self._set("train.precision", ours, f"{name}.enabled", value)
            elif value is not None:
                done.idle.append(f"{name}.enabled = false: off")
        if cast:
            words = "fp16" if cast_to in ("fp16", "float16", "half") else "bf16"
            done.keys["train.precision"] = words
            done.differs.append(
                f"torch_autocast.enabled = true -> train.precision={words}: every product is in {words}, with float32 "
                "master weights"
            )
        elif cast is not None:
            done.idle.append("torch_autocast.enabled = false: off")
        if cast_to is not None:
            done.idle.append(f"torch_autocast.dtype = {shown(cast_to)}: see torch_autocast.enabled")
        modules = self._pop("torch_autocast.lower_precision_safe_modules")
        if modules is not None:
            done.idle.append("torch_autocast.lower_precision_safe_modules: layers know what they compute in")
        if "train.precision" not in done.keys and _AUTO not in enabled.values():
            done.keys["train.precision"] = "fp32"
            done.taken.append("no fp16, bf16 or torch_autocast -> train.precision=fp32")
        pure, states = self._pop("bf16.bf16_master_weights_and_grads"), self._pop("bf16.bf16_optimizer_states")
        if pure:
            self._set("train.precision", "bf16_pure", "bf16.bf16_master_weights_and_grads", pure)
            self._set("optimizer.state_dtype", "bf16" if states else "fp32", "bf16.bf16_optimizer_states", states)
        elif states:
            self._set("optimizer.state_dtype", "bf16", "bf16.bf16_optimizer_states", states)
        for key, value in {"bf16_master_weights_and_grads": pure, "bf16_optimizer_states": states}.items():
            if value is not None and not value:
                done.idle.append(f"bf16.{key} = false: off")
        own, accumulated = "bf16" if pure else "fp32", self._config.get("data_types.grad_accum_dtype")
        if self._reduce_dtype(accumulated) == own:
            self._pop("data_types.grad_accum_dtype")
            done.taken.append(f"data_types.grad_accum_dtype = {accumulated}: gradients are added up in {own}")
        self._take("communication_data_type", "parallel.reduce_dtype", self._reduce_dtype)
        self._loss_scale(is_on=done.keys.get("train.precision") == "fp16")

    def _reduce_dtype(self, value: Any) -> Any:
        """Returns our name of the type in which gradients are sent, or None where they cannot be."""
        return {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfp16": "bf16", "bfloat16": "bf16"}.get(str(value))

    def _loss_scale(self, *, is_on: bool) -> None:
        done, fixed = self._done, self._pop("fp16.loss_scale")
        keys = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        power, window, hysteresis, least = (self._pop(f"fp16.{key}") for key in keys)
        if is_on:
            if fixed:
                done.refused.append(f"fp16.loss_scale = {shown(fixed)}: the scale is never fixed; loss_scale.initial")
            initial = 2.0 ** self._number("fp16.initial_scale_power", 16 if power is None else power, most=126)
            self._set("loss_scale.initial", initial, "fp16.initial_scale_power", power)
            self._set("loss_scale.interval", 1000 if window is None else window, "fp16.loss_scale_window", window)
            done.differs.append("fp16.hysteresis: the scale falls at the first overflow here, as with hysteresis 1")
            if fixed is not None and not fixed:
                done.taken.append("fp16.loss_scale = 0: the scale moves, as it always does here")
        for key, value in zip(("loss_scale", *keys), (fixed, power, window, hysteresis, least), strict=True):
            if value is not None and (not is_on or key == "min_loss_scale"):
                why = "a scale below 1 ends the run" if is_on else "read where train.precision=fp16"
                done.idle.append(f"fp16.{key} = {shown(value)}: {why}")

    def _optimizer(self) -> None:
        """Takes the optimizer with DeepSpeed's defaults, which are not ours, and the clipping."""
        done, clip = self._done, self._pop("gradient_clipping")
        if clip == _AUTO:
            done.open.append("train.grad_clip (gradient_clipping = auto); null: no clipping")
        else:
            self._set("train.grad_clip", clip or None, "gradient_clipping", clip)
        name = self._pop("optimizer.type")
        fused = self._pop("optimizer.legacy_fusion")
        if fused is not None:
            done.idle.append("optimizer.legacy_fusion: belongs to DeepSpeed's engine")
        if name is None:
            done.open.append("optimizer.name and its rates: the program that reads the file makes its own optimizer")
            return
        found = _OPTIMIZERS.get(str(name).lower())
        if found is None:
            done.refused.append(
                f"optimizer.type = {shown(name)}: not translated; optimizer.name is adamw, sgd, muon or adafactor, and "
                "docs/optimizers.md has their keys"
            )
            self._rest("optimizer.params.", "see optimizer.type")
            return
        ours, defaults = found
        self._set("optimizer.name", ours, "optimizer.type", name)
        for key, default in defaults.items():
            value = self._pop(f"optimizer.params.{key}")
            if value == _AUTO:
                done.open.append(f"optimizer.{key} (optimizer.params.{key} = auto)")
            else:
                self._set(f"optimizer.{key}", default if value is None else value, f"optimizer.params.{key}", value)
        if done.keys.get("optimizer.state_dtype") == "bf16":
            done.open.append("optimizer.betas: the second is at most 0.99 with optimizer.state_dtype=bf16")
        done.differs.append("optimizer.weight_decay: it is applied to matrices here, not to norms and biases")
        for key, always in {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}.items():
            value = self._pop(f"optimizer.params.{key}")
            if value is not None:
                told = f"optimizer.params.{key} = {shown(value)}: it is always {shown(always)} here"
                (done.taken if value == always else done.refused).append(told)
        if (norm := self._pop("optimizer.params.max_grad_norm")) is not None:
            done.refused.append(f"optimizer.params.max_grad_norm = {shown(norm)}: gradient_clipping is DeepSpeed's key")
        self._rest("optimizer.params.", "chooses an implementation, and torch's is taken", idle=True)

    def _schedule(self) -> None:
        """Takes the learning rate's way through the run."""
        done, name = self._done, self._pop("scheduler.type")
        if name is None:
            done.open.append("optimizer.schedule: the program that reads the file makes its own")
            return
        if str(name) not in _SCHEDULES:
            hint = "; parallel3d-train range-test is that run" * (name == "LRRangeTest")
            done.refused.append(f"scheduler.type = {shown(name)}: optimizer.schedule has nothing like it{hint}")
            self._rest("scheduler.params.", "see scheduler.type")
            return
        ours, ratio = _SCHEDULES[name]
        self._set("optimizer.schedule", ours, "scheduler.type", name)
        self._take("scheduler.params.warmup_max_lr", "optimizer.lr")
        self._take("scheduler.params.total_num_steps", "train.steps", _whole)
        steps = self._pop("scheduler.params.warmup_num_steps")
        if steps == _AUTO:
            done.open.append("optimizer.warmup_steps (scheduler.params.warmup_num_steps = auto)")
        else:
            value = 1000 if steps is None else _whole(steps)
            self._set("optimizer.warmup_steps", value, "scheduler.params.warmup_num_steps", steps)
        least = self._pop("scheduler.params.cos_min_ratio")
        if ratio is not None:
            value = ratio if least is None else least
            self._set("optimizer.min_lr_ratio", value, "scheduler.params.cos_min_ratio", least)
        shape = self._pop("scheduler.params.warmup_type", "log")
        if shape != "linear":
            done.differs.append(f"scheduler.params.warmup_type = {shown(shape)}: the rate rises linearly here")
        for key in ("warmup_min_lr", "warmup_min_ratio"):
            value = self._pop(f"scheduler.params.{key}")
            if value not in (None, 0):
                done.differs.append(f"scheduler.params.{key} = {shown(value)}: the rate rises from 0 here")
            elif value is not None:
                done.taken.append(f"scheduler.params.{key} = 0: the rate rises from 0")
        self._rest("scheduler.params.", "not read by this schedule", idle=True)

    def _layout(self) -> None:
        """Takes the batch and the axes of the mesh."""
        done = self._done
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        batch, micro, times = (None if v == _AUTO else v for v in (self._config.get(name) for name in names))
        self._take("train_micro_batch_size_per_gpu", "parallel.microbatch_size", _whole)
        self._config.setdefault("zero_optimization.stage", 0)
        self._take("zero_optimization.stage", "parallel.zero_stage", _one)
        self._take("pipeline.stages", "parallel.pp", _whole)
        self._rest("pipeline.", "parallel.stage_boundaries says where a pipeline is cut", idle=True)
        self._take("tensor_parallel.autotp_size", "parallel.tp", _whole)
        self._take("compile.enabled", "train.compile")
        self._take("compile.deepcompile", "train.compile")
        self._rest("compile.", "torch.compile's defaults are taken", idle=True)
        self._take("elasticity.enabled", "parallel.elastic")
        self._rest("elasticity.", "the global batch stays, whatever the number of workers", idle=True)
        for key in ("gather_16bit", "stage3_gather_16bit", "stage3_gather_fp16"):
            self._take(f"zero_optimization.{key}_weights_on_model_save", "checkpoint.export", _export)
        if done.keys.get("checkpoint.export") == "last":
            done.open.append("checkpoint.every, the steps from save to save (checkpoint.export = last)")
        if batch is None and micro is not None and times is not None:
            done.open.append(
                f"train.global_batch_size = {micro} x {times} x the data-parallel ranks, in sequences "
                "(train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp)"
            )
        elif batch is None:
            done.open.append("train.global_batch_size, in sequences (train_batch_size)")
        group = self._pop("zero_optimization.mics_shard_size")
        if group in (None, -1):
            group = None
        ranks = None
        if batch is not None and micro is not None and times is not None:
            ranks = self._number("train_batch_size", batch) / (
                self._number(names[1], micro) * self._number(names[2], times)
            )
        self._take("train_batch_size", "train.global_batch_size", _whole)
        accumulated = self._pop("gradient_accumulation_steps")
        if accumulated is not None:
            done.idle.append(
                f"gradient_accumulation_steps = {shown(accumulated)}: follows from batch, microbatch and ranks"
            )
        if ranks is not None and ranks == int(ranks) and ranks >= 1:
            shard = int(ranks) if group is None else int(self._number("zero_optimization.mics_shard_size", group))
            done.keys["parallel.dp_shard"] = shard
            if group is not None:
                done.keys["parallel.dp_replicate"] = max(1, int(ranks) // shard)
            done.taken.append(f"train_batch_size = {batch} of {micro} x {times} -> {int(ranks)} data-parallel ranks")
            if group is not None:
                done.taken.append(f"zero_optimization.mics_shard_size = {group} -> parallel.dp_shard={shard}")
        else:
            done.open.append(
                "parallel.dp_shard, the data-parallel ranks; or parallel.elastic=true under torchrun and srun"
            )
            if group is not None:
                done.open[-1] = (
                    f"parallel.dp_shard={shown(group)} and parallel.dp_replicate (zero_optimization.mics_shard_size)"
                )

    def _is_off_or_refused(self) -> None:
        """Tells what there is not here: off, and nothing is lost; or on, and it is refused."""
        for key in [key for key in self._config if _find(_NOT_HERE, key) is not None]:
            why, value = _find(_NOT_HERE, key), self._config[key]
            if self._switch(key) in _OFF or _AS_HERE.get(key) == value:
                self._done.idle.append(f"{key} = {shown(value)}: off, as here")
            else:
                self._done.refused.append(f"{key} = {shown(value)}: {why}")
        for key in [key for key in self._config if _find(_NOT_HERE, key) is not None]:
            del self._config[key]

    def _switch(self, key: str) -> Any:
        """Returns what turns the innermost section around a key on or off, or the key's own value."""
        section = key
        while section := section.rpartition(".")[0]:
            for name in ("enabled", "device"):
                if f"{section}.{name}" in self._config:
                    return self._config[f"{section}.{name}"]
        return self._config[key]

    def _pop(self, key: str, default: Any = None) -> Any:
        value = self._config.pop(key, default)
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1 else value

    def _take(self, key: str, name: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Takes a key as the key `name` of a recipe, where it is given."""
        if key not in self._config:
            return
        value = self._pop(key)
        if value == _AUTO:
            self._done.open.append(f"{name} ({key} = auto)")
        elif (converted := convert(value)) is None:
            self._done.refused.append(f"{key} = {shown(value)}: {name} cannot be that")
        else:
            self._set(name, converted, key, value)

    def _set(self, name: str, value: Any, key: str, said: Any) -> None:
        """Sets a key of the recipe from `said`, or where nothing is said (None) from DeepSpeed's default."""
        if isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
            raise ConfigError(f"{self._file}: {key} = {shown(value)}: must be a value or a flat list of values")
        self._done.keys[name] = value
        self._tell(key, said, f"{name}={shown(value)}")

    def _tell(self, key: str, said: Any, ours: str) -> None:
        words = f"{key} = {shown(said)}" if said is not None else f"{key}, not given"
        self._done.taken.append(f"{words} -> {ours}")

    def _rest(self, prefix: str, why: str, *, idle: bool = False) -> None:
        for key in [key for key in self._config if key.startswith(prefix)]:
            line = f"{key} = {shown(self._pop(key))}: {why}"
            (self._done.idle if idle else self._done.refused).append(line)

    def _number(self, key: str, value: Any, most: float = 2.0**40) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise ConfigError(f"{self._file}: {key} = {shown(value)}: must be a number above 0; try 1")
        return value


def _flat(tree: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by their dotted names; an empty section is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{under}{key}.")
        else:
            yield f"{under}{key}", value


def _is_in(key: str, name: str) -> bool:
    """True if `key` is `name`, or in the section of that name."""
    return key == name or key.startswith(f"{name}.")


def _find(table: Mapping[str, str], key: str) -> str | None:
    """Returns the words for a key, or for the innermost section that has words. ZeRO's keys may lack their stage3_."""
    longer = key.replace("zero_optimization.", "zero_optimization.stage3_", 1)
    found = [name for name in table if _is_in(key, name) or _is_in(longer, name)]
    return table[max(found, key=len)] if found else None


def _whole(value: Any) -> Any:
    """Returns a whole number that JSON has as 5e8; anything else is told when the recipe is read."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one(value: Any) -> Any:
    """Returns a value, or None for a list, which is what DeepSpeed's autotuner shall try."""
    return None if isinstance(value, list) else value


def _export(value: Any) -> str:
    return "last" if value else "none"
