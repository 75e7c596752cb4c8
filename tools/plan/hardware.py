"""`parallel3d-plan hardware`, and the hardware file that a name means: a device in its usual nodes, or a cluster, whose
file names its device's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import Cluster, load_cluster
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.report.json import hardware_tree
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.names.lookup import find_name, unknown_name
from parallel3d.tools.plan.score import recorded_accuracy
from parallel3d.tools.reply import Reply


def answer(options: argparse.Namespace) -> Reply:
    """Lists what is shipped, or shows the file of one device or cluster."""
    if options.name is None:
        return Reply(page=_list, tree=lambda: rounded({"hardware": [hardware_tree(each) for _, each in _shipped()]}))
    cluster, name = find_cluster(options.name), file_of(options.name)
    path = _files().get(name, Path(name))
    return Reply(page=lambda: path.read_text().splitlines(), tree=lambda: rounded(hardware_tree(cluster)))


def device_files() -> list[str]:
    """Returns the names of the shipped files that describe a device."""
    return [name for name, cluster in _shipped() if cluster.device_file == name]


def cluster_files() -> list[str]:
    """Returns the names of the shipped files that describe a cluster and name a device's file."""
    return [name for name, cluster in _shipped() if cluster.device_file != name]


def file_of(name: str) -> str:
    """Returns the name of the file that a person's name for a device or a cluster stands for; a path stays as it is.
    Raises ConfigError for a name that nobody knows."""
    if Path(name).suffix in (".yaml", ".yml"):
        return name
    found = find_name("hardware", name)
    if found is None:
        raise unknown_name("hardware", name)
    return found


def asked_cluster(options: argparse.Namespace) -> Cluster:
    """Returns the cluster of --gpu or --hardware. Raises ConfigError where not one of the two is given."""
    if bool(options.gpu) == bool(options.hardware):
        raise ConfigError("--gpu, --hardware: required is one of the two; try --gpu h100")
    return find_cluster(options.hardware or options.gpu)


def find_cluster(name: str) -> Cluster:
    """Returns the cluster of a shipped name or of a file. Raises ConfigError with the nearest names, and for a figure
    that a user's own file has wrong and that would give nonsense and no error."""
    found = file_of(name)
    if found == name and Path(name).suffix in (".yaml", ".yml") and not Path(name).is_file():
        raise ConfigError(f"hardware {name}: no such file; shipped are {', '.join(_files())}")
    cluster = load_cluster(found, [HARDWARE])
    _check(cluster, name)
    return cluster


def larger_devices(needed_bytes: float) -> list[str]:
    """Returns the shipped devices whose memory holds `needed_bytes`, the smallest first."""
    sizes = {name: find_cluster(name).device.memory_bytes for name in device_files() if name != "cpu"}
    return sorted((name for name, size in sizes.items() if size >= needed_bytes), key=lambda name: sizes[name])


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(HARDWARE.glob("*.yaml"))}


def _shipped() -> list[tuple[str, Cluster]]:
    return [(name, find_cluster(name)) for name in _files()]


def _check(cluster: Cluster, name: str) -> None:
    device, node, network = cluster.device, cluster.node, cluster.network
    figures = {  # in the file's units
        "device.memory_gib": device.memory_bytes / GIB,
        "device.memory_gb_per_s": device.memory_bandwidth / 1e9,
        "device.processors": device.processors,
        "device.price_per_hour": 1.0 if device.price_per_hour is None else device.price_per_hour,
        "node.gpus": cluster.gpus_per_node,
        "network.oversubscription": cluster.oversubscription,
        "network.whole_nodes": cluster.whole_nodes,
        "node.gb_per_s": node.bandwidth / 1e9,
        "network.gb_per_s": network.bandwidth / 1e9,
        **{f"device.peak_tflops.{precision}": flops / 1e12 for precision, flops in device.peak_flops.items()},
        **{f"device.attention_tflops.{way}": flops / 1e12 for way, flops in device.attention_flops.items()},
    }
    latencies = {"node.latency_us": node.latency_s * 1e6, "network.latency_us": network.latency_s * 1e6}
    shares = {
        "device.matmul_efficiency": device.matmul_efficiency,
        "device.memory_efficiency": device.memory_efficiency,
        "node.efficiency": node.efficiency,
        "network.efficiency": network.efficiency,
    }
    shows = "parallel3d-plan hardware h100 shows usual figures"
    rules = [
        *((key, value, 0 < value < math.inf, f"above 0 and finite; {shows}") for key, value in figures.items()),
        *((key, value, 0 <= value < math.inf, "at least 0 and finite; try 3") for key, value in latencies.items()),
        *((key, value, 0 < value <= 1, "a share above 0 and at most 1; try 0.8") for key, value in shares.items()),
    ]
    for key, value, is_kept, rule in rules:
        if not is_kept:
            raise ConfigError(f"hardware {name}: {key} = {value:g}: must be {rule}")
    if "bf16" not in device.peak_flops:
        raise ConfigError(f"hardware {name}: device.peak_tflops must have bf16, the precision that others fall back to")


def _list() -> Iterator[str]:
    """Yields the table of devices and the table of clusters."""
    runs, shipped = recorded_accuracy()["runs_by_hardware"], _shipped()
    yield "name               bf16 TFLOP/s    GiB  memory GB/s  node  node GB/s  network GB/s  scored runs"
    for name, cluster in shipped:
        device = cluster.device
        if cluster.device_file == name:
            lead = f"{name:<18}{device.peak('bf16') / 1e12:>13,.5g}{device.memory_bytes / GIB:>7,.0f}"
            yield f"{lead}{device.memory_bandwidth / 1e9:>13,.0f}{_links(cluster)}{runs.get(name, '-'):>13}"
    yield ""
    yield "cluster            device        node  node GB/s  network GB/s  beyond so many nodes"
    for name, cluster in shipped:
        if cluster.device_file != name:
            shared = cluster.oversubscription > 1
            spread = f"1/{cluster.oversubscription:g} beyond {cluster.whole_nodes}" if shared else "-"
            yield f"{name:<19}{cluster.device_file:<12}{_links(cluster)}  {spread}"
    yield ""
    yield "scored runs: published runs that the planner's figures were compared with; '-': data sheets only"


def _links(cluster: Cluster) -> str:
    node, network = (link.bandwidth / 1e9 for link in (cluster.node, cluster.network))
    return f"{cluster.gpus_per_node:>6}{node:>11,.5g}{network:>14,.5g}"
