"""What a host leaves for a run, read as Linux tells it, and the answer to a run that it cannot
hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.launch.free_memory import FreeMemory, free_memory
from parallel3d.recipes import named_recipe
from parallel3d.recipes.host_memory_check import check_host
from tests.hf_memory_grid import model_section

GIB = 1 << 30


def quickstart(*overrides: str) -> Recipe:
    return named_recipe("quickstart", overrides)


def write(files: dict[str, str], under: Path) -> None:
    for name, text in files.items():
        (under / name).parent.mkdir(parents=True, exist_ok=True)
        (under / name).write_text(text)


def host(folder: Path, cgroup: str, files: dict[str, str]) -> FreeMemory | None:
    """What is read on a host with 8 GiB available, whose process is in control group `cgroup`, and
    its files."""
    meminfo = f"MemTotal: {16 << 20} kB\nMemAvailable:    {8 << 20} kB\n"
    write({"meminfo": meminfo, "self/cgroup": cgroup}, folder / "proc")
    write(files, folder / "cgroup")
    return free_memory(folder / "proc", folder / "cgroup")


def test_the_least_of_the_system_and_of_all_control_groups_above_is_left(tmp_path: Path) -> None:
    assert host(tmp_path / "none", "0::/\n", {}) == FreeMemory(8 * GIB, "the system")
    open_group = {
        "job/memory.max": "max\n",
        "job/memory.current": "5\n",
        "job/memory.stat": "",
    }
    assert host(tmp_path / "open", "0::/job\n", open_group) == FreeMemory(8 * GIB, "the system")
    outer = {"job/memory.max": f"{4 * GIB}\n", "job/memory.current": f"{3 * GIB}\n"}
    outer["job/memory.stat"] = f"anon 7\ninactive_file {GIB // 2}\n"
    limited = FreeMemory(3 * GIB // 2, "the cgroup limit of 4.0 GiB")
    assert host(tmp_path / "outer", "0::/job/step\n", open_group | outer) == limited
    assert free_memory(tmp_path / "nothing") is None


def test_a_batch_that_does_not_fit_is_answered_with_a_leaner_layout() -> None:
    free = FreeMemory(6 * GIB, "the system")
    large = (
        "parallel.microbatch_size=512",
        "train.global_batch_size=2048",
        "train.eval_sequences=2048",
    )
    with pytest.raises(
        ConfigError, match="6.0 GiB; try parallel.recompute=full, a smaller model or"
    ):
        check_host(quickstart(*large), 8, free)
    check_host(quickstart(*large, "parallel.recompute=full", "parallel.microbatch_size=1"), 8, free)


def test_a_model_of_transformers_is_checked_and_a_class_of_your_own_is_not(tmp_path: Path) -> None:
    config = model_section("llama", tmp_path)
    recipe = quickstart("parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1")
    free = FreeMemory(2 * GIB, "the system")
    with pytest.raises(ConfigError, match="2.0 GiB; try"):
        check_host(replace(recipe, model=config), 1, free)
    check_host(replace(recipe, model=replace(config, architecture="mine:Model")), 1, free)
