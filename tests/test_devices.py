"""Which GPU a rank takes, and the errors where the GPUs that there are do not fit. No GPU is needed
to ask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parallel3d.errors import ConfigError
from parallel3d.launch import devices
from parallel3d.launch.devices import Place, check_places, choose_device


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this a host with so many GPUs that torch sees, and perhaps with hidden ones."""

    def make(gpus: int, visible: str | None = None, *, hidden: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(devices, "_has_hidden_gpus", lambda: hidden)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def places(*gpus: str) -> list[Place]:
    """Places on the hosts and GPUs that strings like `a0` name; `a` alone is a rank of host a on
    the CPU."""
    return [
        Place(host=gpu[0], pid=rank, gpu=gpu if len(gpu) > 1 else "")
        for rank, gpu in enumerate(gpus)
    ]


def test_a_rank_takes_its_gpu_of_those_that_it_sees_and_the_cpu_only_without_any(
    host: Callable[..., None],
) -> None:
    host(4)
    assert [choose_device("auto", rank).index for rank in range(4)] == [0, 1, 2, 3]
    host(1)
    assert [choose_device("cuda", rank).index for rank in range(8)] == [0] * 8
    assert choose_device("cpu", 0).type == "cpu"
    host(0)
    assert choose_device("auto", 0).type == "cpu"
    host(0, "", hidden=True)
    assert choose_device("auto", 0).type == "cpu"
    for wanted, visible, is_hidden in (("cuda", None, False), ("auto", "9", True)):
        host(0, visible, hidden=is_hidden)
        words = rf"{wanted}: torch does not see a GPU \(CUDA_VISIBLE_DEVICES = {visible}\)"
        with pytest.raises(ConfigError, match=words):
            choose_device(wanted, 0)  # type: ignore[arg-type]


def test_ranks_with_a_gpu_each_are_accepted() -> None:
    check_places(places("a0", "a1", "b0", "b1"), "auto")
    check_places(places("a", "a", "b"), "auto")


@pytest.mark.parametrize(
    "gpus, message",
    [
        (("a0", "a1", "a0", "a1"), r"ranks 0 and 2 \(a\) share one GPU; start fewer workers there"),
        (("a0", "a1", "b"), r"rank 2 \(b\) see no GPU, but the others do; request one GPU"),
        (("a0",) + ("b",) * 12, r"ranks 1, 2, 3, 4, 5, 6, 7, 8 and others \(b\)"),
    ],
)
def test_gpus_that_are_too_few_are_an_error_that_names_the_ranks(
    gpus: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_places(places(*gpus), "auto")


def test_a_rank_without_a_device_is_named_on_all_ranks() -> None:
    one = [*places("a0", "a1"), Place(host="b", pid=1, problem="train.device = cuda: none")]
    with pytest.raises(ConfigError, match=r"^train.device = cuda: none \(rank 2, b\)$"):
        check_places(one, "cuda")
