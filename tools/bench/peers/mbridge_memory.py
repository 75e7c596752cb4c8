"""ISEEKYAN's memory estimator for Megatron-LM (https://github.com/ISEEKYAN/mbridge, folder memory_estimator) asked
about a published run: the same job that this project's planner is asked about, as the Megatron-Core configuration that
its web page makes. Neither is a dependency: who wants it clones mbridge, puts the clone on PYTHONPATH, and installs the
Megatron-Core that the page is written for (0.13).

It is what a pipeline rank has allocated, and what it has no words for is left to it, not corrected: rotary positions,
untied tables and norms without bias whatever the model has, a full pipeline however few microbatches there are, no
fragmentation, no CUDA context. It says nothing of time.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from contextlib import redirect_stdout
from importlib import import_module, reload
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.published.cases import Case
from parallel3d.planner.published.score import Prediction, prediction
from parallel3d.tools.bench.peers.megatron_memory import ANY_S, keeps_scores, shards_why_not

# Of Megatron-LM's training program, whose names the estimator imports and, asked as the web page asks it, never uses.
_KERNELS, _VERSION = "transformer_engine", "2.4.0"  # of the time of Megatron-Core 0.13
_UNUSED = {
    "": ("get_args", "get_timers", "get_tokenizer", "pretrain", "print_rank_0"),
    ".arguments": ("core_transformer_config_from_args",),
    ".initialize": ("initialize_megatron",),
    ".utils": ("get_batch_on_this_cp_rank", "get_batch_on_this_tp_rank"),
    ".yaml_arguments": ("core_transformer_config_from_yaml",),
}


class MbridgeMemory:
    """The estimator behind its web page."""

    def __init__(self) -> None:
        """Raises ConfigError where it or its Megatron-Core is not on the path."""
        try:
            _name_kernels()
            self._config = import_module("megatron.core.transformer.transformer_config").TransformerConfig
            self._torch = import_module("torch")
            self._program = _load()
        except ImportError as missing:
            raise ConfigError(
                f"bench planner: needs mbridge's memory estimator ({missing}); git clone "
                "https://github.com/ISEEKYAN/mbridge, put the clone on PYTHONPATH, pip install --no-deps "
                "megatron-core==0.13.1 termcolor"
            ) from missing

    def cannot(self, case: Case) -> str:
        """Why it cannot express a case; empty where it can."""
        return why_not(case.run)

    def predict(self, case: Case) -> Prediction:
        """What it says of the memory of a case that it can express."""
        job = case.run
        with redirect_stdout(StringIO()), warnings.catch_warnings():  # it prints every module
            warnings.simplefilter("ignore")
            ranks, _ = self._program.estimate_from_config(self._config_of(job), _arguments(job))
        gib = [float(rank["total_gb"]) for rank in ranks]
        return prediction(
            case,
            parameters=round(sum(float(rank["parameters_b"]) for rank in ranks) * 1e9) * job.layout.tp,
            fits=max(gib) * 2**30 <= job.cluster.device.memory_bytes,
            memory_gib={"worst": max(gib), "first": gib[0], "last": gib[-1]}[case.memory.rank],
            step_time_s=ANY_S,
        )

    def _config_of(self, job: PlannedRun) -> Any:
        shape, layout = job.shape, job.layout
        is_full, layers = layout.recompute == "full", _layers(job)
        is_even = len(set(layers)) == 1
        return self._config(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.ffn_hidden,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            gated_linear_unit=shape.feed_forward == "swiglu",
            activation_func=self._torch.nn.functional.silu,  # whichever it is keeps as much
            add_bias_linear=shape.biases,
            normalization="RMSNorm",  # the only one that it knows
            hidden_dropout=0.1 if job.program.dropout else 0.0,
            attention_dropout=0.1 if job.program.dropout else 0.0,
            bf16=True,
            params_dtype=self._torch.bfloat16,
            pipeline_dtype=self._torch.bfloat16,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=_virtual(job),
            num_layers_in_first_pipeline_stage=None if is_even else layers[0],
            num_layers_in_last_pipeline_stage=None if is_even else layers[-1],
            sequence_parallel=layout.sequence_parallel and layout.tp > 1,
            context_parallel_size=layout.cp,
            expert_tensor_parallel_size=1,
            recompute_granularity=None if layout.recompute == "none" else layout.recompute,
            recompute_method="uniform" if is_full else None,
            recompute_num_layers=1 if is_full else None,
        )


def why_not(job: PlannedRun) -> str:
    """What of a job the estimator has no word for; empty where it has them all."""
    if job.layout.recompute not in ("none", "selective", "full"):
        return f"recompute of a part ({job.layout.recompute})"
    layers = _layers(job)
    if len(set(layers)) > 1 and (len(set(layers[1:-1])) != 1 or job.layout.virtual_stages > 1):
        return "stages of unlike numbers of layers, beside the first and the last"
    return keeps_scores(job) or shards_why_not(job.layout)


def _layers(job: PlannedRun) -> list[int]:
    return [part.layers for part in job.stages]


def _virtual(job: PlannedRun) -> int | None:
    return job.layout.virtual_stages if job.layout.virtual_stages > 1 else None


def _arguments(job: PlannedRun) -> Namespace:
    """What it takes beside the configuration."""
    layout = job.layout
    return Namespace(
        micro_batch_size=layout.microbatch_size,
        seq_length=job.seq_len,
        use_distributed_optimizer=layout.optimizer_shards > 1,
        data_parallel_size=layout.dp,
        world_size=layout.world_size,
        virtual_pipeline_model_parallel_size=_virtual(job),
        padded_vocab_size=job.rank_vocab * layout.tp,
        max_position_embeddings=job.seq_len,
        num_experts=None,
    )


class _Names:
    """A package whose every name is there: a class, or in lower case a package of its own."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names() if name.islower() else type(name, (), {})


def _name_kernels() -> None:
    """Where Transformer Engine is not installed, Megatron-Core's layers on it get its names for classes: the estimator
    replaces them by their own names, and nothing is computed."""
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    layers = import_module("megatron.core.extensions.transformer_engine")
    if layers.HAVE_TE:
        return
    kernels = ModuleType(_KERNELS)
    kernels.__dict__.update(__version__=_VERSION, pytorch=_Names(), common=_Names())
    sys.modules[_KERNELS] = kernels
    try:
        layers = reload(layers)
        provider = import_module("megatron.core.extensions.transformer_engine_spec_provider")
    finally:
        del sys.modules[_KERNELS]
    import_module("megatron.core.transformer.transformer_block").__dict__.update(LayerNormImpl=layers.TENorm)
    specs.__dict__.update(HAVE_TE=True, TENorm=layers.TENorm, TESpecProvider=provider.TESpecProvider)


def _load() -> ModuleType:
    """`estimate_013`, from mbridge's folder memory_estimator, beside stand-ins for what it imports and does not use."""
    found = find_spec("memory_estimator")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    if not folders:
        raise ImportError("no folder memory_estimator on the path")
    for part, names in _UNUSED.items():
        stand_in = ModuleType(f"megatron.training{part}")
        stand_in.__dict__.update(dict.fromkeys(names))
        sys.modules.setdefault(stand_in.__name__, stand_in)
    sys.path.insert(0, str(folders[0]))
    try:
        return import_module("estimate_013")
    finally:
        sys.path.remove(str(folders[0]))
