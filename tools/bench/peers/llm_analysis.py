"""Predictions of llm-analysis (Li 2023, https://github.com/cli99/llm-analysis) for published runs.
It is not a dependency: install it to run this benchmark.

Simplifications by llm-analysis are not corrected: step time is FLOPs / (efficiency x peak), without
bubble and communication. An MLP has two matrices, and its FLOPs assume ffn = 4 hidden. Embeddings
are tied. For memory, layers per stage are rounded down. A gated MLP is passed as two matrices with
the same number of parameters and saved activations.
"""

from __future__ import annotations

import logging
from importlib import import_module

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.planned_run import RunLayout
from parallel3d.planner.published.cases import PublishedCase
from parallel3d.planner.published.score import Prediction, prediction

# Recompute setting -> member of ActivationRecomputation.
_RECOMPUTE = {"none": "NONE", "selective": "SELECTIVE", "full": "FULL"}
_GATED = 1.5  # width factor: two matrices with the parameters of three


class LlmAnalysis:
    """llm-analysis as a peer of the planner. It assumes `efficiency`, a fraction of peak FLOP/s."""

    def __init__(self, *, efficiency: float) -> None:
        """Raises ConfigError if the package is not installed."""
        self._efficiency = efficiency
        try:
            self._analysis = import_module("llm_analysis.analysis")
            self._config = import_module("llm_analysis.config")
            # Without this, it prints several warnings per run.
            import_module("llm_analysis.logger").logger.setLevel(logging.CRITICAL)
        except ImportError as missing:
            raise ConfigError(
                f"bench planner: needs llm-analysis ({missing}); pip install llm-analysis in an "
                "environment with transformers < 5"
            ) from missing

    def cannot(self, case: PublishedCase) -> str:
        """Returns the reason why llm-analysis cannot express a case, or ""."""
        return why_not(case.run.layout)

    def predict(self, case: PublishedCase) -> Prediction:
        """Predicts a case for which `cannot` returns ""."""
        run = case.run
        layout = case.run.layout
        shape = case.run.shape
        cluster = case.run.cluster
        inner = shape.ffn_hidden * (_GATED if shape.feed_forward == "swiglu" else 1.0)
        model = self._config.ModelConfig(
            name=shape.name,
            num_layers=shape.layers,
            n_head=shape.heads,
            hidden_dim=shape.hidden,
            vocab_size=shape.vocab,
            max_seq_len=run.seq_len,
            num_key_value_heads=shape.kv_heads,
            ffn_embed_dim=inner,
            expansion_ratio=inner / shape.hidden,
        )
        device = self._config.GPUConfig(
            name=cluster.name,
            # llm-analysis multiplies it by 1024^3
            mem_per_GPU_in_GB=cluster.device.memory_bytes / GIB,
            hbm_bandwidth_in_GB_per_sec=cluster.device.memory_bandwidth / 1e9,
            intra_node_bandwidth_in_GB_per_sec=cluster.node.bandwidth / 1e9,
            intra_node_min_message_latency=cluster.node.latency_s,
            peak_fp16_TFLOPS=cluster.device.peak(run.precision) / 1e12,
            inter_node_bandwidth_in_GB_per_sec=cluster.network.bandwidth / 1e9,
        )
        ways = self._config.ParallelismConfig(
            tp_size=layout.tp,
            pp_size=layout.pp,
            dp_size=layout.dp,
            sp_size=layout.tp if layout.sequence_parallel else 1,
        )
        words = self._analysis
        request = words.LLMAnalysis(
            model, device, self._config.DtypeConfig(), ways, flops_efficiency=self._efficiency
        )
        summary = request.training(
            batch_size_per_gpu=layout.microbatch_size,
            gradient_accumulation_steps=layout.microbatches,
            global_batch_size=run.global_batch_size,
            seq_len=run.seq_len,
            activation_recomputation=words.ActivationRecomputation[_RECOMPUTE[layout.recompute]],
            ds_zero=words.DSZeRO(_zero_stage(layout)),
            flash_attn=run.framework.attention == "flash",
            softmax_dropout=run.framework.dropout and run.framework.attention != "flash",
        )
        return prediction(
            case,
            parameters=round(summary["num_params_total"]),
            fits=summary["memory_left_per_gpu"] >= 0,
            memory_gib=summary["(weight+op_state+grad+act)_memory_per_gpu"] / GIB,
            step_time_s=summary["latency_per_iter"],
        )


def why_not(layout: RunLayout) -> str:
    """Returns the reason why llm-analysis cannot express a layout, or ""."""
    if layout.recompute not in _RECOMPUTE:
        return f"partial recompute ({layout.recompute})"
    if _zero_stage(layout) is None:
        return "states sharded over a part of the data-parallel ranks"
    return ""


def _zero_stage(layout: RunLayout) -> int | None:
    """Returns the DeepSpeed ZeRO stage of a layout, or None if no stage matches."""
    shards = (layout.optimizer_shards, layout.gradient_shards, layout.parameter_shards)
    stage = sum(number > 1 for number in shards)
    if shards == (layout.dp,) * stage + (1,) * (3 - stage):
        return stage
    return None
