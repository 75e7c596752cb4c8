"""Dropout in one process: how many it drops, what its mask depends on, and the hash behind it."""

from __future__ import annotations

import pytest
import torch

from parallel3d.layers.dropout import GOLDEN, Dropout, _split_mix, dropout_key

SAMPLES = torch.tensor([0, 1])
KEY = dropout_key(0, 0, SAMPLES)


def test_the_hash_is_splitmix64() -> None:
    """The generator gives its published first outputs for seed 1234567 (Rosetta Code,
    "Pseudo-random numbers/ Splitmix64")."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    counter = torch.arange(1, 4) * GOLDEN + 1234567
    assert [value % 2**64 for value in _split_mix(counter).tolist()] == expected


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_drops_p_and_keeps_the_mean(p: float) -> None:
    y = Dropout(p, name="a")(torch.ones(2, 200, 300), KEY)
    dropped = (y == 0).double()
    n = y.numel()
    assert abs(dropped.mean().item() - p) < 5 * (0.25 / n) ** 0.5
    for value in y.unique().tolist():
        assert value in (0.0, pytest.approx(1 / (1 - p)))
    for dim in (1, 2):  # neither rows nor columns are alike
        by_line = dropped.mean(dim=dim)
        expected = (p * (1 - p) / y.shape[dim]) ** 0.5
        assert by_line.std().item() < 2 * expected + 1e-9


def test_a_mask_depends_on_every_part_of_its_key() -> None:
    x = torch.ones(2, 16, 16)

    def mask(key: torch.Tensor = KEY, name: str = "a") -> torch.Tensor:
        return Dropout(0.5, name=name)(x, key)

    assert torch.equal(mask(), mask())
    assert not torch.equal(mask()[0], mask()[1])
    others = [
        mask(dropout_key(1, 0, SAMPLES)),
        mask(dropout_key(0, 1, SAMPLES)),
        mask(dropout_key(0, 0, torch.tensor([2, 3]))),
        mask(name="b"),
    ]
    for other in others:
        assert not torch.equal(mask(), other)


def test_dropout_does_nothing_in_evaluation_and_refuses_nonsense() -> None:
    x = torch.randn(2, 3, 4)
    assert Dropout(0.5, name="a").eval()(x) is x
    with pytest.raises(ValueError, match="p = 1.0"):
        Dropout(1.0, name="a")
    with pytest.raises(ValueError, match="pass key=dropout_key"):
        Dropout(0.5, name="a")(torch.ones(3, 2))
