"""Runs on two hosts: network namespaces of this machine, with addresses and names of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from two_hosts import Host, two_hosts

LISTEN = "import socket; s = socket.create_server(('', 4000)); print('up', flush=True); print(s.accept()[0].recv(9))"
SEND = "import socket; s = socket.create_connection(('host0', 4000), timeout=0.5); s.sendall(b'hello'); s.close()"


def reaches(sender: Host, receiver: Host) -> bool:
    listener = receiver.start(sys.executable, "-c", LISTEN, stdout=subprocess.PIPE)
    assert listener.stdout is not None and listener.stdout.readline() == "up\n"
    sent = sender.run(sys.executable, "-c", SEND)
    if sent.returncode:
        receiver.kill_all()
    told, _ = listener.communicate(timeout=10)
    assert (told == "b'hello'\n") is (sent.returncode == 0), sent.stderr
    return sent.returncode == 0


def test_two_hosts_hear_each_other_until_the_cable_is_cut_and_leave_nothing() -> None:
    with two_hosts() as pair, two_hosts() as other:
        first, second = pair.hosts
        assert first.run("hostname").stdout == "host0\n" and second.run("hostname").stdout == "host1\n"
        assert reaches(second, first)
        pair.limit(100)
        assert "rate 100Mbit" in first.run("tc", "qdisc").stdout
        pair.limit(None)
        pair.lose(1.0)
        assert not reaches(second, first)
        pair.lose(0.0)
        assert reaches(second, first)
        pair.cut()
        assert not reaches(second, first) and reaches(other.hosts[1], other.hosts[0])
        pair.join()
        assert reaches(second, first)
        process = second.start("sleep", "600")
        namespaces = {host.namespace for each in (pair, other) for host in each.hosts}
    assert process.wait(timeout=10) == -9
    assert not namespaces & ({path.name for path in Path("/run/netns").iterdir()})
    assert not namespaces & ({path.name for path in Path("/etc/netns").iterdir()})
