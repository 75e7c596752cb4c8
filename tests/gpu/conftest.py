"""Marks the tests of this folder, and skips them without a GPU. What they measure is in the report
of `--junitxml FILE`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Measure = Callable[[str, float], float]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(no_gpu)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measure:
    """`measured(name, value)` puts a value into the report and returns it."""

    def measure(name: str, value: float) -> float:
        record_property(name, f"{value:.4g}")
        return value

    return measure
