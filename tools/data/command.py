"""`parallel3d-data`: makes folders of tokens from text, says what is in them, checks them and joins
them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import parallel3d
from parallel3d.errors import ConfigError, printable
from parallel3d.tools.arguments import Parser, new_path, share, whole
from parallel3d.tools.reply import Reply, exit_status

_BYTE_LEVEL_IDS = 257  # a byte-level BPE without merges has the bytes and an end of text
_EPILOG = """\
examples:
  parallel3d-data tokenize ~/notes --pattern '*.md' --train-bpe 8000 --out data/notes
  parallel3d-data tokenize part-*.jsonl.zst --tokenizer tokenizer.json --out data/web
  parallel3d-data inspect data/notes
  parallel3d-data check data/notes
  parallel3d-data merge data/notes data/more --out data/all

exit status:
    0  done
    2  usage, or what cannot be done as asked
   65  an input or a folder of tokens that is damaged
   73  stdout cannot be written
  130  interrupted; the same `tokenize` command goes on
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit status."""
    return exit_status(arguments, _run)


def _run(words: list[str]) -> int:
    options = _parser().parse_args(words)
    reply: Reply = options.answer(options)
    return reply.print(as_json=options.json)


def _parser() -> Parser:
    parser = Parser(
        prog="parallel3d-data",
        description=(
            "Makes folders of tokens that training reads (data.source: tokens), and says what is "
            "in them."
        ),
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
    _add_tokenize(
        commands.add_parser("tokenize", help="text, JSON lines, Parquet or data sets into tokens")
    )
    for name, answer, summary in (
        ("inspect", _inspect, "what is in a folder of tokens, or in Megatron's PREFIX.bin"),
        ("check", _check, "verify checksums, ids and borders of documents; show three samples"),
    ):
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        command.add_argument("path", metavar="DIR|PREFIX", type=Path)
        command.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else"
        )
        command.set_defaults(answer=answer)
    summary = "several folders of one tokenizer into one"
    merge = commands.add_parser("merge", help=summary, description=f"Joins {summary}.")
    merge.add_argument(
        "paths", metavar="DIR", nargs="+", type=Path, help="folders, in the order of the result"
    )
    merge.add_argument("--out", metavar="DIR", type=new_path, required=True, help="the new folder")
    merge.set_defaults(answer=_merge, json=False)
    return parser


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tokenize`."""
    parser.description = (
        "Encodes text on all cores. Stopped at any moment, the same command goes on, and gives the "
        "same files."
    )
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="+",
        help="a file, a folder searched recursively, or a saved data set",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=new_path,
        required=True,
        help="the new folder (megatron: PREFIX)",
    )
    made = parser.add_mutually_exclusive_group()
    made.add_argument("--tokenizer", metavar="bytes|PATH", help="a tokenizer.json (default: bytes)")
    made.add_argument(
        "--train-bpe",
        metavar="VOCAB",
        type=whole,
        help="train a byte-level BPE of so many ids first",
    )
    parser.add_argument(
        "--end-of-text", metavar="TOKEN", help="the tokenizer's token that ends a document"
    )
    parser.add_argument(
        "--pattern", metavar="GLOB", help="names of a folder's files (default: of known formats)"
    )
    formats = ("auto", "text", "jsonl", "parquet", "datasets")
    parser.add_argument(
        "--input-format", choices=formats, default="auto", help="default: by each file's name"
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        default="text",
        help="of JSON, Parquet and data sets (default: text)",
    )
    parser.add_argument(
        "--separator",
        metavar="TEXT",
        help="between documents of a text file (default: a file is one)",
    )
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="of a data set (default: train)"
    )
    parser.add_argument(
        "--errors",
        choices=("strict", "skip", "replace"),
        default="strict",
        help="for text that is not UTF-8 (default: strict)",
    )
    parser.add_argument(
        "--validation-fraction",
        metavar="F",
        type=share,
        default=0.05,
        help="the share of documents (default: 0.05)",
    )
    parser.add_argument(
        "--format",
        choices=("flat", "megatron"),
        default="flat",
        help="of the result (default: flat)",
    )
    parser.add_argument(
        "--workers", metavar="N", type=whole, help="processes (default: one a core)"
    )
    parser.set_defaults(answer=_tokenize, json=False)


def _tokenize(options: argparse.Namespace) -> Reply:
    if options.validation_fraction == 1:
        raise ConfigError("--validation-fraction 1: leaves nothing to train on; try 0.05")
    if options.train_bpe is not None and options.train_bpe < _BYTE_LEVEL_IDS:
        raise ConfigError(
            f"--train-bpe {options.train_bpe}: must be at least {_BYTE_LEVEL_IDS}, the bytes; try "
            "8000"
        )
    from parallel3d.tools.data.chunks import TokenizerChoice
    from parallel3d.tools.data.folders import inspect
    from parallel3d.tools.data.inputs import Reading
    from parallel3d.tools.data.job import TokenizeJob, tokenize

    job = TokenizeJob(
        inputs=tuple(options.inputs),
        out=options.out,
        reading=Reading(
            format=options.input_format,
            pattern=options.pattern,
            field=options.field,
            separator=options.separator,
            split=options.split,
            errors=options.errors,
        ),
        tokenizer=TokenizerChoice(options.tokenizer or "bytes", options.end_of_text),
        train_bpe=options.train_bpe,
        validation_fraction=options.validation_fraction,
        megatron=options.format == "megatron",
        workers=options.workers or len(os.sched_getaffinity(0)),
    )
    tokenize(job, lambda line: print(printable(line), file=sys.stderr, flush=True))
    return inspect(options.out)


def _inspect(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.data.folders import inspect

    return inspect(options.path)


def _check(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.data.folders import check

    return check(options.path)


def _merge(options: argparse.Namespace) -> Reply:
    from parallel3d.tools.data.folders import inspect, merge

    merge(options.paths, options.out)
    return inspect(options.out)
