"""Devices, the links between them, and clusters: figures read from `tools/hardware/*.yaml` or a user's own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.calibration import Calibration, calibration_from_tree
from parallel3d.planner.hardware.units import GIB

_LINK_KEYS = ("gb_per_s", "latency_us", "efficiency")
_KEYS = {  # the keys of a hardware file, by section
    "device": (
        *("name", "family", "peak_tflops", "memory_gib", "memory_gb_per_s", "processors", "matmul_efficiency"),
        *("memory_efficiency", "attention_tflops", "kernel_s", "launch_s", "price_per_hour"),
    ),
    "node": ("gpus", *_LINK_KEYS),
    "network": (*_LINK_KEYS, "oversubscription", "whole_nodes"),
}
_TOP_KEYS = (*_KEYS, "measured", "price_per_hour")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: peaks from the vendor's data sheet, efficiencies measured (each file says where)."""

    name: str
    peak_flops: Mapping[str, float]  # by precision, dense, per second
    memory_bytes: float  # what a process can have
    memory_bandwidth: float  # bytes per second
    processors: int  # SMs or CUs: tiles that run at once
    matmul_efficiency: float  # share of the peak that a large matrix product sustains
    memory_efficiency: float  # share of the bandwidth that a streaming kernel sustains
    attention_flops: Mapping[str, float]  # sustained by a fused kernel: forward and backward, long sequences
    kernel_s: float = 2.0e-6  # start and drain of one kernel
    launch_s: float = 6.0e-6  # host time to launch one
    price_per_hour: float | None = None  # US dollars
    family: str = ""  # the architecture; software that is older than a family runs slower on it

    @property
    def is_cpu(self) -> bool:
        return self.name.lower().startswith("cpu")

    def peak(self, precision: str) -> float:
        return self.peak_flops.get(precision, self.peak_flops["bf16"])


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a link gives a collective between neighbours of a ring: bytes per second and direction, seconds per hop."""

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
    oversubscription: float = 1.0  # what the network's upper tiers divide its bandwidth by
    whole_nodes: int = 32  # the most nodes whose network is not oversubscribed
    device_file: str = ""  # the name of the file that its device is from
    measured: Calibration | None = None  # by `parallel3d-plan calibrate`, on one such node


def load_cluster(name: str, folders: list[Path]) -> Cluster:
    """Reads the cluster of a hardware file: a name in `folders` (the last wins) or a path. Raises ConfigError naming
    the nearest that there are."""
    path = _path(name, folders)
    tree, device_file = _load(path), path
    if isinstance(tree.get("device"), str):  # a cluster's file, which names its device's
        is_file = Path(tree["device"]).suffix in (".yaml", ".yml")
        device_file = path.parent / tree["device"] if is_file else _path(tree["device"], [*folders, path.parent])
        tree = _over_device(_load(device_file), tree, path)
    return replace(cluster_from_tree(tree, path.stem, where=str(path)), device_file=device_file.stem)


def _path(name: str, folders: list[Path]) -> Path:
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.3)
        advice = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(sorted(known))}"
        raise ConfigError(f"hardware {name}: unknown; {advice}")
    return known[name.lower()]


def _load(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as problem:
        line = "" if problem.problem_mark is None else f":{problem.problem_mark.line + 1}"
        raise ConfigError(f"hardware {path}{line}: not valid YAML: {problem.problem}") from problem
    except (OSError, ValueError, yaml.YAMLError) as problem:
        said = " ".join(str(problem).split())
        raise ConfigError(f"hardware {path}: cannot be read ({said})") from problem
    if not isinstance(tree, Mapping):
        raise ConfigError(f"hardware {path}: must hold the sections device, node and network")
    _check_keys(tree, _TOP_KEYS, f"hardware {path}: ")
    for section, keys in _KEYS.items():
        own = tree.get(section, {})
        if isinstance(own, Mapping):
            _check_keys(own, keys, f"hardware {path}: {section}.")
        elif section != "device" or not isinstance(own, str):
            raise ConfigError(f"hardware {path}: {section}: must hold keys, such as {keys[0]}")
    return tree


def _check_keys(tree: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in tree:
        if key not in keys:
            near = get_close_matches(str(key), keys, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(keys)}"
            raise ConfigError(f"{where}{key}: unknown key; {advice}")


def _over_device(device: Mapping[str, Any], cluster: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Lays a cluster's file over its device's: the links key by key, and the price."""
    if isinstance(device.get("device"), str):
        raise ConfigError(f"hardware {path}: device = {cluster['device']}: is a cluster's file; name a device's")
    sections = {name: {**device.get(name, {}), **cluster.get(name, {})} for name in ("node", "network")}
    price = {key: cluster[key] for key in ("price_per_hour",) if key in cluster}
    return {"device": {**device.get("device", {}), **price}, **sections}


