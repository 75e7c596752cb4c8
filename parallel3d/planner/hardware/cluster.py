"""Devices, the links between them, and clusters: figures read from `tools/hardware/*.yaml` or a
user's own file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import ceil, gcd, inf
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from parallel3d.config.yaml_text import PlainLoader, read_short, shown
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.calibration import Calibration, calibration_from_tree
from parallel3d.planner.hardware.units import GIB

# What a number of a hardware file must be, in the file's unit: the most, and how an error says it.
_RULES = {
    "positive": (inf, "a number above 0; parallel3d-plan hardware h100 shows usual figures"),
    "latency": (inf, "a number, at least 0; try 3"),
    "share": (1.0, "a share above 0 and at most 1; try 0.8"),
    "count": (inf, "a whole number from 1 on; try 8"),
}


class _Key(NamedTuple):
    """A number of a hardware file: the field that it fills, its unit, and its rule."""

    field: str
    unit: float = 1.0
    rule: str = "positive"
    is_optional: bool = False


_LINK = {
    "gb_per_s": _Key("bandwidth", 1e9),
    "latency_us": _Key("latency_s", 1e-6, "latency"),
    "efficiency": _Key("efficiency", rule="share"),
}
_NUMBERS: dict[str, dict[str, _Key]] = {
    "device": {
        "memory_gib": _Key("memory_bytes", GIB),
        "memory_gb_per_s": _Key("memory_bandwidth", 1e9),
        "processors": _Key("processors", rule="count"),
        "matmul_efficiency": _Key("matmul_efficiency", rule="share"),
        "memory_efficiency": _Key("memory_efficiency", rule="share"),
        "kernel_s": _Key("kernel_s", is_optional=True),
        "launch_s": _Key("launch_s", is_optional=True),
        "price_per_hour": _Key("price_per_hour", is_optional=True),
    },
    "node": {"gpus": _Key("gpus_per_node", rule="count"), **_LINK},
    "network": {
        **_LINK,
        "oversubscription": _Key("oversubscription", is_optional=True),
        "whole_nodes": _Key("whole_nodes", rule="count", is_optional=True),
    },
}
_LARGEST_BYTES = 4 << 20
# the rates of a device by name, with those that must be there
_RATES = {"peak_tflops": ("bf16",), "attention_tflops": ("forward", "backward")}
_DEVICE_KEYS = ("name", "family", "cuda_names", *_RATES, "price_from")
_PRICE_KEYS = ("price_per_hour", "price_from")
_TOP_KEYS = (*_NUMBERS, "measured", *_PRICE_KEYS)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: peaks from the vendor's data sheet, efficiencies measured (each file says
    where)."""

    name: str
    peak_flops: Mapping[str, float]  # by precision, dense, per second
    memory_bytes: float  # what a process can have
    memory_bandwidth: float  # bytes per second
    processors: int  # SMs or CUs: tiles that run at once
    matmul_efficiency: float  # share of the peak that a large matrix product sustains
    memory_efficiency: float  # share of the bandwidth that a streaming kernel sustains
    # sustained by a fused kernel: forward and backward, long sequences
    attention_flops: Mapping[str, float]
    kernel_s: float = 2.0e-6  # start and drain of one kernel
    launch_s: float = 6.0e-6  # host time to launch one
    price_per_hour: float | None = None  # US dollars
    price_from: str = ""  # whose list says so, and of which date
    family: str = ""  # the architecture; software that is older than a family runs slower on it
    cuda_names: tuple[str, ...] = ()  # the device as CUDA calls it

    @property
    def is_cpu(self) -> bool:
        return self.name.lower().startswith("cpu")

    @property
    def gpu_bytes(self) -> float | None:
        """The memory of a GPU, by which a framework may choose; None for a CPU."""
        if self.is_cpu:
            return None
        return self.memory_bytes

    def peak(self, precision: str) -> float:
        return self.peak_flops.get(precision, self.peak_flops["bf16"])


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a link gives a collective between neighbours of a ring: bytes per second and direction,
    seconds per hop."""

    bandwidth: float
    latency_s: float
    efficiency: float

    @property
    def sustained(self) -> float:
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Scales:
    """What runs on a cluster were measured to take, over what is predicted of it: seconds of the
    devices' own work, of what ranks send each other in a node and across the network, and the bytes
    of all but parameters, gradients and optimizer states, which are counted exactly. `timed` and
    `weighed` name the framework of each run whose step, and whose memory, was measured."""

    arithmetic: float = 1.0
    node: float = 1.0
    network: float = 1.0
    memory: float = 1.0
    timed: tuple[str, ...] = ()
    weighed: tuple[str, ...] = ()


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
    # which its devices and links have already, and its memory has when a rank's is counted
    scales: Scales = Scales()


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one axis: how many, how many of them share a node, and from how many nodes they
    are picked."""

    size: int
    per_node: int
    span: int = 1

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)


