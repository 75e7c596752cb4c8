"""Two hosts on one machine: network namespaces that a pair of virtual Ethernet devices joins, each
with an address and a name of its own. A test runs commands in them, and cuts what joins them. Needs
root and `ip`."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_launch import wait_until

_NUMBERS = itertools.count()
# then the process that made them, so that a later one finds what a killed one has left
_PREFIX = "p3dhosts"


@dataclass(frozen=True)
class Host:
    """One of the two hosts. Its network device is `eth0`."""

    namespace: str
    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Returns the command line that runs a command on this host, from any directory of the
        machine."""
        named = 'hostname "$0" && exec "$@"'
        enter = f"ip netns exec {self.namespace} unshare --uts sh -c".split()
        return [*enter, named, self.name, *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a command in a session of its own, with Popen's options. The hosts' end kills what
        still runs."""
        return subprocess.Popen(
            self.command(*arguments), text=True, start_new_session=True, **options
        )

    def pids(self) -> list[int]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace],
            capture_output=True,
            text=True,
        )
        return [int(pid) for pid in listed.stdout.split()]

    def kill_all(self) -> None:
        """Kills every process of this host, and returns when all have ended."""

        def has_ended() -> bool:
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not self.pids()

        wait_until(has_ended, 10)


class TwoHosts:
    """Both hosts and what joins them. `two_hosts` makes it."""

    def __init__(self, name: str) -> None:
        self.hosts = tuple(Host(f"{name}-{n}", f"host{n}", f"10.77.0.{n + 1}") for n in (0, 1))

    def cut(self) -> None:
        """Pulls the cable: nothing arrives any more, and nobody is told."""
        for host in self.hosts:
            self._unplug(host)

    def join(self) -> None:
        for host in self.hosts:
            _system("ip", "-n", host.namespace, "link", "set", "eth0", "up")

    def power_off(self, number: int) -> None:
        """Has one host vanish: the cable is dead first, so that no process can say good-bye to the
        other host."""
        self._unplug(self.hosts[number])
        self.hosts[number].kill_all()

    def remove(self) -> None:
        for host in self.hosts:
            host.kill_all()
            _remove(host.namespace)

    def _unplug(self, host: Host) -> None:
        _system("ip", "-n", host.namespace, "link", "set", "eth0", "down")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Makes two hosts for a block, and afterwards kills what runs on them and removes them. Skips
    the test where they cannot be made. Several processes and tests may have their own at the same
    time."""
    _remove_leftovers()
    pair = TwoHosts(f"{_PREFIX}-{os.getpid()}-{next(_NUMBERS)}")
    if reason := _why_none():
        pytest.skip(reason)
    try:
        for host in pair.hosts:
            # `ip netns exec` puts these files over those of /etc
            folder = Path("/etc/netns", host.namespace)
            folder.mkdir(parents=True)
            names = "".join(f"{each.address} {each.name}\n" for each in pair.hosts)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            try:
                _system("ip", "netns", "add", host.namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
        first, second = (host.namespace for host in pair.hosts)
        ends = f"eth0 netns {first} type veth peer name eth0 netns {second}"
        _system(*f"ip link add {ends}".split())
        for host in pair.hosts:
            _system(
                "ip",
                "-n",
                host.namespace,
                "address",
                "add",
                f"{host.address}/24",
                "dev",
                "eth0",
            )
            for device in ("lo", "eth0"):
                _system("ip", "-n", host.namespace, "link", "set", device, "up")
        yield pair
    finally:
        pair.remove()


def _why_none() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    return (
        f"{', '.join(missing)} is not installed (iproute2, util-linux, hostname)"
        if missing
        else None
    )


def _system(*arguments: str, check: bool = True) -> None:
    subprocess.run(arguments, check=check, capture_output=True, text=True)


def _remove(namespace: str) -> None:
    shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)
    if Path("/run/netns", namespace).exists():
        _system("ip", "netns", "del", namespace)


def _remove_leftovers() -> None:
    """Removes the hosts of processes that were killed before they could."""
    for path in [
        *Path("/etc/netns").glob(f"{_PREFIX}-*"),
        *Path("/run/netns").glob(f"{_PREFIX}-*"),
    ]:
        if not Path("/proc", path.name.split("-")[1]).exists():
            Host(path.name, "", "").kill_all()
            _remove(path.name)
