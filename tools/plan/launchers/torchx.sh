#!/usr/bin/env bash
# {{gpus}} devices, {{nodes}} node(s) of {{per_node}}. SCHEDULER is one of `torchx runopts`: slurm, kubernetes, local_cwd, ...
#     {{start}}
# More arguments are overrides of the recipe, such as train.steps=20. Its file must be where the workers run.
set -euo pipefail

exec torchx run --scheduler "${SCHEDULER:-local_cwd}" dist.ddp \
    --name {{name}} \
    -j {{nodes}}x{{per_node}} --gpu {{per_node}} \
    -m parallel3d.recipes.pretrain -- {{recipe}} "$@"
