#!/usr/bin/env bash
# {{workers}} workers, {{nodes}} node(s) of {{per_node}}. Run this on every node, from the same folder:
#     {{start}}
# More arguments are overrides of the recipe, such as train.steps=20.
set -euo pipefail

{{settings}}

# Where a worker fails or a node is lost, torchrun starts all workers again, this often, as soon as all nodes are there.
export PET_MAX_RESTARTS=${MOST_RESTARTS:-{{restarts}}}

# SIGTERM to torchrun reaches the workers, which save and end. After this many seconds it kills them (its default is 30).
export PET_SHUTDOWN_TIMEOUT={{stop_s}}

{{check}}

exec torchrun {{rendezvous}} \
    --nproc-per-node {{per_node}} \
    -m parallel3d.recipes.pretrain {{arguments}} "$@"
