"""Fills templates of scripts that start a recipe under torchrun, SLURM, torchx or Kubernetes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path

import yaml

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError

# Launcher -> (template, which is also the default name of the script; command that starts it). All
# start the same worker, parallel3d.recipes.pretrain, which reads the launcher's environment
# variables.
LAUNCHERS = {
    "torchrun": ("launch.sh", "bash"),
    "slurm": ("job.sbatch", "sbatch"),
    "torchx": ("torchx.sh", "SCHEDULER=slurm bash"),
    "k8s": ("job.yaml", "kubectl apply -f"),
}
RESTARTS = 10
_GRACE_S = 100.0  # Seconds for the last save if checkpoint.grace_s is not set.
_END_S = 20  # Seconds after that time until the launcher kills the workers.
_KILL_S = 30  # Seconds from then until Kubernetes kills the pod.
_SRUN = 'srun --kill-on-bad-exit=1 --cpus-per-task="$((cores > 0 ? cores : 1))"'
_RECIPE_OF_POD = "/recipe/recipe.yaml"
# Options of sbatch, with example values for error messages.
_OF_SBATCH = {"--partition": "gpu", "--account": "me", "--time": "24:00:00"}
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f\u2028\u2029]*")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Settings of a cluster. None: the cluster's default. `image` and `claim` default to
    placeholders.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    image: str = "IMAGE"
    claim: str = "CLAIM"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launch script for one recipe.

    `said` has the arguments of the worker: the recipe, then `key=value`. `per_node` is the number
    of workers per node, and `file` the name of the script.
    """

    kind: str
    recipe: Recipe
    said: tuple[str, ...]
    per_node: int
    file: str
    restarts: int = RESTARTS
    site: Site = field(default_factory=Site)
    checks_first: bool = False

    @property
    def nodes(self) -> int:
        return self.recipe.parallel.world_size // self.per_node

    @property
    def start(self) -> str:
        """Command that starts the script, without the name of the script."""
        needs_head = self.kind == "torchrun" and self.nodes > 1
        return ("HEAD=NAME_OF_ONE_NODE " if needs_head else "") + LAUNCHERS[self.kind][1]

    def text(self) -> str:
        """Returns the script. Raises ConfigError for a value that it cannot contain, and for a path
        that Kubernetes pods cannot reach.
        """
        self._refuse()
        values = self._values()
        template = _read(LAUNCHERS[self.kind][0])
        return "".join(f"{line}\n" for line in _filled(template, values))

    def _refuse(self) -> None:
        values = {f"--{option}": value for option, value in asdict(self.site).items()}
        for option, value in {**values, "the script's name": self.file}.items():
            rule = _PLAIN if option in _OF_SBATCH else _PRINTABLE
            if value is not None and not rule.fullmatch(value):
                example = _OF_SBATCH.get(option, "a name without line breaks")
                raise ConfigError(
                    f"{option} {shown(value)}: must match {rule.pattern}; try {example}"
                )
        for key, path in _paths(self.recipe) if self.kind == "k8s" else []:
            if not Path("/work", path).resolve().is_relative_to("/work"):
                raise ConfigError(
                    f"{key} = {shown(path)}: must be in /work, the storage of the pods; try "
                    f"{key}=/work/{Path(path).name}"
                )

    def _values(self) -> dict[str, str]:
        # SLURM, DNS and shells accept names of this form.
        name = re.sub(r"[^a-z0-9]+", "-", Path(self.said[0]).stem.lower())[:40].strip("-")
        name = name if name[:1].isalpha() else f"p3d-{name}".strip("-")
        has_gpus = self.recipe.train.device != "cpu"
        settings = _read("gpu_settings.sh").rstrip() if has_gpus else ""
        variables = re.findall(r"(\w+)=\$\{", settings)
        # The launcher may restart the run, which must then resume from the newest checkpoint.
        resume = ["checkpoint.resume=auto"] if self.recipe.checkpoint.resume == "none" else []
        # Seconds from the stop signal to the kill, which must suffice for the last save.
        stop_s = ceil(self.recipe.checkpoint.grace_s or _GRACE_S) + _END_S
        values = {
            "workers": str(self.recipe.parallel.world_size),
            "nodes": str(self.nodes),
            "per_node": str(self.per_node),
            "restarts": str(self.restarts),
            "gpus_per_node": str(self.per_node if has_gpus else 0),
            "backoff": str(self.restarts * self.nodes),
            "stop_s": str(stop_s),
            "kill_s": str(stop_s + _KILL_S),
            "name": name,
            "arguments": shlex.join([*self.said, *resume]),
            "start": f"{self.start} {shlex.quote(self.file)}",
            "settings": settings,
            "names": "".join(f",{name}=${name}" for name in variables),
            "rendezvous": self._rendezvous(name, 29500),
            "check": "",
            "site": "\n".join(self._slurm_lines(has_gpus)),
            "run": _SRUN,
            "image": _yaml_text(self.site.image),
            "claim": _yaml_text(self.site.claim),
        }
        if self.checks_first:
            values["check"] = "\n".join(self._check(values))
        if self.kind == "k8s":
            gpus = f"resources:\n  limits:\n    nvidia.com/gpu: {self.per_node}" if has_gpus else ""
            inner = replace(self, kind="torchrun", said=(_RECIPE_OF_POD,), file="this")
            script = "\n".join(
                line for line in inner.text().splitlines() if not line.startswith("#")
            )
            values |= {
                "limits": gpus,
                "recipe": to_yaml(self.recipe),
                "script": script.replace('"$@"', "").strip(),
            }
        return values

    def _rendezvous(self, name: str, port: int) -> str:
        if self.nodes == 1:
            return "--standalone"
        # The rendezvous ID is unique per job if the launcher sets a job ID.
        job = f'"{name}-${{JOB_ID:-${{SLURM_JOB_ID:-0}}}}"'
        return f'--nnodes {self.nodes} --rdzv-backend c10d --rdzv-endpoint "${{HEAD:?}}:{port}" --rdzv-id {job}'  # noqa: E501

    def _check(self, values: Mapping[str, str]) -> Iterator[str]:
        """Yields the lines of the script that check the nodes. If a finding would break the run,
        they name the node and end the script.
        """
        yield (
            "# The same workers first check the nodes. The run does not start if a finding would "
            "break it."
        )
        if self.kind == "slurm":
            yield f"{_SRUN} \\"
            yield f'    python -m parallel3d.tools.launch check {values["arguments"]} "$@" &&'
        else:  # On a separate port, so that agents of the check and of the run cannot connect.
            rendezvous = self._rendezvous(f"{values['name']}-check", 29499)
            yield f"PET_MAX_RESTARTS=0 torchrun {rendezvous} --nproc-per-node {self.per_node} \\"
            yield f'    -m parallel3d.tools.launch check {values["arguments"]} "$@"'

    def _slurm_lines(self, has_gpus: bool) -> Iterator[str]:
        if has_gpus:
            yield f"#SBATCH --gpus-per-node={self.per_node}"
        for option in _OF_SBATCH:
            value = getattr(self.site, option.removeprefix("--"))
            if value is not None:
                yield f"#SBATCH {option}={value}"


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yields the keys of a recipe that name files or folders, with their paths."""
    data = recipe.data
    checkpoint = recipe.checkpoint
    found = {"run_dir": recipe.run_dir, "data.path": data.path}
    found["checkpoint.start_from"] = checkpoint.start_from
    if data.tokenizer != "bytes":
        found["data.tokenizer"] = data.tokenizer
    if checkpoint.resume not in ("none", "auto"):
        found["checkpoint.resume"] = checkpoint.resume
    for index, source in enumerate(data.sources):
        found[f"data.sources[{index}].path"] = source.path
    for index, evaluated in enumerate(data.evaluation):
        found[f"data.evaluation[{index}].path"] = evaluated.path
    for key, path in found.items():
        if path is not None:
            yield key, os.path.expanduser(path) if key.startswith("data.") else path


def _read(name: str) -> str:
    return Path(__file__).with_name("launchers").joinpath(name).read_text()


def _yaml_text(text: str) -> str:
    return str(
        yaml.safe_dump(text, default_style='"', allow_unicode=True, width=len(text) + 2)
    ).strip()


def _filled(template: str, values: dict[str, str]) -> Iterator[str]:
    """Yields the lines of a template with its `{{names}}` replaced.

    A line that contains only a name becomes the lines of its value, with the same indentation. If
    the value is empty, the line and one following empty line are dropped."""
    skips_empty = False
    for line in template.splitlines():
        alone = re.fullmatch(r"( *){{(\w+)}}", line)
        if alone is not None:
            inner = values[alone[2]].split("\n") if values[alone[2]] else []
            yield from (f"{alone[1]}{each}".rstrip() for each in inner)
            skips_empty = not inner
        elif line or not skips_empty:
            yield re.sub(r"{{(\w+)}}", lambda found: values[found[1]], line)
            skips_empty = False
