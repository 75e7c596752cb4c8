"""`parallel3d-checkpoint export`: writes the model of a checkpoint in Hugging Face format."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

from parallel3d.checkpoint.manifest import CONFIG_FILE, find_damage
from parallel3d.config.load import load_recipe
from parallel3d.export import ExportForm, export
from parallel3d.models import shape_cards
from parallel3d.tools.checkpoint.contents import find_checkpoint
from parallel3d.tools.cli_output import Reply

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: None}


def answer(options: Namespace) -> Reply:
    """Exports a checkpoint and describes the result. Raises DamagedCheckpointError before it writes
    anything if the checkpoint is damaged."""
    checkpoint, notes = find_checkpoint(options.path)
    for damage in find_damage(checkpoint):
        raise damage.error(checkpoint)
    to = options.to
    form = ExportForm.from_recipe(load_recipe(checkpoint / CONFIG_FILE, cards=shape_cards()))
    form = replace(
        form, dtype=_DTYPES[options.dtype], largest_file_bytes=int(options.max_shard_size)
    )
    for _ in export(checkpoint, to, form):
        pass
    notes += form.notes
    config = json.loads((to / "config.json").read_text())
    architecture = config["architectures"][0]
    dtype = config["dtype"]
    files = {path.name: path.stat().st_size for path in sorted(to.iterdir())}
    tree = {
        "checkpoint": str(checkpoint),
        "to": str(to),
        "architecture": architecture,
        "dtype": dtype,
        "files": files,
        "notes": notes,
    }
    listed = (f"  {size:>15,}  {name}" for name, size in files.items())
    page = [f"exported {checkpoint} to {to}: {architecture}, {dtype}", *listed, *notes]
    return Reply(page=page, tree=lambda: tree)
