"""`parallel3d-plan hardware`: the devices and clusters that the planner knows, and the figures and sources of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.report.json import hardware_tree
from parallel3d.tools.arguments import plan_parser
from parallel3d.tools.plan.accuracy import recorded_accuracy
from parallel3d.tools.plan.devices import cluster_files, device_files, file_of, find_cluster, hardware_files

_EPILOG = """\
examples:
  parallel3d-plan hardware
  parallel3d-plan hardware h100
  parallel3d-plan hardware h100 > mine.yaml    # then --hardware mine.yaml
  parallel3d-plan hardware meta-24k-roce       # a cluster: its network, and the name of its device

A device's file has its usual nodes and network; --gpus-per-node, --node-gb-per-s and --network-gb-per-s change those.
docs/planner.md says what each key means.
"""


def main(arguments: list[str]) -> int:
    parser = plan_parser(
        "hardware",
        takes="[NAME] [--json]",
        does="Lists the devices and clusters that the planner knows, or shows one's file with its sources.",
        epilog=_EPILOG,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a device, a cluster, or the path of your own file")
    options = parser.parse_args(arguments)
    if options.name is None:
        print(json.dumps(rounded(_trees())) if options.json else "\n".join(_list()))
        return 0
    cluster = find_cluster(options.name)
    if options.json:
        print(json.dumps(rounded(hardware_tree(cluster))))
        return 0
    name = file_of(options.name)
    path = hardware_files().get(name, Path(name))
    print(path.read_text(), end="")
    return 0


def _trees() -> dict[str, object]:
    return {"hardware": [hardware_tree(find_cluster(name)) for name in hardware_files()]}


def _list() -> Iterator[str]:
    runs = recorded_accuracy().runs_by_hardware
    yield "name               bf16 TFLOP/s    GiB  memory GB/s  node  node GB/s  network GB/s  scored runs"
    for name in device_files():
        cluster = find_cluster(name)
        device = cluster.device
        yield (
            f"{name:<18}{device.peak('bf16') / 1e12:>13,.5g}{device.memory_bytes / GIB:>7,.0f}"
            f"{device.memory_bandwidth / 1e9:>13,.0f}{cluster.gpus_per_node:>6}{cluster.node.bandwidth / 1e9:>11,.5g}"
            f"{cluster.network.bandwidth / 1e9:>14,.5g}{runs.get(name, '-'):>13}"
        )
    yield ""
    yield "cluster            device        node  node GB/s  network GB/s  beyond so many nodes"
    for name in cluster_files():
        cluster = find_cluster(name)
        spread = f"1/{cluster.oversubscription:g} beyond {cluster.whole_nodes}" if cluster.oversubscription > 1 else "-"
        yield (
            f"{name:<19}{cluster.device_file:<12}{cluster.gpus_per_node:>6}{cluster.node.bandwidth / 1e9:>11,.5g}"
            f"{cluster.network.bandwidth / 1e9:>14,.5g}  {spread}"
        )
    yield ""
    yield "scored runs: published runs that the planner's figures were compared with; '-': data sheets only"
