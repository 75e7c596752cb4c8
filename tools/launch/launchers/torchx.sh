#!/usr/bin/env bash
# {{workers}} workers, {{nodes}} node(s) of {{per_node}}. SCHEDULER is one of `torchx runopts`: slurm, kubernetes, local_cwd, ...
#     {{start}}
# Further arguments are overrides of the recipe, such as train.steps=20. The recipe file must exist where the workers run.
set -euo pipefail

{{settings}}

# torchx starts torchrun on each node, which reads its options from PET_* variables: the maximum number of restarts after
# failures, and the seconds after SIGTERM in which workers save before it kills them (its default is 30). --max_retries
# lets the scheduler restart a lost node.
environment=PET_MAX_RESTARTS=${MOST_RESTARTS:-{{restarts}}},PET_SHUTDOWN_TIMEOUT={{stop_s}}{{names}}

exec torchx run --scheduler "${SCHEDULER:-local_cwd}" dist.ddp \
    --env "$environment" \
    --name {{name}} --max_retries "${MOST_RESTARTS:-{{restarts}}}" \
    -j {{nodes}}x{{per_node}} --gpu {{gpus_per_node}} \
    -m parallel3d.recipes.pretrain -- {{arguments}} "$@"
