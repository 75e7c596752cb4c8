"""A link that delays, loses and limits what passes it, where a kernel has no netem: a process that reads packets from a
TUN device in each of two network namespaces and writes them into the other. `TwoHosts.shape` starts it.

python slow_link.py NAMESPACE NAMESPACE DELAY_S LOSS BYTES_PER_S

It prints "up" when both devices, named `shaped`, are in their namespaces, and ends with its standard input.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

DEVICE = "shaped"  # in each namespace
_MTU = 1500
_QUEUE_S = 0.4  # what waits for longer to be sent at the rate of the link is lost
_TUNSETIFF = 0x400454CA  # from linux/if_tun.h, as are the flags: packets of IP, and nothing in front of them
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


class Direction:
    """The packets on their way from one host to the other. All wait equally long, so that they stay in order."""

    def __init__(self, source: int, target: int, delay_s: float, loss: float, bytes_per_s: float) -> None:
        self._source, self._target = source, target
        self._delay_s, self._loss, self._bytes_per_s = delay_s, loss, bytes_per_s
        self._random = random.Random(source)
        self._is_free_at = 0.0  # when the sender has sent what it was given
        self._on_the_way: deque[tuple[float, bytes]] = deque()  # with the time of their arrival

    def take(self, now: float) -> None:
        """Takes the packets that the source has sent."""
        try:
            while packet := os.read(self._source, 2 * _MTU):
                begin = max(now, self._is_free_at)
                if self._random.random() >= self._loss and begin - now <= _QUEUE_S:
                    self._is_free_at = begin + len(packet) / self._bytes_per_s
                    self._on_the_way.append((self._is_free_at + self._delay_s, packet))
        except BlockingIOError:
            pass
        except OSError:  # the device is down
            time.sleep(0.001)

    def deliver(self, now: float) -> float:
        """Hands over what has arrived. Returns the time of the next arrival."""
        while self._on_the_way and self._on_the_way[0][0] <= now:
            with suppress(OSError):  # where the device is down or full, the packet is lost
                os.write(self._target, self._on_the_way.popleft()[1])
        return self._on_the_way[0][0] if self._on_the_way else math.inf


def open_device(namespace: str, number: int) -> int:
    """Makes a TUN device, moves it into a namespace and returns its file."""
    name = f"p3d{os.getpid()}-{number}"
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", namespace, "name", DEVICE], check=True)
    shape = ["mtu", str(_MTU), "txqueuelen", "5000"]
    subprocess.run(["ip", "-n", namespace, "link", "set", DEVICE, *shape], check=True)
    return file


def main() -> None:
    files = [open_device(namespace, number) for number, namespace in enumerate(sys.argv[1:3])]
    delay_s, loss, bytes_per_s = map(float, sys.argv[3:6])
    there, back = (Direction(source, target, delay_s, loss, bytes_per_s) for source, target in (files, files[::-1]))
    by_source = dict(zip(files, (there, back), strict=True))
    print("up", flush=True)
    while True:
        now = time.monotonic()
        following = min(there.deliver(now), back.deliver(now))
        ready, _, _ = select.select([*files, 0], [], [], min(1.0, max(0.0, following - now)))
        if 0 in ready:
            return
        now = time.monotonic()
        for source in ready:
            by_source[source].take(now)


if __name__ == "__main__":
    main()
