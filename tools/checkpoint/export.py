"""`parallel3d-checkpoint export`: the model of a checkpoint as a folder that transformers opens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from parallel3d.checkpoint.integrity import find_damage
from parallel3d.checkpoint.manifest import CONFIG_FILE
from parallel3d.config.load import load_recipe
from parallel3d.export import ExportForm, export
from parallel3d.models import shape_cards
from parallel3d.tools.reply import Reply

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: None}


def export_from(
    checkpoint: Path,
    to: Path,
    *,
    notes: list[str],
    dtype: str | None,
    largest_file_bytes: int,
    overwrite: bool,
) -> Reply:
    """Exports a checkpoint to the folder `to`, and describes the result, with `notes`. Raises
    DamagedCheckpointError before it writes anything if a byte of the checkpoint is not what was
    saved."""
    for damage in find_damage(checkpoint):
        raise damage.error(checkpoint)
    form = ExportForm.from_recipe(load_recipe(checkpoint / CONFIG_FILE, cards=shape_cards()))
    form = replace(form, dtype=_DTYPES[dtype], largest_file_bytes=largest_file_bytes)
    for _ in export(checkpoint, to, form, overwrite=overwrite):
        pass
    config = json.loads((to / "config.json").read_text())
    files = {path.name: path.stat().st_size for path in sorted(to.iterdir())}
    tree = {
        "checkpoint": str(checkpoint),
        "to": str(to),
        "architecture": config["architectures"][0],
        "dtype": config["dtype"],
        "files": files,
        "notes": [*notes, *form.notes],
    }
    page = [
        f"{checkpoint} is in {to}: {config['architectures'][0]}, {config['dtype']}",
        *(f"  {size:>15,}  {name}" for name, size in files.items()),
        *notes,
        *form.notes,
    ]
    return Reply(page=lambda: page, tree=lambda: tree)
