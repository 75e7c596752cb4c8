"""Which GPU a rank takes, and the errors where the GPUs that there are do not fit. No GPU is needed
to ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel3d.errors import ConfigError
from parallel3d.launch.devices import (
    DeviceName,
    Place,
    check_places,
    choose_device,
    gpu_index,
    tp_warning,
)


def taken(
    wanted: DeviceName, local_rank: int, gpus: int, *, hidden: bool = False, **environ: str
) -> int | None:
    return gpu_index(wanted, local_rank, gpus=gpus, has_hidden=hidden, environ=environ)


def places(*gpus: str) -> list[Place]:
    """Places on the hosts and GPUs that strings like `a0` name; `a` alone is a rank of host a on
    the CPU."""
    return [
        Place(host=gpu[0], pid=rank, gpu=gpu if len(gpu) > 1 else "")
        for rank, gpu in enumerate(gpus)
    ]


def test_a_rank_takes_its_gpu_of_those_that_it_sees_and_the_cpu_only_without_any() -> None:
    assert [taken("auto", rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [taken("cuda", rank, 1) for rank in range(8)] == [0] * 8  # it is shown its own one
    assert taken("cpu", 0, 8) is None
    assert taken("auto", 0, 0) is None
    assert taken("auto", 0, 0, hidden=True, CUDA_VISIBLE_DEVICES="") is None


@pytest.mark.parametrize(
    ("wanted", "hidden", "environ", "message"),
    [
        ("cuda", False, {}, "train.device = cuda: torch sees no GPU here; ask the launcher"),
        (
            "auto",
            True,
            {},
            "train.device = auto: this host has GPUs, and torch sees none of them; .* "
            "train.device=cpu",
        ),
        ("auto", True, {"CUDA_VISIBLE_DEVICES": "9"}, r"none of them \(CUDA_VISIBLE_DEVICES = 9\)"),
    ],
)
def test_gpus_that_are_not_seen_are_an_error(
    wanted: DeviceName, hidden: bool, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        taken(wanted, 0, 0, hidden=hidden, **environ)


def test_ranks_with_a_gpu_each_are_accepted() -> None:
    check_places(places("a0", "a1", "b0", "b1"), "auto")
    check_places(places("a", "a", "b"), "auto")


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (("a0", "a1", "a0", "a1"), (
            "ranks 0 and 2 share one GPU of a, .* at most 2 workers there, or use train.dev"
        )),
        (("a0", "b0", "b0"), (
            "ranks 1 and 2 share one GPU of b, and each needs its own; start at most 1 worker there"
        )),
        (("a0", "a1", "b"), r"rank 2 \(b\) see no GPU, and the others do; ask the launcher for a GPU for each worker"),  # noqa: E501
        (("a0",) + ("b",) * 12, r"ranks 1, 2, 3, 4, 5, 6, 7, 8 and others \(b\)"),
    ],
)  # fmt: skip
def test_gpus_that_are_too_few_are_an_error_that_names_the_ranks(
    gpus: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_places(places(*gpus), "auto")


def test_a_rank_without_a_device_is_named_on_all_ranks() -> None:
    one = [*places("a0", "a1"), Place(host="b", pid=1, problem="train.device = cuda: none")]
    with pytest.raises(ConfigError, match=r"^train.device = cuda: none \(on rank 2, b\)$"):
        check_places(one, "cuda")
    with pytest.raises(ConfigError, match="^train.device = cuda: none$"):
        check_places(one[2:] * 3, "cuda")


def test_distinct_host_ids_of_nccl_let_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**environ: str) -> Place:
        return Place.of_this_process(torch.device("cuda", 0), environ=environ)

    properties: Any = type("Properties", (), {"uuid": "GPU-1"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ConfigError, match="ranks 0 and 1 share one GPU"):
        check_places([of(), of()], "cuda")
    check_places([of(NCCL_HOSTID="r0"), of(NCCL_HOSTID="r1")], "cuda")


def test_a_tp_group_on_several_hosts_is_warned_about() -> None:
    assert tp_warning("aaaabbbb", 4) is None
    warning = str(tp_warning("aaaabbbb", 8))
    assert warning.startswith("parallel.tp = 8: ranks 0 to 7 are on 2 hosts")
    assert "a host has 4 of the workers" in warning
    assert str(tp_warning("aaabbb", 2)).startswith("parallel.tp = 2: ranks 2 to 3 are")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_machine_without_gpus_computes_on_the_cpu() -> None:
    assert choose_device("auto", 3) == torch.device("cpu")
