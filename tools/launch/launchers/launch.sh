#!/usr/bin/env bash
# {{workers}} workers, {{nodes}} node(s) of {{per_node}}. Run this on every node, from the same folder:
#     {{start}}
# Further arguments are overrides of the recipe, such as train.steps=20.
set -euo pipefail

{{settings}}

# Maximum number of restarts. After a worker fails or a node is lost, torchrun restarts all workers once all nodes are back.
export PET_MAX_RESTARTS=${MOST_RESTARTS:-{{restarts}}}

# torchrun forwards SIGTERM to the workers, which save and end. After this many seconds it kills them (its default is 30).
export PET_SHUTDOWN_TIMEOUT={{stop_s}}

{{check}}

exec torchrun {{rendezvous}} \
    --nproc-per-node {{per_node}} \
    -m parallel3d.recipes.pretrain {{arguments}} "$@"
