"""A class of the user's own as `model.architecture`: how it is found, what is refused before any
worker starts, and in which words. `tests/distributed/test_custom_model.py` trains it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel3d.config.load import load_recipe, to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.models import check_model, shape_cards

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "custom-model.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, which is the current one; imports are forgotten
    afterwards."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    for text, name in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / "palm.yaml").write_text(
        re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    )
    yield tmp_path
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def load(*overrides: str, path: str = "palm.yaml") -> Recipe:
    return load_recipe(Path(path), overrides, cards=shape_cards())


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_model(load(*overrides))
    return str(error.value)


def test_options_are_read_from_the_file_and_the_command_line_and_written_again(
    folder: Path,
) -> None:
    recipe = load("model.options.scale=1e-1", "model.options.activation=swiglu")
    assert recipe.model.options == {"activation": "swiglu", "biases": True, "scale": 0.1}
    (folder / "again.yaml").write_text(to_yaml(recipe))
    assert load(path="again.yaml") == recipe
    check_model(recipe)


@pytest.mark.parametrize(
    "override, said, tries",
    [
        (
            "model.architecture=palms",
            "model.architecture = palms: must be llama, gpt, transformers or module:Class",
            "my_model:MyModel",
        ),
        (
            "model.architecture=palms:Palm",
            "there is no module palms; it is searched on PYTHONPATH",
            "PYTHONPATH=",
        ),
        ("model.architecture=palm:Plam", "Plam is not defined in palm (", "try palm:Palm"),
        (
            "model.architecture=llama",
            "model.options = {'activation': 'gelu_tanh', 'biases': True}: only",
            "try to remove",
        ),
        (
            "model.options.scales=1",
            "model.options.scales: unknown key",
            "mean model.options.scale?",
        ),
        (
            "model.options.scale=2.0",
            "model.options.scale = 2.0: must be at most 1",
            "try 0.5",
        ),
        (
            "model.qk_norm=true",
            "model.qk_norm = true: palm:Palm does not read this key",
            "remove it",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(override: str, said: str, tries: str) -> None:
    message = refused(override)
    assert said in message
    assert tries in message
    assert "\n" not in message


CLASSES = """
from torch import nn
import torch
from parallel3d.layers.norm import LayerNorm
from parallel3d.layers.parameter import ParallelContext
from parallel3d.models.decoder import Decoder
from palm import Palm

META = ParallelContext(device="meta")

class Bare(nn.Module):
    Options = Palm.Options

    def __init__(self, config, tp=None, **settings):
        super().__init__()

class Partless(Decoder):
    Options = Palm.Options

class Undeclared(Palm):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.layers["0"].gain = nn.Parameter(torch.ones(3, device="meta"))

class Buffered(Palm):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.layers["0"].register_buffer("table", torch.ones(3))

class Misnamed(Palm):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.layers["last"] = self.layers.pop("3")

class Unused(Palm):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        for block in self.layers.values():
            block.forgotten = LayerNorm(config.hidden, tp=META)

class AllFrozen(Palm):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.requires_grad_(False)

class Frozen(Unused):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        for block in self.layers.values():
            block.forgotten.requires_grad_(False)

class Broken(Palm):
    def parts(self, config, placement):
        return 1 / 0
"""  # noqa: E501


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "Bare",
            "module embed is missing, but stages need it; derive the class from "
            "parallel3d.models.decoder.Decoder",
        ),
        (
            "Partless",
            "must define parts(config, context); see models/llama.py for an example",
        ),
        ("Undeclared", "parameter layers.0.gain was not added to a ParallelModule"),
        (
            "Buffered",
            "buffer layers.0.table would be empty, because the model is built on the meta device",
        ),
        (
            "Misnamed",
            "layers = ['0', '1', '2', 'last']: must be an nn.ModuleDict of model.layers = 4 blocks",
        ),
        (
            "Unused",
            "parameter layers.0.forgotten.weight, layers.0.forgotten.bias, "
            "layers.1.forgotten.weight, ",
        ),
        ("AllFrozen", "all parameters are frozen; set requires_grad=True"),
    ],
)
def test_a_class_that_lacks_something_is_refused_before_any_worker_starts(
    folder: Path, name: str, said: str
) -> None:
    (folder / "classes.py").write_text(CLASSES)
    message = refused(f"model.architecture=classes:{name}")
    assert message.startswith(f"model.architecture = classes:{name}: ")
    assert said in message
    has_two_faults = name == "Undeclared"  # No forward pass uses the parameter, either.
    assert ("\n" in message) == has_two_faults


@pytest.mark.parametrize(
    "text, said, last",
    [
        (CLASSES, "building the model failed", "ZeroDivisionError: division by zero"),
        ("import numpyy", "importing classes failed", "No module named 'numpyy'"),
    ],
)
def test_an_error_of_the_users_code_is_shown_with_its_traceback(
    folder: Path, text: str, said: str, last: str
) -> None:
    (folder / "classes.py").write_text(text)
    message = refused("model.architecture=classes:Broken")
    first, *trace = message.splitlines()
    assert first == f"model.architecture = classes:Broken: {said}:"
    assert last in trace[-1]
    assert any(f'File "{folder}/classes.py"' in line for line in trace)
    assert not any("models/custom.py" in line or "importlib" in line for line in trace)


def test_local_workers_find_the_module_where_the_command_does(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    settings = "train.steps=1 train.eval_every=1 train.eval_sequences=4 train.global_batch_size=4 "
    settings += f"train.sample_tokens=2 data.source=text data.path={PAGE} run_dir=run"
    program = f"{sys.executable} -m parallel3d.recipes.pretrain {folder}/palm.yaml"
    command = [*program.split(), *settings.split(), "checkpoint.every=1"]
    done = subprocess.run(
        command,
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "--- sample after step 1" in done.stdout
    (line,) = (elsewhere / "run/metrics.jsonl").read_text().splitlines()
    assert 5 < json.loads(line)["val_loss"] < 6.5
