#!/usr/bin/env bash
# {{workers}} workers, {{nodes}} node(s) of {{per_node}}. SCHEDULER is one of `torchx runopts`: slurm, kubernetes, local_cwd, ...
#     {{start}}
# More arguments are overrides of the recipe, such as train.steps=20. Its file must be where the workers run.
set -euo pipefail

{{settings}}

# torchrun, which torchx starts on each node, takes its options from variables PET_NAME: how often it starts all workers
# again after a failure, and the seconds after SIGTERM in which they save before it kills them (its default is 30).
# --max_retries lets the scheduler start a lost node again.
environment=PET_MAX_RESTARTS=${MOST_RESTARTS:-{{restarts}}},PET_SHUTDOWN_TIMEOUT={{stop_s}}{{names}}

exec torchx run --scheduler "${SCHEDULER:-local_cwd}" dist.ddp \
    --env "$environment" \
    --name {{name}} --max_retries "${MOST_RESTARTS:-{{restarts}}}" \
    -j {{nodes}}x{{per_node}} --gpu {{gpus_per_node}} \
    -m parallel3d.recipes.pretrain -- {{arguments}} "$@"
