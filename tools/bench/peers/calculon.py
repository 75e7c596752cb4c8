"""Predictions of Calculon (Isaev et al. 2023, https://github.com/calculon-ai/calculon) for
published runs, with its own system files.

It is not a dependency: clone it and put the clone on PYTHONPATH. The PyPI package of that name is a
different project.

Calculon assumes saved attention scores, an MLP of two matrices, one key-value head per query head,
and sharding of only optimizer states. The exact variant excludes other runs. The approximate
variant models FlashAttention as recomputed scores, a gated MLP as two matrices with the same number
of parameters, and grouped-query attention as multi-head attention. Each axis uses the fastest
allowed network. Memory is compared with that of the case's device.
"""

from __future__ import annotations

import json
import logging
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.planned_run import RunLayout
from parallel3d.planner.published.cases import PublishedCase
from parallel3d.planner.published.score import Prediction, prediction

# Part of the device name -> system file.
_SYSTEMS = {"A100": "a100_80g.json", "H100": "h100_80g_nvl8.json"}
_RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}
_GATED = 1.5  # width factor: two matrices with the parameters of three
# Device memory for Calculon, which otherwise raises an error if a layout does not fit.
_BOUNDLESS_GIB = 10**7


class Calculon:
    """Calculon as a peer of the planner. `approximate` selects the approximate variant."""

    def __init__(self, *, approximate: bool) -> None:
        """Raises ConfigError if Calculon or its system files cannot be found."""
        self._approximate = approximate
        try:
            package = import_module("calculon")
            self._llm = import_module("calculon.llm.llm").Llm
            self._system = import_module("calculon.system").System
            folder = Path(str(package.__file__)).parents[1] / "systems"
            self._systems = {
                part: json.loads((folder / name).read_text()) for part, name in _SYSTEMS.items()
            }
        except (ImportError, OSError) as missing:
            raise ConfigError(
                f"bench planner: needs Calculon ({missing}); git clone "
                "https://github.com/calculon-ai/calculon, put the clone on PYTHONPATH, pip install "
                "pandas psutil"
            ) from missing

    def cannot(self, case: PublishedCase) -> str:
        """Returns the reason why Calculon cannot express a case, or ""."""
        run = case.run
        if not any(part in run.cluster.device.name for part in _SYSTEMS):
            return "no system file for the device"
        why = why_not(run.layout)
        if why or self._approximate:
            return why
        if run.framework.attention == "flash":
            return "tiled attention"
        if run.shape.feed_forward == "swiglu":
            return "gated feed-forward"
        if run.shape.kv_heads != run.shape.heads:
            return "grouped keys"
        return ""

    def predict(self, case: PublishedCase) -> Prediction:
        """Returns Calculon's prediction for a case. Raises ConfigError if Calculon rejects it."""
        layout = case.run.layout
        shape = case.run.shape
        application = self._llm.Application(
            {
                "hidden": shape.hidden,
                "feedforward": int(
                    shape.ffn_hidden * (_GATED if shape.feed_forward == "swiglu" else 1)
                ),
                "seq_size": case.run.seq_len,
                "attn_heads": shape.heads,
                "attn_size": shape.head_dim,
                "num_blocks": shape.layers,
            }
        )
        # Networks that tp, pp and dp may each use: 0 within the node, 1 between nodes.
        allowed = [(0, 1) if ways > 1 else (0,) for ways in (layout.tp, layout.pp, layout.dp)]
        answers = []
        refusals = []
        for networks in product(*allowed):
            try:
                answers.append(self._asked(case, application, networks))
            except (self._llm.Error, AssertionError) as refusal:
                refusals.append(str(refusal))
        if not answers:
            raise ConfigError(f"bench planner: Calculon refuses {case.id} ({refusals[-1]})")
        step_time_s, memory_bytes = min(answers)
        return prediction(
            case,
            parameters=application.num_parameters(),
            fits=memory_bytes <= case.run.cluster.device.memory_bytes,
            memory_gib=memory_bytes / GIB,
            step_time_s=step_time_s,
        )

    def _asked(
        self, case: PublishedCase, application: Any, networks: tuple[int, ...]
    ) -> tuple[float, float]:
        """Returns (step seconds, bytes per device), given the networks of tp, pp and dp."""
        run = case.run
        layout = case.run.layout
        tree = next(tree for part, tree in self._systems.items() if part in run.cluster.device.name)
        system = self._system({**tree, "mem1": {**tree["mem1"], "GiB": _BOUNDLESS_GIB}})
        keeps_no_scores = run.framework.attention == "flash" and layout.recompute == "none"
        execution = {
            "num_procs": layout.world_size,
            "tensor_par": layout.tp,
            "pipeline_par": layout.pp,
            "data_par": layout.dp,
            "tensor_par_net": networks[0],
            "pipeline_par_net": networks[1],
            "data_par_net": networks[2],
            "batch_size": run.global_batch_size,
            "microbatch_size": layout.microbatch_size,
            # as fast as bfloat16, for which the system files have no figures
            "datatype": "float16",
            "fused_activation": True,
            "attention_type": "multihead",
            "activation_recompute": "attn_only"
            if keeps_no_scores
            else _RECOMPUTE[layout.recompute],
            "pipeline_interleaving": layout.virtual_stages if layout.pp > 1 else 1,
            "optimizer_sharding": layout.optimizer_shards > 1,
            "tensor_par_comm_type": "rs_ag" if layout.sequence_parallel else "ar",
            "tensor_par_overlap": "none",
            "training": True,
            **dict.fromkeys(("seq_par_ag_redo", "data_par_overlap"), False),
            **dict.fromkeys(("weight_offload", "activations_offload", "optimizer_offload"), False),
        }
        model = self._llm(application, logging.getLogger("calculon"))
        model.compile(system, self._llm.Execution.from_json(execution))
        model.run(system)
        return model.get_total_time(), model.get_mem_tier1_cap_req()


def why_not(layout: RunLayout) -> str:
    """Returns the reason why Calculon cannot express a layout, or ""."""
    if layout.recompute not in _RECOMPUTE:
        return f"partial recompute ({layout.recompute})"
    if layout.gradient_shards > 1 or layout.parameter_shards > 1:
        return "sharded gradients or parameters"
    if layout.optimizer_shards in (1, layout.dp):
        return ""
    return "states sharded over a part of the data-parallel ranks"
