"""Launch scripts for a plan's recipe, free of any site's particulars: torchrun, SLURM, TorchX, Kubernetes.

Each starts the same worker, `python -m parallel3d.recipes.pretrain`, which reads what its launcher sets.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from parallel3d.errors import ConfigError

if TYPE_CHECKING:  # the launchers are listed by --help, which need not wait for the planner
    from parallel3d.planner.search.question import Question, Strategy

_SIGNAL_LEAD_S = 120  # before SLURM's time limit
_PORT = 29500

_TORCHRUN = Template("""\
#!/usr/bin/env bash
# $gpus devices, $nodes node(s) of $per_node. Run this on every node, from the same folder:
#     $start
# More arguments are overrides of the recipe, such as train.steps=20.
set -euo pipefail
exec torchrun $rendezvous \\
    --nproc-per-node $per_node \\
    -m parallel3d.recipes.pretrain $recipe "$$@"
""")

_SLURM = Template("""\
#!/usr/bin/env bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$per_node
#SBATCH --gpus-per-node=$per_node
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=TERM@$lead
#SBATCH --requeue
# Your site's own lines: --partition, --account, --time, modules, the environment with parallel3d.
# One task per GPU: srun itself starts the workers, so that their exit status is the job's.
set -uo pipefail

MASTER_ADDR=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$${MASTER_PORT:-$port}
export SLURM_NTASKS_PER_NODE=$${SLURM_NTASKS_PER_NODE:-$per_node}

# resume=auto goes on from the newest checkpoint, and starts anew where there is none.
srun --kill-on-bad-exit=1 python -m parallel3d.recipes.pretrain $recipe checkpoint.resume=auto "$$@"
status=$$?

# Stopped $lead s before the time limit (143), pre-empted (75), or lost a worker or a node: again, from the newest
# checkpoint, MOST_RESTARTS times. A bad config or bad data (2, 65), or a loss that is not finite (71), would only fail
# again.
case $$status in
    143 | 75 | 69 | 70)
        [ "$${SLURM_RESTART_COUNT:-0}" -lt "$${MOST_RESTARTS:-10}" ] && scontrol requeue "$$SLURM_JOB_ID"
        ;;
esac
exit "$$status"
""")

_TORCHX = Template("""\
#!/usr/bin/env bash
# $gpus devices, $nodes node(s) of $per_node. SCHEDULER is one of `torchx runopts`: slurm, kubernetes, local_cwd, ...
#     SCHEDULER=slurm bash $file
# More arguments are overrides of the recipe, such as train.steps=20. Its file must be where the workers run.
set -euo pipefail

exec torchx run --scheduler "$${SCHEDULER:-local_cwd}" dist.ddp \\
    --name $name \\
    -j ${nodes}x$per_node --gpu $per_node \\
    -m parallel3d.recipes.pretrain -- $recipe "$$@"
""")

_K8S = Template("""\
# $gpus devices, $nodes pod(s) of $per_node. Plain Kubernetes (1.27 or later), no operator:
#     kubectl create configmap $name --from-file=recipe.yaml=$recipe
#     kubectl apply -f $file
# Replace IMAGE by one that has parallel3d, and mount storage that all pods share at /runs.
apiVersion: v1
kind: Service
metadata:
  name: $name
spec:
  clusterIP: None  # gives each pod the name $name-INDEX.$name
  publishNotReadyAddresses: true  # they meet before they are ready
  selector:
    job-name: $name
---
apiVersion: batch/v1
kind: PlannedRun
metadata:
  name: $name
spec:
  completionMode: Indexed
  completions: $nodes
  parallelism: $nodes
  backoffLimit: 0
  template:
    spec:
      subdomain: $name
      restartPolicy: Never
      containers:
        - name: worker
          image: IMAGE
          workingDir: /runs
          command: [torchrun]
          args:
            - --nnodes=$nodes
            - --nproc-per-node=$per_node
            - --node-rank=$$(JOB_COMPLETION_INDEX)
            - --master-addr=$name-0.$name
            - --master-port=$port
            - -m
            - parallel3d.recipes.pretrain
            - /recipe/recipe.yaml
          env:
            - name: JOB_COMPLETION_INDEX
              valueFrom:
                fieldRef:
                  fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
          resources:
            limits:
              nvidia.com/gpu: $per_node
          volumeMounts:
            - {name: recipe, mountPath: /recipe}
            - {name: shm, mountPath: /dev/shm}  # NCCL within the node
            - {name: runs, mountPath: /runs}
      volumes:
        - name: recipe
          configMap: {name: $name}
        - name: shm
          emptyDir: {medium: Memory}
        - name: runs
          emptyDir: {}  # replace by storage that all pods share: checkpoints are lost with this one
""")


@dataclass(frozen=True)
class _Launcher:
    template: Template
    file: str
    start: str  # what to type


LAUNCHERS = {
    "torchrun": _Launcher(_TORCHRUN, "launch.sh", "bash $file"),
    "slurm": _Launcher(_SLURM, "job.sbatch", "sbatch $file"),
    "torchx": _Launcher(_TORCHX, "torchx.sh", "SCHEDULER=slurm bash $file"),
    "k8s": _Launcher(_K8S, "job.yaml", "kubectl apply -f $file"),
}


def launch_file(kind: str, recipe: Path, said: Sequence[str]) -> Path:
    """Where a launcher is written: as the user said, or beside the recipe."""
    return Path(said[0]) if said else recipe.with_name(LAUNCHERS[kind].file)


def emit_launch(kind: str, path: Path, recipe: Path, question: Question, best: Strategy) -> Path:
    """Writes the script and returns its path."""
    text = launch_text(kind, path.name, recipe, question, best)
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--emit-launch {path}: cannot be written ({error.strerror}); try another path") from error
    return path


def launch_text(kind: str, file: str, recipe: Path, question: Question, best: Strategy) -> str:
    gpus, node = best.parallel.world_size, question.cluster.gpus_per_node
    per_node = min(gpus, node)
    if gpus % per_node:
        raise ConfigError(
            f"--emit-launch: {gpus} GPUs are not whole nodes of {node}; try --gpus {-(-gpus // node) * node}"
        )
    nodes = gpus // per_node
    # A name that SLURM, DNS and a shell all take as it is.
    name = re.sub(r"[^a-z0-9]+", "-", recipe.stem.lower()).strip("-")[:40] or "parallel3d"
    name = name if name[0].isalpha() else f"p3d-{name}"
    many = f'--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "${{HEAD:?}}:{_PORT}" --rdzv-id {name}'
    return LAUNCHERS[kind].template.substitute(
        gpus=gpus,
        nodes=nodes,
        per_node=per_node,
        name=name,
        file=shlex.quote(file),
        recipe=shlex.quote(str(recipe)),
        rendezvous=many if nodes > 1 else "--standalone",
        port=_PORT,
        lead=_SIGNAL_LEAD_S,
        start=f"HEAD=NAME_OF_ONE_NODE bash {file}" if nodes > 1 else f"bash {file}",
    )


def start_command(kind: str, written: Path, recipe: Path, question: Question, best: Strategy) -> str:
    """What to type to start it."""
    command = Template(LAUNCHERS[kind].start).substitute(file=shlex.quote(str(written)))
    if kind == "torchrun" and best.parallel.world_size > question.cluster.gpus_per_node:
        return f"HEAD=NAME_OF_ONE_NODE {command}    # on every node"
    if kind == "k8s":
        return f"{command}    # after the configmap of {recipe} (see the file)"
    return command
