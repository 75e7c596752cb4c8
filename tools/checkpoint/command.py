"""`parallel3d-checkpoint`: takes checkpoints to other programs and from them, and says what is in
them. The file of a subcommand is imported when it is asked for something."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import parallel3d
from parallel3d.checkpoint.manifest import MANIFEST_FILE
from parallel3d.checkpoint.store import list_checkpoints, step_folders, step_of
from parallel3d.errors import ConfigError
from parallel3d.tools.arguments import Parser, memory_bytes
from parallel3d.tools.reply import Reply, exit_status

_EPILOG = """\
examples:
  parallel3d-checkpoint ls runs/quickstart
  parallel3d-checkpoint inspect runs/quickstart
  parallel3d-checkpoint verify runs/quickstart
  parallel3d-checkpoint export runs/quickstart exported/quickstart
  parallel3d-checkpoint export runs/quickstart/checkpoints/step_00000100 exported/step-100 --dtype bf16
  parallel3d-checkpoint import downloads/Llama-3.2-1B -o tuned.yaml

CKPT is a checkpoint (.../step_00000100), or the folder of a run, whose newest checkpoint is taken.

exit status:
    0  done
    2  usage, or what cannot be done as asked
   65  a checkpoint that is damaged
   73  files that cannot be written
  130  interrupted
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit status."""
    return exit_status(arguments, _run)


def find_checkpoint(text: str) -> tuple[Path, list[str]]:
    """Returns the checkpoint that CKPT means, and a line for each newer one of the run that is
    passed over. Raises ConfigError where there is none."""
    path = Path(text)
    if (path / MANIFEST_FILE).is_file():
        return path, []
    if found := list_checkpoints(path / "checkpoints") or list_checkpoints(path):
        newer = [
            each for each in step_folders(found[-1].parent) if step_of(each) > step_of(found[-1])
        ]
        return found[-1], [
            f"step {step_of(found[-1])}: {each} is incomplete (no {MANIFEST_FILE})"
            for each in newer
        ]
    words = "has no whole checkpoint" if path.is_dir() else "there is no such folder"
    raise ConfigError(
        f"CKPT = {text}: {words}; try a .../step_00000100 folder, or the folder of a run that has "
        "saved"
    )


def _run(words: list[str]) -> int:
    options = _parser().parse_args(words)
    reply: Reply = options.answer(options)
    return reply.print(as_json=options.json)


def _parser() -> Parser:
    parser = Parser(
        prog="parallel3d-checkpoint",
        description="Takes checkpoints to other programs and from them, and says what is in them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"parallel3d {parallel3d.__version__}",
        help="show the version",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, metavar, answer, summary in (
        (
            "ls",
            "RUN",
            _list,
            "the checkpoints of a run: steps, sizes, dates, which is whole and which is best",
        ),
        (
            "inspect",
            "CKPT",
            _inspect,
            "what a checkpoint holds: progress, layout, tensors and recipe",
        ),
        (
            "verify",
            "CKPT",
            _verify,
            "read every byte of a checkpoint, or of all of a run; name what is damaged",
        ),
    ):
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        command.add_argument("path", metavar=metavar, help="a checkpoint, or the folder of a run")
        command.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else"
        )
        command.set_defaults(answer=answer)
    _add_import(
        commands.add_parser(
            "import", help="a folder of transformers as the recipe of a run that starts from it"
        )
    )
    _add_export(
        commands.add_parser(
            "export", help="the model of a checkpoint as a folder that transformers opens"
        )
    )
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `export`."""
    parser.description = (
        "Writes the model of a checkpoint as transformers keeps one: safetensors, config.json, and "
        "the tokenizer. The checkpoint is checked first. It takes one process, and the memory of "
        "the largest tensor."
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or the folder of a run")
    parser.add_argument("to", metavar="DIR", type=Path, help="the new folder")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (default: as saved)"
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=memory_bytes,
        default=5e9,
        help="of one file (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export at DIR")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.set_defaults(answer=_export)


def _export(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.checkpoint.export import export_from

    checkpoint, notes = find_checkpoint(options.checkpoint)
    return export_from(
        checkpoint,
        options.to,
        notes=notes,
        dtype=options.dtype,
        largest_file_bytes=int(options.max_shard_size),
        overwrite=options.overwrite,
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `import`."""
    parser.description = (
        "Writes the model section of a recipe, and the checkpoint.start_from with which a run "
        "begins with the weights. Names, shapes and types of the tensors are compared; what a "
        "recipe cannot say is an error."
    )
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="a folder with config.json and safetensors"
    )
    parser.add_argument(
        "-o", "--out", metavar="RECIPE", type=Path, help="the file to write (default: print it)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.set_defaults(answer=_import)


def _import(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.checkpoint.import_hf import import_from

    return import_from(options.folder, options.out)


def _list(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.checkpoint.contents import list_run

    return list_run(Path(options.path))


def _inspect(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.checkpoint.contents import inspect

    return inspect(*find_checkpoint(options.path))


def _verify(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.checkpoint.contents import verify

    return verify(Path(options.path))
