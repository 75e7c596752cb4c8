"""Megatron-LM's own estimate of memory (megatron/training/theoretical_memory_usage.py) asked about a published run: the
same job that this project's planner is asked about, as that program's arguments. Megatron-LM is no dependency: who
wants it clones it and puts the clone on PYTHONPATH; that one file is read, which needs neither torch nor a GPU.

It is what the first pipeline rank has allocated, and what it has no words for is left to it, not corrected: no
fragmentation, no CUDA context, no logits on a last stage, activations as without sequence parallelism unless there is
selective recompute too. It says nothing of time.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.model.shapes import total_parameters
from parallel3d.planner.published.cases import Case
from parallel3d.planner.published.score import Prediction, prediction

_FILE = Path("training") / "theoretical_memory_usage.py"
_PACKAGE = "megatron_memory"  # under which the file is loaded, because megatron.training itself needs torch and more
_MIB, _GIB = 2.0**20, 2.0**30
ANY_S = 1.0  # in the place of a step's time, of which it says nothing and is asked nothing


class MegatronMemory:
    """The program's own function."""

    def __init__(self) -> None:
        """Raises ConfigError where the clone is not on the path."""
        self._program = _load()

    def cannot(self, case: Case) -> str:
        """Why it cannot express a case; empty where it can."""
        return why_not(case.run)

    def predict(self, case: Case) -> Prediction:
        """What it says of the memory of a case that it can express."""
        run = case.run
        with redirect_stdout(StringIO()):  # it prints what it returns
            *_, total_mib = self._program.report_theoretical_memory(arguments(run), run.layout.microbatches)
        bytes_ = total_mib * _MIB
        return prediction(
            case,
            parameters=total_parameters(run.shape),
            fits=bytes_ <= run.cluster.device.memory_bytes,
            memory_gib=bytes_ / _GIB,
            step_time_s=ANY_S,
        )


def why_not(run: PlannedRun) -> str:
    """What of a job its formulas have no word for; empty where they have them all."""
    if run.layout.recompute not in ("none", "selective"):
        return f"recompute of blocks ({run.layout.recompute})"
    return keeps_scores(run) or shards_why_not(run.layout)


def keeps_scores(run: PlannedRun) -> str:
    """Neither this estimate nor mbridge's counts an attention's scores: their programs have not kept any for long."""
    is_kept = run.program.attention != "flash" and run.layout.recompute == "none"
    return "an attention that keeps its scores" if is_kept else ""


def shards_why_not(layout: RunLayout) -> str:
    """Likewise of how states are sharded: by Megatron-LM's distributed optimizer, or not at all."""
    if layout.gradient_shards > 1 or layout.parameter_shards > 1:
        return "sharded gradients or parameters"
    return "" if layout.optimizer_shards in (1, layout.dp) else "states sharded over a part of the data ranks"


def arguments(run: PlannedRun) -> Any:
    """The run as Megatron-LM's arguments, as far as its estimate reads them."""
    shape, layout = run.shape, run.layout
    return SimpleNamespace(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.heads,
        kv_channels=shape.head_dim,
        group_query_attention=shape.kv_heads != shape.heads,
        num_query_groups=shape.kv_heads,
        swiglu=shape.feed_forward == "swiglu",
        normalization="LayerNorm" if shape.layer_norm else "RMSNorm",
        add_bias_linear=shape.biases,
        padded_vocab_size=run.rank_vocab * layout.tp,
        untie_embeddings_and_output_weights=not shape.tied_embeddings,
        seq_length=run.seq_len // layout.cp,
        micro_batch_size=layout.microbatch_size,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
        data_parallel_size=layout.dp,
        world_size=layout.world_size,
        use_distributed_optimizer=layout.optimizer_shards > 1,
        sequence_parallel=layout.sequence_parallel,
        recompute_granularity="selective" if layout.recompute == "selective" else None,
        # no experts, no latent attention, no prediction of several tokens
        num_experts=None,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        moe_layer_freq=1,
        moe_ffn_hidden_size=None,
        moe_router_topk=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=layout.tp,
        multi_latent_attention=False,
        mtp_num_layers=None,
        is_hybrid_model=False,
    )


def _load() -> ModuleType:
    """The one file, beside stand-ins for the two helpers that it takes from a module which needs torch."""
    found = find_spec("megatron")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    files = [folder / _FILE for folder in folders if (folder / _FILE).is_file()]
    if not files:
        raise ConfigError(
            f"bench planner: needs Megatron-LM (no megatron/{_FILE} on the path); git clone "
            "https://github.com/NVIDIA/Megatron-LM and put the clone on PYTHONPATH"
        )
    helpers = ModuleType(f"{_PACKAGE}.utils")
    helpers.__dict__.update(print_rank_0=print, is_hybrid_model=lambda _: False)
    sys.modules.update({_PACKAGE: ModuleType(_PACKAGE), helpers.__name__: helpers})
    spec = spec_from_file_location(f"{_PACKAGE}.{_FILE.stem}", files[0])
    if spec is None or spec.loader is None:
        raise ConfigError(f"bench planner: {files[0]}: cannot be read as a Python file; clone Megatron-LM anew")
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    return program
