"""A worker's device, and its process group, which is closed however its block ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel3d.errors import ConfigError, RendezvousError
from parallel3d.launch.rendezvous import Rendezvous, choose_device, process_group


def rendezvous(rank: int = 0, world_size: int = 1, store: str = "store") -> Rendezvous:
    return Rendezvous(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        init_method=f"file://{store}",
    )


def test_auto_takes_gpus_only_where_every_worker_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", rendezvous(1, 2)) == torch.device("cuda", 1)
    assert choose_device("auto", rendezvous(1, 4)) == torch.device("cpu")
    assert choose_device("cpu", rendezvous(1, 2)) == torch.device("cpu")
    with pytest.raises(ConfigError, match="4 workers on this host need a GPU each, and it has 2"):
        choose_device("cuda", rendezvous(1, 4))


def test_the_process_group_is_closed_on_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), process_group(rendezvous(store=f"{tmp_path}/a"), torch.device("cpu"), 10.0):
        assert dist.is_initialized()
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_workers_that_do_not_come_are_named_in_time(tmp_path: Path) -> None:
    here = rendezvous(0, 2, f"{tmp_path}/b")
    with pytest.raises(RendezvousError, match="rank 0 of 2 did not meet the others"):  # noqa: SIM117
        with process_group(here, torch.device("cpu"), 1.0):
            pass
    assert not dist.is_initialized()
