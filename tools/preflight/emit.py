"""The hardware file of what was measured, for the planner: `parallel3d-plan --hardware FILE` reads
it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

import yaml

from parallel3d.planner.hardware.cluster import Cluster, Link, cluster_tree
from parallel3d.planner.hardware.units import rounded
from parallel3d.tools.preflight.findings import Measured

_CPU_ATTENTION = 0.4  # the share of the rate of matmuls, as in tools/hardware/cpu.yaml


def hardware_text(measured: Measured, base: Cluster, precision: str) -> str:
    """Returns the text of the file: `base` with the matmul rate of the slowest rank, for which all
    wait, and with the links of the slowest group."""
    slowest = min(measured.matmuls)
    if base.device.is_cpu:
        free = [
            each.free_bytes / len(measured.ranks_of(each.host))
            for each in measured.leaders
            if each.free_bytes
        ]
        device = replace(
            base.device,
            peak_flops=dict.fromkeys(base.device.peak_flops, slowest),
            attention_flops=dict.fromkeys(base.device.attention_flops, _CPU_ATTENTION * slowest),
            matmul_efficiency=1.0,
            memory_bytes=min(free, default=base.device.memory_bytes),
        )
    else:
        device = replace(
            base.device, matmul_efficiency=min(1.0, slowest / base.device.peak(precision))
        )
    links = {name: _link(measured, name) for name in ("node", "network")}
    cluster = replace(
        base,
        device=device,
        node=links["node"] or base.node,
        network=links["network"] or base.network,
        oversubscription=1.0,  # all nodes were measured at once
        measured=None,
    )
    everyone = measured.ranks_and_hosts([each.rank for each in measured.facts])
    head = [
        f"Measured by parallel3d-launch check on {everyone}",
        f"Matmuls in {precision}; memory bandwidth and kernel times are those of "
        f"{base.device_file}.",
        'Keys: docs/planner.md, "Hardware files".',
    ]
    head += [f"`{name}` was not measured." for name in links if links[name] is None]
    body = yaml.safe_dump(
        rounded(cluster_tree(cluster), digits=4),
        sort_keys=False,
        default_flow_style=None,
        width=120,
    )
    return "".join(f"# {line}\n" for line in head) + body


def _link(measured: Measured, name: str) -> Link | None:
    """Returns the link by which the planner's formulas give the slowest group's all-reduces
    (`planner.time`)."""
    groups = [each for each in measured.links if each.axis == name and each.kind == "all-reduce"]
    if not groups:
        return None
    slowest = min(groups, key=lambda each: each.bandwidth)
    size = len(slowest.ranks)
    latency_s = max(each.latency_s for each in groups) / (2 * ceil(log2(size)))
    (least, least_s), (bytes_, seconds) = slowest.rows[0], slowest.rows[-1]
    # the rate of each further byte, beyond the smallest all-reduce
    sent = 2 * (size - 1) / size * (bytes_ - least)
    bandwidth = sent / max(seconds - least_s, 1e-9)
    return Link(bandwidth=bandwidth, latency_s=latency_s, efficiency=1.0)
