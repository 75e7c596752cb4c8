"""`parallel3d-plan hardware`, and lookup of hardware files by the name of a device or cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import Cluster, load_cluster, with_links
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.report.json import hardware_tree
from parallel3d.tools.aliases.lookup import known_name
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.plan.accuracy import recorded_accuracy


def answer(options: argparse.Namespace) -> Reply:
    """Lists the shipped hardware files, or prints that of one device or cluster."""
    if options.name is None:
        every = _shipped()
        trees = [hardware_tree(each) for each in every.values()]
        return Reply(page=_list(every), tree=lambda: rounded({"hardware": trees}))
    cluster = find_cluster(options.name)
    name = file_of(options.name)
    path = _files().get(name, Path(name))
    return Reply(page=path.read_text().splitlines(), tree=lambda: rounded(hardware_tree(cluster)))


def file_of(name: str) -> str:
    """Returns the name of the hardware file for a device or cluster. Paths are returned unchanged.

    Raises ConfigError if the name is unknown.
    """
    is_path = Path(name).suffix in (".yaml", ".yml")
    return name if is_path else known_name("hardware", name)


def asked_cluster(options: argparse.Namespace) -> Cluster:
    """Returns the cluster of --gpu or --hardware, with the links, memory and price that the user
    gave.

    Raises ConfigError unless exactly one of the two options is given.
    """
    if bool(options.gpu) == bool(options.hardware):
        raise ConfigError("--gpu, --hardware: give exactly one of them, for example --gpu h100")
    cluster = with_links(
        find_cluster(options.hardware or options.gpu),
        network_gb_per_s=options.network_gb_per_s and options.network_gb_per_s / 1e9,
        node_gb_per_s=options.node_gb_per_s and options.node_gb_per_s / 1e9,
        gpus_per_node=options.gpus_per_node,
    )
    changes: dict[str, Any] = {}
    if options.gpu_memory is not None:
        changes["memory_gib"] = options.gpu_memory / GIB
    if options.price is not None:
        changes |= {"price_per_hour": options.price, "price_from": None}
    return replace(cluster, device=replace(cluster.device, **changes))


def find_cluster(name: str) -> Cluster:
    """Loads a cluster by its shipped name or by path. Raises ConfigError if it is unknown or
    invalid.
    """
    return load_cluster(file_of(name), [HARDWARE])


def larger_devices(needed_bytes: float) -> list[str]:
    """Returns the shipped devices with at least `needed_bytes` of memory, smallest first."""
    devices = [
        (cluster.device.memory_bytes, name)
        for name, cluster in _shipped().items()
        if cluster.device_file == name
    ]
    return [name for bytes_, name in sorted(devices) if bytes_ >= needed_bytes]


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(HARDWARE.glob("*.yaml"))}


def _shipped() -> dict[str, Cluster]:
    return {name: find_cluster(name) for name in _files()}


def _list(shipped: dict[str, Cluster]) -> Iterator[str]:
    runs = recorded_accuracy()["runs_by_hardware"]
    memory = "bf16 TFLOP/s    GiB  memory GB/s"
    yield f"{'name':<19}{'device':<16}{memory}  node  node GB/s  network GB/s  runs"
    for name, cluster in shipped.items():
        device = cluster.device
        figures = f"{device.peak('bf16') / 1e12:>12,.5g}{device.memory_bytes / GIB:>7,.0f}"
        speed = f"{device.memory_bandwidth / 1e9:>13,.0f}{cluster.gpus_per_node:>6}"
        links = f"{cluster.node.bandwidth / 1e9:>11,.5g}{cluster.network.bandwidth / 1e9:>14,.5g}"
        yield f"{name:<19}{cluster.device_file:<16}{figures}{speed}{links}{runs.get(name, '-'):>6}"
    yield ""
    yield "runs: number of published runs behind the error estimate; '-': data sheet only"
