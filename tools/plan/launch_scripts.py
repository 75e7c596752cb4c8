"""Launch scripts for a plan's recipe, free of any site's particulars: torchrun, SLURM, TorchX, Kubernetes.

Each starts the same worker, `python -m parallel3d.recipes.pretrain`, which reads what its launcher sets.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

from parallel3d.errors import ConfigError

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
kind: Job
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
class Launcher:
    """A kind of launch script: its text, its usual file name, and the command that starts it."""

    template: Template
    file: str
    start: str


LAUNCHERS = {
    "torchrun": Launcher(_TORCHRUN, "launch.sh", "bash $file"),
    "slurm": Launcher(_SLURM, "job.sbatch", "sbatch $file"),
    "torchx": Launcher(_TORCHX, "torchx.sh", "SCHEDULER=slurm bash $file"),
    "k8s": Launcher(_K8S, "job.yaml", "kubectl apply -f $file"),
}


def launch_text(kind: str, file: str, recipe: Path, *, gpus: int, gpus_per_node: int) -> str:
    """Returns the script, named `file`, that starts a recipe on so many devices. Raises ConfigError where the devices
    are not whole nodes."""
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        fitting = -(-gpus // gpus_per_node) * gpus_per_node
        raise ConfigError(f"--emit-launch: {gpus} GPUs are not whole nodes of {gpus_per_node}; try --gpus {fitting}")
    nodes = gpus // per_node
    # SLURM, DNS and a shell all take such a name as it is.
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


def start_command(kind: str, written: Path, recipe: Path, *, several_nodes: bool) -> str:
    """Returns what to type to start the script that was written."""
    command = Template(LAUNCHERS[kind].start).substitute(file=shlex.quote(str(written)))
    if kind == "torchrun" and several_nodes:
        return f"HEAD=NAME_OF_ONE_NODE {command}    # on every node"
    if kind == "k8s":
        return f"{command}    # after the configmap of {recipe} (see the file)"
    return command
