"""Links through shared memory: what goes in comes out, whatever its size and however far the sender
is ahead."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.shared_memory.ring import LARGEST_BYTES, Incoming, Outgoing
from parallel3d.shared_memory.segment import PeerLostError


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outgoing, Incoming]:
    folder = tmp_path_factory.mktemp("link") / "0-1"
    incoming = Incoming(folder, 0)
    return Outgoing(folder, 1), incoming


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, LARGEST_BYTES // 4 - 32), max_size=20),
    takes=st.lists(st.booleans(), max_size=30),
)
def test_messages_arrive_whole_and_in_order(
    ends: tuple[Outgoing, Incoming], sizes: list[int], takes: list[bool]
) -> None:
    outgoing, incoming = ends
    sent: deque[tuple[int, int]] = deque()

    def take() -> None:
        outgoing.flush()
        number, size = sent.popleft()
        assert incoming.poll() == number
        into = [torch.empty(size, dtype=torch.int32), torch.empty((), dtype=torch.float64)]
        incoming.read(into)
        assert torch.equal(into[0], torch.arange(size, dtype=torch.int32) + number)
        assert into[1].item() == number

    order = deque(takes)
    for number, size in enumerate(sizes):
        tensors = [
            torch.arange(size, dtype=torch.int32) + number,
            torch.tensor(float(number), dtype=torch.float64),
        ]
        outgoing.send(number, tensors)
        sent.append((number, size))
        while sent and order and order.popleft():
            take()
    while sent:
        take()
    assert not outgoing.is_waiting
    assert incoming.poll() is None


def test_an_end_that_closes_is_noticed_by_the_other(tmp_path: Path) -> None:
    incoming = Incoming(tmp_path / "a", 0)
    outgoing = Outgoing(tmp_path / "a", 1)
    message = [torch.zeros(1), torch.zeros(())]
    outgoing.send(0, message)
    outgoing.close()
    assert incoming.poll() is not None  # what was sent before is there
    with pytest.raises(PeerLostError, match="lost connection to pipeline rank 0"):
        incoming.poll()
    incoming = Incoming(tmp_path / "b", 0)
    outgoing = Outgoing(tmp_path / "b", 1)
    incoming.close()
    with pytest.raises(PeerLostError, match="lost connection to pipeline rank 1"):
        outgoing.send(0, message)
