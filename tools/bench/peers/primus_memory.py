"""Primus's memory projection (https://github.com/AMD-AGI/Primus, `primus projection memory --memory-mode simulate`)
asked about a published run: the same job that this project's planner is asked about, as the configuration that its own
formulas read. Primus is no dependency: who wants it clones it and puts the clone on PYTHONPATH; it needs torch, no GPU.

It is what a pipeline rank has allocated, and what it has no words for is left to it, not corrected: 4 bytes of weights
and gradients and 10 of states a parameter, states sharded over tp ranks too and weights over none (FSDP included), no
fragmentation, no CUDA context. It says nothing of time here: that it measures on a node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.published.cases import Case
from parallel3d.planner.published.score import Prediction, prediction
from parallel3d.tools.bench.peers.megatron_memory import ANY_S

_PACKAGE = "primus.core.projection"
_GIB = 2.0**30


class PrimusMemory:
    """Its analytical projection."""

    def __init__(self) -> None:
        """Raises ConfigError where it is not on the path."""
        try:
            self._config = import_module(f"{_PACKAGE}.training_config")
            self._program = import_module(f"{_PACKAGE}.module_profilers.language_model")
        except ImportError as missing:
            raise ConfigError(
                f"bench planner: needs Primus ({missing}); git clone https://github.com/AMD-AGI/Primus and put the "
                "clone on PYTHONPATH"
            ) from missing

    def cannot(self, case: Case) -> str:
        """Why it cannot express a case; empty where it can."""
        return why_not(case.run.layout)

    def predict(self, case: Case) -> Prediction:
        """What it says of the memory of a case that it can express."""
        run, config = case.run, self._training(case.run)
        ranks = [self._bytes(run, config, rank) for rank in range(run.layout.pp)]
        which = {"worst": max(ranks), "first": ranks[0], "last": ranks[-1]}[case.memory.rank]
        with _on_rank(run, 0):
            parameters = self._profiler(config).estimated_num_params(rank=None)
        return prediction(
            case,
            parameters=int(parameters),
            fits=max(ranks) <= run.cluster.device.memory_bytes,
            memory_gib=which / _GIB,
            step_time_s=ANY_S,
        )

    def _bytes(self, run: PlannedRun, config: Any, rank: int) -> float:
        """Of a pipeline rank."""
        with _on_rank(run, rank):
            profiler = self._profiler(config)
            states = profiler.estimated_num_params(rank=rank) * profiler.get_num_bytes_per_param()
            return float(states + profiler.estimated_activation_memory(run.layout.microbatch_size, run.seq_len))

    def _profiler(self, config: Any) -> Any:
        with redirect_stdout(StringIO()):  # it prints every module
            return self._program.build_profiler(self._program.get_language_model_profiler_spec(config))

    def _training(self, run: PlannedRun) -> Any:
        shape, layout, words = run.shape, run.layout, self._config
        return words.TrainingConfig(
            model_config=words.ModelConfig(
                num_layers=shape.layers,
                hidden_size=shape.hidden,
                padded_vocab_size=run.rank_vocab * layout.tp,
                ffn_hidden_size=shape.ffn_hidden,
                num_attention_heads=shape.heads,
                kv_channels=shape.head_dim,
                group_query_attention=shape.kv_heads != shape.heads,
                num_query_groups=shape.kv_heads,
                use_flash_attn=run.program.attention == "flash" or layout.recompute == "selective",
                swiglu=shape.feed_forward == "swiglu",
                moe_pattern=[0] * shape.layers,
                share_embeddings_and_output_weights=shape.tied_embeddings,
            ),
            runtime_config=words.RuntimeConfig(
                global_batch_size=run.global_batch_size,
                micro_batch_size=layout.microbatch_size,
                sequence_length=run.seq_len,
                data_parallel_size=layout.dp,
            ),
            model_parallel_config=words.ModelParallelConfig(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.virtual_stages,
                context_model_parallel_size=layout.cp,
                use_torch_fsdp2=layout.parameter_shards > 1,
                use_distributed_optimizer=layout.optimizer_shards > 1,
                recompute_granularity="full" if layout.recompute in ("full", "layer") else None,
                recompute_method="block" if layout.recompute == "layer" else "uniform",
                recompute_num_layers=round(layout.recompute_share * shape.layers / layout.stages),
            ),
        )


def why_not(layout: RunLayout) -> str:
    """What of a layout Primus has no word for; empty where it has them all."""
    if layout.recompute == "op":
        return "recompute of operators"
    return "" if layout.optimizer_shards in (1, layout.dp) else "states sharded over a part of the data ranks"


@contextmanager
def _on_rank(run: PlannedRun, rank: int) -> Iterator[None]:
    """The environment by which it knows where it is: its mesh is tp, cp, pp from the inside."""
    layout = run.layout
    wanted = {"RANK": rank * layout.tp * layout.cp, "NNODES": 1, "GPUS_PER_NODE": layout.world_size}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: str(value) for name, value in wanted.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
