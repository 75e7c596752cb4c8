"""Devices, the links between them, and clusters: figures read from `tools/hardware/*.yaml` or a user's own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from parallel3d.errors import ConfigError
from parallel3d.planner.measured import Measured, measured_from_tree

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: peaks from the vendor's data sheet, efficiencies measured (each file says where)."""

    name: str
    peak_flops: Mapping[str, float]  # by precision, dense, per second
    memory_bytes: float  # that a process can have
    memory_bandwidth: float  # bytes per second
    processors: int  # SMs or CUs: tiles that run at once
    matmul_efficiency: float  # of the peak, that a large matrix product sustains
    memory_efficiency: float  # of the bandwidth, that a streaming kernel sustains
    attention_flops: Mapping[str, float]  # sustained by a fused kernel: forward and backward, long sequences
    kernel_s: float = 2.0e-6  # start and drain of one kernel
    launch_s: float = 6.0e-6  # host time to launch one
    price_per_hour: float | None = None  # US dollars
    family: str = ""  # software that is older than a family runs slower on it

    def peak(self, precision: str) -> float:
        return self.peak_flops.get(precision, self.peak_flops["bf16"])


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a collective gets between neighbours of a ring: bytes per second and direction, and seconds per hop."""

    bandwidth: float
    latency_s: float
    efficiency: float

    @property
    def sustained(self) -> float:
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices. `network` is what each device has of its node's network."""

    name: str
    device: Device
    gpus_per_node: int
    node: Link
    network: Link
    oversubscription: float = 1.0  # of the network's upper tiers
    measured: Measured | None = None  # by `parallel3d-plan calibrate`, on one such node


def load_cluster(name: str, folders: list[Path], *, extra: Mapping[str, Any] | None = None) -> Cluster:
    """The cluster of a device's file: a name in `folders` (the last wins) or a path. Raises ConfigError naming the
    nearest that there are. `extra` overrides top-level keys of the file."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = {p.stem: p for folder in folders for p in sorted(folder.glob("*.yaml"))}
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, n=3, cutoff=0.3) or sorted(known)
            raise ConfigError(f"hardware {name}: unknown; did you mean {', '.join(near)}?")
        path = known[name.lower()]
    try:
        tree = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError) as problem:
        raise ConfigError(f"hardware {path}: cannot be read ({problem})") from problem
    return cluster_from_tree({**tree, **(extra or {})}, path.stem)


def cluster_from_tree(tree: Mapping[str, Any], name: str) -> Cluster:
    """A cluster from the keys of a hardware file (tools/hardware/README.md says what each means)."""
    try:
        device = _device(tree["device"], name)
        node, network = _link(tree["node"]), _link(tree["network"])
        gpus_per_node = int(tree["node"]["gpus"])
        measured = measured_from_tree(tree["measured"]) if "measured" in tree else None
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(f"hardware {name}: misses or misspells {problem}") from problem
    return Cluster(
        name=name,
        device=device,
        gpus_per_node=gpus_per_node,
        node=node,
        network=network,
        oversubscription=float(tree["network"].get("oversubscription", 1.0)),
        measured=measured,
    )


def with_links(
    cluster: Cluster, *, network_gb_per_s: float | None, node_gb_per_s: float | None, gpus_per_node: int | None
) -> Cluster:
    """The same devices behind other links or in nodes of another size; None: as they are."""
    network, node = cluster.network, cluster.node
    if network_gb_per_s is not None:
        network = replace(network, bandwidth=network_gb_per_s * 1e9)
    if node_gb_per_s is not None:
        node = replace(node, bandwidth=node_gb_per_s * 1e9)
    return replace(cluster, network=network, node=node, gpus_per_node=gpus_per_node or cluster.gpus_per_node)


def _device(tree: Mapping[str, Any], name: str) -> Device:
    optional = {
        f.name: tree[f.name]
        for f in fields(Device)
        if f.name in ("kernel_s", "launch_s", "price_per_hour") and f.name in tree
    }
    return Device(
        name=str(tree.get("name", name)),
        peak_flops={k: float(v) * 1e12 for k, v in tree["peak_tflops"].items()},
        memory_bytes=float(tree["memory_gib"]) * _GIB,
        memory_bandwidth=float(tree["memory_gb_per_s"]) * 1e9,
        processors=int(tree["processors"]),
        matmul_efficiency=float(tree["matmul_efficiency"]),
        memory_efficiency=float(tree["memory_efficiency"]),
        attention_flops={k: float(v) * 1e12 for k, v in tree["attention_tflops"].items()},
        family=str(tree.get("family", "")),
        **{k: float(v) for k, v in optional.items() if v is not None},
    )


def _link(tree: Mapping[str, Any]) -> Link:
    return Link(
        bandwidth=float(tree["gb_per_s"]) * 1e9,
        latency_s=float(tree["latency_us"]) * 1e-6,
        efficiency=float(tree["efficiency"]),
    )
