"""Commands that only look at a recipe, a run or a checkpoint run no code that lies beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d import recipes
from parallel3d.checkpoint.manifest import read_manifest, save_file
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import DataConfig
from tests.one_rank import one_rank
from tests.test_evaluate import RECIPE

# Names that torch and its libraries try to import, names that Python itself would take from a
# current folder, and the module of the class that the recipe names.
PLANTED = (
    "triton",
    "opt_einsum",
    "tabulate",
    "pandas",
    "psutil",
    "pydot",
    "numpy",
    "random",
    "statistics",
    "watcher",
)
COMMANDS = [  # with their exit statuses
    (0, "recipes.pretrain", "named.yaml", "--print-config"),
    (0, "tools.launch.command", "slurm", "named.yaml"),
    (0, "tools.plan.command", "memory", "--model", "named.yaml", "--gpu", "h100"),
    (0, "tools.checkpoint.command", "ls", "run"),
    (0, "tools.checkpoint.command", "inspect", "run"),
    (0, "tools.checkpoint.command", "verify", "run/checkpoints/step_00000004"),
    (73, "recipes.pretrain", "replay", "run", "tensorboard"),  # which is not installed
    (0, "tools.data.command", "tokenize", "text.txt", "--out", "tokens", "--workers", "2"),
    (0, "tools.plan.command", "verify", "named.yaml"),
    (0, "tools.checkpoint.command", "export", "run", "exported"),
    (65, "tools.checkpoint.command", "export", "run/checkpoints/step_00000002", "forged"),
]
DRIVER = """
import json, sys
from importlib import import_module
from pathlib import Path
for status, module, *arguments in json.loads(sys.argv[1]) if __name__ == "__main__" else []:
    path = list(sys.path)
    found = import_module(f"parallel3d.{module}").main(arguments)
    ran = Path(sys.argv[2]).read_text() if Path(sys.argv[2]).exists() else ""
    assert (ran, sys.path, found) == ("", path, status), arguments
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run, beside and in which modules lie that leave a mark when they
    are run."""
    tmp_path = tmp_path_factory.mktemp("looking")
    stranger = tmp_path / "stranger"
    marker = tmp_path / "marker"
    (stranger / "run").mkdir(parents=True)
    (stranger / "text.txt").write_text("All happy families are alike. " * 100)
    recipe = replace(
        RECIPE,
        train=replace(RECIPE.train, callbacks=("parallel3d:Callback",)),
        data=DataConfig(
            source="text",
            path=str(stranger / "text.txt"),
            validation_fraction=0.5,
        ),
        run_dir=str(stranger / "run"),
    )
    recipes.work(recipe, one_rank(tmp_path))
    named = replace(recipe, train=replace(recipe.train, callbacks=("watcher:Watch",)), run_dir=None)
    (stranger / "named.yaml").write_text(to_yaml(named))
    forged = stranger / "run/checkpoints/step_00000002"
    files = {}
    for folder in (stranger, stranger / "run", forged):
        for name in PLANTED:
            code = f"open({str(marker)!r}, 'a').write(__file__)\nclass Watch: pass\n"
            files[f"{name}.py"] = save_file(folder / f"{name}.py", code.encode())
    manifest = read_manifest(forged)
    replace(manifest, files=manifest.files | files).write(forged)
    (tmp_path / "driver.py").write_text(DRIVER)
    return stranger


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param(COMMANDS, id="looking"),
        pytest.param(
            [(0, "recipes.pretrain", "evaluate", "run", "train.callbacks=[watcher:Watch]")],
            id="evaluate",
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_command_that_looks_runs_modules_beside_a_recipe_or_in_a_run_or_checkpoint(
    stranger: Path, commands: list[tuple[int | str, ...]]
) -> None:
    driver = stranger.with_name("driver.py")
    marker = stranger.with_name("marker")
    words = [sys.executable, str(driver), json.dumps(commands), str(marker)]
    done = subprocess.run(
        words,
        cwd=stranger,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
