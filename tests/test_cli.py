"""`parallel3d-train`: what it refuses, how it says so, and what it does before any worker
starts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

import parallel3d
from parallel3d.checkpoint.manifest import MANIFEST_FILE
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.errors import NonFiniteError
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.models import shape_cards
from parallel3d.recipes import pretrain

Said = pytest.CaptureFixture[str]

BAD_INPUTS = [
    ("", "no RECIPE given; try quickstart, another name that --help lists"),
    ("--frobnicate quickstart", "--frobnicate: no such option; see parallel3d-train --help"),
    (
        "quickstart --train.steps=3",
        "--train.steps=3: no such option; write train.steps=3 to set a key",
    ),
    (
        "range-test --from-deepspeed ds.json",
        "--from-deepspeed cannot be combined with a recipe; remove range-test",
    ),
    ("quickstrat", "recipe quickstrat: no such file or shipped recipe; did you mean quickstart?"),
    (".", "recipe .: is a folder; use the path of a YAML file in it"),
    ("quickstart parallel.tp=3", "parallel.tp = 3: must divide"),
    (
        "quickstart checkpoint.resume=no/such/step",
        "checkpoint.resume = no/such/step: is not a checkpoint; try auto",
    ),
    (
        "quickstart run_dir=/dev/null/run",
        "run_dir = /dev/null/run: cannot be written (Not a directory); try another",
    ),
    (
        "quickstart parallel.dp_replicate=100 train.global_batch_size=800 train.eval_sequences=800",
        "with torchrun",
    ),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to a folder of the test's own, and no launcher's variable is set."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Takes the place of the launcher, and holds the recipes that it was to run."""
    launched: list[Recipe] = []

    def launch(target: str, recipe: Recipe, world_size: int, **options: object) -> int:
        assert world_size == recipe.parallel.world_size
        launched.append(recipe)
        return 0

    monkeypatch.setattr(pretrain, "launch_local", launch)
    return launched


@pytest.mark.parametrize(
    "arguments, message", BAD_INPUTS, ids=[arguments for arguments, _ in BAD_INPUTS]
)
def test_a_users_mistake_is_one_line_and_status_2(
    arguments: str, message: str, capsys: Said, no_workers: list[Recipe]
) -> None:
    assert pretrain.main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert message in said.err
    assert len(said.err.splitlines()) <= 2
    assert "Traceback" not in said.err
    assert no_workers == []


def test_print_config_prints_a_recipe_that_says_the_same(capsys: Said, tmp_path: Path) -> None:
    assert pretrain.main(["quickstart", "train.steps=7", "--print-config"]) == 0
    said = capsys.readouterr()
    (tmp_path / "again.yaml").write_text(said.out)
    recipe = load_recipe(tmp_path / "again.yaml", cards=shape_cards())
    assert recipe.train.steps == 7
    assert recipe.run_dir == "runs/quickstart"
    assert said.err == ""
    assert pretrain.main(["--print-schema"]) == 0
    assert "sequence_parallel" in capsys.readouterr().out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["quickstart", "--print-config"],
        ["quickstart", "parallel.tp=3"],
    ],
)
def test_help_and_config_errors_do_not_wait_for_torch(arguments: list[str]) -> None:
    program = textwrap.dedent(f"""
        import sys
        from parallel3d.recipes.pretrain import main
        try:
            main({arguments!r})
        except SystemExit:
            pass
        heavy = {{"torch", "numpy", "rich"}} & set(sys.modules)
        sys.exit(f"imported {{heavy}}" if heavy else 0)
    """)
    root = Path(parallel3d.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_run_that_resumes_goes_on_in_its_folder(
    no_workers: list[Recipe], capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Path("runs/quickstart/checkpoints/step_00000100")
    saved.mkdir(parents=True)
    (saved / MANIFEST_FILE).touch()
    assert pretrain.main(["quickstart", "checkpoint.resume=auto"]) == 65
    assert no_workers == []
    assert "manifest.json: is corrupt" in capsys.readouterr().err
    monkeypatch.setattr("parallel3d.checkpoint.store.check_manifests", lambda checkpoints: None)
    for resume in ("auto", "runs/quickstart/checkpoints/step_00000100"):
        assert pretrain.main(["quickstart", f"checkpoint.resume={resume}"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["quickstart"]


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("torchrun")
def test_under_torchrun_only_rank_0_tells_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    said = []
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        assert pretrain.main(["quickstart"]) == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith(
        "error: WORLD_SIZE = 6: the layout needs pp 2 x dp_shard 2 x tp 2 = 8 workers"
    )
    assert said[1] == ""


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    "error, status, says, has_traceback",
    [
        (NonFiniteError("step 3: loss nan"), 71, "step 3: loss nan", False),
        (ConnectionResetError("gone"), 70, "ConnectionResetError: gone", False),
        (ValueError("a bug"), 70, "ValueError: a bug", True),
    ],
)
def test_under_torchrun_a_failing_rank_says_who_it_is(
    error: Exception,
    status: int,
    says: str,
    has_traceback: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Said,
) -> None:
    def fail(recipe: Recipe, rendezvous: Rendezvous, command: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr("parallel3d.recipes.work", fail)
    monkeypatch.setenv("RANK", "5")
    assert pretrain.main(["quickstart"]) == status
    said = capsys.readouterr().err
    assert said.startswith("error: rank 5 (")
    assert f", pp 1, dp_replicate 0, dp_shard 0, cp 0, tp 1): {says}" in said
    assert ("Traceback" in said) == has_traceback
