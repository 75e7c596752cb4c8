"""Devices, the links between them, and clusters: figures read from `tools/hardware/*.yaml` or a user's own file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import gcd
from pathlib import Path
from typing import Any

import yaml

from parallel3d.config.yaml_text import read_short, shown
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.calibration import Calibration, calibration_from_tree
from parallel3d.planner.hardware.units import GIB

# The numbers of a hardware file by section and key: the field that each fills, and the unit that it is written in.
_LINK = {"gb_per_s": ("bandwidth", 1e9), "latency_us": ("latency_s", 1e-6), "efficiency": ("efficiency", 1.0)}
_NUMBERS: dict[str, dict[str, tuple[str, float]]] = {
    "device": {
        "memory_gib": ("memory_bytes", GIB),
        "memory_gb_per_s": ("memory_bandwidth", 1e9),
        "processors": ("processors", 1),
        "matmul_efficiency": ("matmul_efficiency", 1.0),
        "memory_efficiency": ("memory_efficiency", 1.0),
        "kernel_s": ("kernel_s", 1.0),
        "launch_s": ("launch_s", 1.0),
        "price_per_hour": ("price_per_hour", 1.0),
    },
    "node": {"gpus": ("gpus_per_node", 1), **_LINK},
    "network": {**_LINK, "oversubscription": ("oversubscription", 1.0), "whole_nodes": ("whole_nodes", 1)},
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LARGEST_BYTES = 4 << 20
_DEEPEST = 20  # levels of a hardware file, with what `calibrate` has measured
_WHOLE = ("processors", "gpus", "whole_nodes")
_OPTIONAL = ("kernel_s", "launch_s", "price_per_hour", "oversubscription", "whole_nodes")
_DEVICE_KEYS = ("name", "family", "cuda_names", "peak_tflops", "attention_tflops", "price_from")  # beside its numbers
_PRICE_KEYS = ("price_per_hour", "price_from")
_TOP_KEYS = (*_NUMBERS, "measured", *_PRICE_KEYS)


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
    price_from: str = ""  # whose list says so, and of which date
    family: str = ""  # the architecture; software that is older than a family runs slower on it
    cuda_names: tuple[str, ...] = ()  # the device as CUDA calls it

    @property
    def is_cpu(self) -> bool:
        return self.name.lower().startswith("cpu")

    @property
    def gpu_bytes(self) -> float | None:
        """The memory of a GPU, by which a program may choose; None for a CPU."""
        return None if self.is_cpu else self.memory_bytes

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
class Scales:
    """What runs on a cluster were measured to take, over what is predicted of it: seconds of the devices' own work and
    of all that ranks send each other, and the bytes of all but parameters, gradients and optimizer states, which are
    counted exactly. `timed` and `weighed` name the program of each run whose step, and whose memory, was measured."""

    arithmetic: float = 1.0
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
    scales: Scales = Scales()  # which its devices and links have already, and its memory has when a rank's is counted


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one axis: how many, how many of them share a node, and from how many nodes they are picked."""

    size: int
    per_node: int
    span: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def axis_group(cluster: Cluster, size: int, stride: int, *, world: int) -> Group:
    """Returns the group of `size` ranks, `stride` apart, among `world` ranks. Where a node is no multiple of such
    groups some of them lie across two nodes, and the slowest counts, unless all ranks are on one node."""
    node = cluster.gpus_per_node
    if world <= node:
        return Group(size=size, per_node=size)
    span = size * stride
    per_node = gcd(node, span) // stride if span < node and node % span else min(size, node // stride)
    return Group(size=size, per_node=max(1, per_node), span=-(-span // node))


def load_cluster(name: str, folders: list[Path]) -> Cluster:
    """Reads the cluster of a hardware file: a name in `folders` (the last wins) or a path. A cluster's file names its
    device's, which it is laid over: the links key by key. Its price is its own, or nobody knows it: what a device costs
    elsewhere it does not cost there. Raises ConfigError with the nearest names."""
    path = _path(name, folders)
    tree, device_file = _load(path), path
    if isinstance(device := tree.get("device"), str):
        is_file = Path(device).suffix in (".yaml", ".yml")
        device_file = path.parent / device if is_file else _path(device, [*folders, path.parent])
        below = _load(device_file)
        if isinstance(below.get("device"), str):
            raise ConfigError(f"hardware {path}: device = {shown(device)}: is a cluster's file; name a device's")
        price = {key: tree.get(key) for key in _PRICE_KEYS}
        links = {section: {**below.get(section, {}), **tree.get(section, {})} for section in ("node", "network")}
        tree = {"device": {**below.get("device", {}), **price}, **links}
    return replace(cluster_from_tree(tree, path.stem, where=str(path)), device_file=device_file.stem)


def cluster_of_cuda(cuda_name: str, folders: list[Path]) -> Cluster | None:
    """Returns the device that CUDA calls `cuda_name`, by its full name, in its usual nodes; None where no device's file
    of `folders` lists it."""
    paths = (path for folder in folders for path in sorted(folder.glob("*.yaml")))
    clusters = (load_cluster(str(path), folders) for path in paths)
    named = (cluster for cluster in clusters if cuda_name in cluster.device.cuda_names)
    return next((cluster for cluster in named if cluster.name == cluster.device_file), None)


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
        text = read_short(path, "a hardware file has some kB", _LARGEST_BYTES).decode()
        _check_nesting(text)
        tree = yaml.load(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as problem:
        line = "" if problem.problem_mark is None else f":{problem.problem_mark.line + 1}"
        raise ConfigError(f"hardware {path}{line}: not valid YAML: {problem.problem}") from problem
    except (OSError, ValueError, yaml.YAMLError) as problem:
        said = " ".join(str(problem).split())
        raise ConfigError(f"hardware {path}: cannot be read ({said})") from problem
    if not isinstance(tree, Mapping):
        raise ConfigError(f"hardware {path}: must hold the sections device, node and network")
    _check_keys(tree, _TOP_KEYS, f"hardware {path}: ")
    for section, numbers in _NUMBERS.items():
        own, keys = tree.get(section, {}), (*(_DEVICE_KEYS if section == "device" else ()), *numbers)
        if isinstance(own, Mapping):
            _check_keys(own, keys, f"hardware {path}: {section}.")
        elif section != "device" or not isinstance(own, str):
            raise ConfigError(f"hardware {path}: {section}: must hold keys, such as {keys[0]}")
    return tree


def _check_nesting(text: str) -> None:
    """Raises ValueError for YAML that would need stack or memory without bound: deep nesting ends the process in
    libyaml, and references make a short text a large tree."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            raise ValueError("it is nested too deep, or refers to another part of it")


def _check_keys(given: Iterable[str], keys: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in keys:
            near = get_close_matches(str(key), keys, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(keys)}"
            raise ConfigError(f"{where}{shown(key)}: unknown key; {advice}")


def cluster_from_tree(tree: Mapping[str, Any], name: str, *, where: str = "") -> Cluster:
    """Builds a cluster from the keys of a device's file (docs/planner.md says what each means). `where` is what an
    error calls the file. Raises ConfigError for the first key that misses or holds no number."""
    found: dict[str, dict[str, Any]] = {}
    try:
        for section, keys in _NUMBERS.items():
            given = [key for key in keys if key not in _OPTIONAL or tree[section].get(key) is not None]
            found[section] = {keys[key][0]: _number(tree[section], key) * keys[key][1] for key in given}
        section = "device"
        own, rates = tree["device"], {}
        for key in ("peak_tflops", "attention_tflops"):
            if not isinstance(own[key], Mapping):
                raise ValueError(
                    f"{key} = {shown(own[key])}: must hold a number for each name, such as {{bf16: 989.4}}"
                )
            said = {f"{key}.{each}": value for each, value in own[key].items()}
            rates[key] = {each: 1e12 * _number(said, f"{key}.{each}") for each in own[key]}
        if not isinstance(names := own.get("cuda_names", []), list):
            raise ValueError(f"cuda_names = {shown(names)}: must be a list, such as [NVIDIA H100 PCIe]")
        if sorted(rates["attention_tflops"]) != ["backward", "forward"]:
            there = ", ".join(rates["attention_tflops"])
            raise ValueError(f"attention_tflops: has {there}, and must have forward and backward")
        section = "measured"
        measured = calibration_from_tree(tree["measured"]) if "measured" in tree else None
    except KeyError as missing:
        key = missing.args[0] if missing.args[0] == section else f"{section}.{missing.args[0]}"
        how = "calibrate measures it" if section == "measured" else "hardware h100 shows a whole file"
        told = f"{key}: required and not given; parallel3d-plan {how}"
        raise ConfigError(f"hardware {where or name}: {told}") from missing
    except (TypeError, ValueError, AttributeError) as problem:
        raise ConfigError(f"hardware {where or name}: {section}.{problem}") from problem
    node, network = (Link(**{to: found[part].pop(to) for to, _ in _LINK.values()}) for part in ("node", "network"))
    return Cluster(
        name=name,
        device=Device(
            name=str(own.get("name", name)),
            peak_flops=rates["peak_tflops"],
            attention_flops=rates["attention_tflops"],
            family=str(own.get("family", "")),
            cuda_names=tuple(map(str, names)),
            price_from=str(own.get("price_from") or ""),
            **found["device"],
        ),
        node=node,
        network=network,
        **found["node"],
        **found["network"],
        device_file=name,
        measured=measured,
    )


def cluster_tree(cluster: Cluster) -> dict[str, Any]:
    """Returns what `cluster_from_tree` reads this cluster from, but for what `calibrate` has measured."""
    device, parts = cluster.device, {"node": cluster.node, "network": cluster.network}
    tree: dict[str, Any] = {"device": {"name": device.name}}
    for key in ("family", "cuda_names", "price_from"):
        if value := getattr(device, key):
            tree["device"][key] = list(value) if key == "cuda_names" else value
    for key, rates in (("peak_tflops", device.peak_flops), ("attention_tflops", device.attention_flops)):
        tree["device"][key] = {name: flops / 1e12 for name, flops in rates.items()}
    for section, keys in _NUMBERS.items():
        for key, (to, unit) in keys.items():
            owner = device if section == "device" else parts[section] if key in _LINK else cluster
            if (value := getattr(owner, to)) is not None:
                tree.setdefault(section, {})[key] = int(value) if key in _WHOLE else value / unit
    return tree


def _number(tree: Mapping[str, Any], key: str) -> float:
    try:
        number = float(tree[key])
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} = {shown(tree[key])}: must be a number") from None
    if key in _WHOLE and (isinstance(tree[key], bool) or number % 1):
        raise ValueError(f"{key} = {shown(tree[key])}: must be a whole number")
    return int(number) if key in _WHOLE else number


def with_links(
    cluster: Cluster, *, network_gb_per_s: float | None, node_gb_per_s: float | None, gpus_per_node: int | None
) -> Cluster:
    """Returns the same devices behind other links or in nodes of another size; None leaves what it stands for."""
    said = ((cluster.network, network_gb_per_s), (cluster.node, node_gb_per_s))
    network, node = (link if speed is None else replace(link, bandwidth=speed * 1e9) for link, speed in said)
    return replace(cluster, network=network, node=node, gpus_per_node=gpus_per_node or cluster.gpus_per_node)


def with_scales(cluster: Cluster, scales: Scales) -> Cluster:
    """Returns the cluster with everything that it does as much slower as the scales say: the rates that are sustained,
    the seconds that a kernel, a launch or a message takes, and the measurements of a calibrated host."""
    arithmetic, network = scales.arithmetic, scales.network
    device = replace(
        cluster.device,
        matmul_efficiency=cluster.device.matmul_efficiency / arithmetic,
        memory_efficiency=cluster.device.memory_efficiency / arithmetic,
        attention_flops={way: rate / arithmetic for way, rate in cluster.device.attention_flops.items()},
        kernel_s=cluster.device.kernel_s * arithmetic,
        launch_s=cluster.device.launch_s * arithmetic,
    )
    node, between = (
        replace(link, efficiency=link.efficiency / network, latency_s=link.latency_s * network)
        for link in (cluster.node, cluster.network)
    )
    measured = cluster.measured and cluster.measured.scaled(arithmetic, network)
    return replace(cluster, device=device, node=node, network=between, measured=measured, scales=scales)