def cluster_from_tree(tree: Mapping[str, Any], name: str, *, where: str = "") -> Cluster:
    """Builds a cluster from the keys of a device's file (docs/planner.md says what each means). `where` is what an
    error calls the file. Raises ConfigError for the first key that misses or holds no number."""
    section = ""
    try:
        section = "device"
        device = _device(tree["device"], name)
        section = "node"
        node, gpus_per_node = _link(tree["node"]), _whole(tree["node"], "gpus")
        section = "network"
        network = _link(tree["network"])
        usual = {"oversubscription": 1.0, "whole_nodes": Cluster.whole_nodes, **tree["network"]}
        oversubscription, whole_nodes = _number(usual, "oversubscription"), _whole(usual, "whole_nodes")
        section = "measured"
        measured = calibration_from_tree(tree["measured"]) if "measured" in tree else None
    except KeyError as missing:
        key = missing.args[0] if missing.args[0] == section else f"{section}.{missing.args[0]}"
        how = "calibrate measures it" if section == "measured" else "hardware h100 shows a whole file"
        told = f"{key}: required and not given; parallel3d-plan {how}"
        raise ConfigError(f"hardware {where or name}: {told}") from missing
    except (TypeError, ValueError, AttributeError) as problem:
        raise ConfigError(f"hardware {where or name}: {section}.{problem}") from problem
    return Cluster(
        name=name,
        device=device,
        gpus_per_node=gpus_per_node,
        node=node,
        network=network,
        oversubscription=oversubscription,
        whole_nodes=whole_nodes,
        device_file=name,
        measured=measured,
    )


def with_links(
    cluster: Cluster, *, network_gb_per_s: float | None, node_gb_per_s: float | None, gpus_per_node: int | None
) -> Cluster:
    """Returns the same devices behind other links or in nodes of another size; None leaves what it stands for."""
    network, node = cluster.network, cluster.node
    if network_gb_per_s is not None:
        network = replace(network, bandwidth=network_gb_per_s * 1e9)
    if node_gb_per_s is not None:
        node = replace(node, bandwidth=node_gb_per_s * 1e9)
    return replace(cluster, network=network, node=node, gpus_per_node=gpus_per_node or cluster.gpus_per_node)


def _device(tree: Mapping[str, Any], name: str) -> Device:
    optional = ("kernel_s", "launch_s", "price_per_hour")
    attention = _numbers(tree, "attention_tflops")
    if sorted(attention) != ["backward", "forward"]:
        raise ValueError(f"attention_tflops: has {', '.join(attention)}, and must have forward and backward")
    return Device(
        name=str(tree.get("name", name)),
        peak_flops={precision: teras * 1e12 for precision, teras in _numbers(tree, "peak_tflops").items()},
        memory_bytes=_number(tree, "memory_gib") * GIB,
        memory_bandwidth=_number(tree, "memory_gb_per_s") * 1e9,
        processors=_whole(tree, "processors"),
        matmul_efficiency=_number(tree, "matmul_efficiency"),
        memory_efficiency=_number(tree, "memory_efficiency"),
        attention_flops={way: teras * 1e12 for way, teras in attention.items()},
        family=str(tree.get("family", "")),
        **{key: _number(tree, key) for key in optional if tree.get(key) is not None},
    )


def _number(tree: Mapping[str, Any], key: str) -> float:
    try:
        return float(tree[key])
    except (TypeError, ValueError):
        raise ValueError(f"{key} = {tree[key]}: must be a number") from None


def _numbers(tree: Mapping[str, Any], key: str) -> dict[str, float]:
    if not isinstance(tree[key], Mapping):
        raise ValueError(f"{key} = {tree[key]}: must hold a number for each name, such as {{bf16: 989.4}}")
    return {name: _number({f"{key}.{name}": value}, f"{key}.{name}") for name, value in tree[key].items()}


def _whole(tree: Mapping[str, Any], key: str) -> int:
    number = _number(tree, key)
    if isinstance(tree[key], bool) or number % 1:
        raise ValueError(f"{key} = {tree[key]}: must be a whole number")
    return int(number)


def _link(tree: Mapping[str, Any]) -> Link:
    return Link(
        bandwidth=_number(tree, "gb_per_s") * 1e9,
        latency_s=_number(tree, "latency_us") * 1e-6,
        efficiency=_number(tree, "efficiency"),
    )