def axis_group(cluster: Cluster, size: int, stride: int, *, world: int) -> Group:
    """Returns the group of `size` ranks, `stride` apart, among `world` ranks. Where a node is no
    multiple of such groups some of them lie across two nodes, and the slowest counts, unless all
    ranks are on one node."""
    node = cluster.gpus_per_node
    if world <= node:
        return Group(size=size, per_node=size)
    span = size * stride
    per_node = min(size, node // stride)
    if span < node and node % span:
        per_node = gcd(node, span) // stride
    return Group(size=size, per_node=max(1, per_node), span=ceil(span / node))


def load_cluster(name: str, folders: list[Path]) -> Cluster:
    """Reads the cluster of a hardware file: a name in `folders` (the last wins) or a path. A
    cluster's file names its device's, which it is laid over: the links key by key. Its price is its
    own, or nobody knows it: what a device costs elsewhere it does not cost there. Raises
    ConfigError with the nearest names."""
    path = _path(name, folders)
    tree = _load(path)
    device_file = path
    if isinstance(device := tree.get("device"), str):
        device_file = path.parent / device
        if device_file.suffix not in (".yaml", ".yml"):
            device_file = _path(device, [*folders, path.parent])
        below = _load(device_file)
        if isinstance(below.get("device"), str):
            raise ConfigError(
                f"hardware {path}: device = {shown(device)}: is a cluster's file; name a device's"
            )
        price = {key: tree.get(key) for key in _PRICE_KEYS}
        tree = {
            "device": {**below.get("device", {}), **price},
            "node": {**below.get("node", {}), **tree.get("node", {})},
            "network": {**below.get("network", {}), **tree.get("network", {})},
        }
    cluster = cluster_from_tree(tree, path.stem, where=str(path))
    return replace(cluster, device_file=device_file.stem)


def cluster_of_cuda(cuda_name: str, folders: list[Path]) -> Cluster | None:
    """Returns the device that CUDA calls `cuda_name`, by its full name, in its usual nodes; None
    where no device's file of `folders` lists it."""
    paths = (path for folder in folders for path in sorted(folder.glob("*.yaml")))
    clusters = (load_cluster(str(path), folders) for path in paths)
    named = (cluster for cluster in clusters if cuda_name in cluster.device.cuda_names)
    return next((cluster for cluster in named if cluster.name == cluster.device_file), None)


def _path(name: str, folders: list[Path]) -> Path:
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if name.lower() not in known:
        advice = f"known are {', '.join(sorted(known))}"
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.3)
        if near:
            advice = f"did you mean {', '.join(near)}?"
        raise ConfigError(f"hardware {name}: unknown; {advice}")
    return known[name.lower()]


def _load(path: Path) -> Mapping[str, Any]:
    where = f"hardware {path}"
    try:
        text = read_short(path, "a hardware file has some kB", _LARGEST_BYTES).decode()
        tree = yaml.load(text, PlainLoader)
    except yaml.MarkedYAMLError as problem:
        line = "" if problem.problem_mark is None else f":{problem.problem_mark.line + 1}"
        raise ConfigError(f"{where}{line}: not valid YAML: {problem.problem}") from problem
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as problem:
        said = " ".join(str(problem).split())
        raise ConfigError(f"{where}: cannot be read ({said})") from problem
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: must hold the sections device, node and network")
    _check_keys(tree, _TOP_KEYS, f"{where}: ")
    for section, numbers in _NUMBERS.items():
        own = tree.get(section, {})
        keys = tuple(numbers)
        if section == "device" and isinstance(own, str):
            continue
        if not isinstance(own, Mapping):
            raise ConfigError(f"{where}: {section}: must hold keys, such as {keys[0]}")
        more = _DEVICE_KEYS if section == "device" else ()
        _check_keys(own, (*more, *keys), f"{where}: {section}.")
    return tree


