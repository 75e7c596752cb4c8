#!/usr/bin/env bash
# {{gpus}} devices, {{nodes}} node(s) of {{per_node}}. Run this on every node, from the same folder:
#     {{start}}
# More arguments are overrides of the recipe, such as train.steps=20.
set -euo pipefail
exec torchrun {{rendezvous}} \
    --nproc-per-node {{per_node}} \
    -m parallel3d.recipes.pretrain {{recipe}} "$@"