def _check_keys(given: Iterable[str], keys: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in keys:
            advice = f"known are {', '.join(keys)}"
            near = get_close_matches(str(key), keys, n=1)
            if near:
                advice = f"did you mean {near[0]}?"
            raise ConfigError(f"{where}{shown(key)}: unknown key; {advice}")


def cluster_from_tree(tree: Mapping[str, Any], name: str, *, where: str = "") -> Cluster:
    """Builds a cluster from the keys of a device's file (docs/planner.md says what each means).
    `where` is what an error calls the file. Raises ConfigError for the first key that misses or
    holds no number."""
    where = f"hardware {where or name}: "
    found: dict[str, dict[str, Any]] = {}
    for section, keys in _NUMBERS.items():
        given = tree.get(section, {})
        found[section] = {
            key.field: _number(given, name, key, f"{where}{section}.")
            for name, key in keys.items()
            if not (key.is_optional and given.get(name) is None)
        }
    own = tree["device"]
    rates = {key: _rates(own, key, f"{where}device.") for key in _RATES}
    if not isinstance(cuda_names := own.get("cuda_names", []), list):
        said = f"device.cuda_names = {shown(cuda_names)}"
        raise ConfigError(f"{where}{said}: must be a list, such as [NVIDIA H100 PCIe]")
    try:
        measured = None
        if "measured" in tree:
            measured = calibration_from_tree(tree["measured"])
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        why = f"must be as parallel3d-plan calibrate writes it ({problem})"
        raise ConfigError(f"{where}measured: {why}") from problem
    links: dict[str, Any] = {}
    for section in ("node", "network"):
        own_link = {key.field: found[section].pop(key.field) for key in _LINK.values()}
        links[section] = Link(**own_link)
    device = Device(
        name=str(own.get("name", name)),
        peak_flops=rates["peak_tflops"],
        attention_flops=rates["attention_tflops"],
        family=str(own.get("family", "")),
        cuda_names=tuple(map(str, cuda_names)),
        price_from=str(own.get("price_from") or ""),
        **found.pop("device"),
    )
    sizes = {**found["node"], **found["network"]}
    return Cluster(name=name, device=device, device_file=name, measured=measured, **links, **sizes)


def _number(tree: Mapping[str, Any], name: str, key: _Key, where: str) -> float:
    """Returns a number of a section in the planner's unit."""
    if tree.get(name) is None:
        shows = "parallel3d-plan hardware h100 shows a whole file"
        raise ConfigError(f"{where}{name}: required and not given; {shows}")
    most, rule = _RULES[key.rule]
    try:
        number = float(tree[name])
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    is_enough = number > 0 or (number == 0 and key.rule == "latency")
    is_whole = key.rule != "count" or number % 1 == 0
    if not (is_enough and number <= most and number < inf and is_whole):
        raise ConfigError(f"{where}{name} = {shown(tree[name])}: must be {rule}")
    if key.rule == "count":
        return int(number)
    return number * key.unit


def _rates(own: Mapping[str, Any], key: str, where: str) -> dict[str, float]:
    """Returns operations per second by name."""
    given = own.get(key)
    if not isinstance(given, Mapping) or not {*_RATES[key]} <= {*given}:
        needed = f"must hold a number for {' and '.join(_RATES[key])}"
        raise ConfigError(f"{where}{key} = {shown(given)}: {needed}, such as {{bf16: 989.4}}")
    return {name: _number(given, name, _Key(key, 1e12), f"{where}{key}.") for name in given}


def with_links(
    cluster: Cluster,
    *,
    network_gb_per_s: float | None,
    node_gb_per_s: float | None,
    gpus_per_node: int | None,
) -> Cluster:
    """Returns the same devices behind other links or in nodes of another size; None leaves what it
    stands for."""
    said = ((cluster.network, network_gb_per_s), (cluster.node, node_gb_per_s))
    network, node = (
        link if speed is None else replace(link, bandwidth=speed * 1e9) for link, speed in said
    )
    return replace(
        cluster, network=network, node=node, gpus_per_node=gpus_per_node or cluster.gpus_per_node
    )


def with_scales(cluster: Cluster, scales: Scales) -> Cluster:
    """Returns the cluster with everything that it does as much slower as the scales say: the rates
    that are sustained, the seconds that a kernel, a launch or a message takes."""
    arithmetic = scales.arithmetic
    device = replace(
        cluster.device,
        matmul_efficiency=cluster.device.matmul_efficiency / arithmetic,
        memory_efficiency=cluster.device.memory_efficiency / arithmetic,
        attention_flops={
            way: rate / arithmetic for way, rate in cluster.device.attention_flops.items()
        },
        kernel_s=cluster.device.kernel_s * arithmetic,
        launch_s=cluster.device.launch_s * arithmetic,
    )
    node, between = (
        replace(link, efficiency=link.efficiency / scale, latency_s=link.latency_s * scale)
        for link, scale in ((cluster.node, scales.node), (cluster.network, scales.network))
    )
    return replace(cluster, device=device, node=node, network=between, scales=scales)
