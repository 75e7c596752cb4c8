"""Every command and program that a page prints is run here, by a test that the page names, or says
why it is not.

A fenced block of shell commands or of Python is run, from the first of a page to its last, in one
folder, as the reader would. An HTML comment before a block, or behind one command, says what
differs:

    <!-- not run: needs a second machine -->            the block is left out (`# not run: needs ...`: the command)
    <!-- run by tests/test_x.py -->                     that test reads the page; above a page's title: the whole page
    <!-- given: cp recipes/quickstart.yaml my.yaml -->  what the reader has before the block

A block whose commands begin with `$ ` shows what they print, and is not run. A block that opens with
`# name.py` is that file. `parallel3d-train quickstart` gets a smaller model
than the reader's, and 24 steps where the page says no number: commands are compared with the
program and not with a clock.
"""  # noqa: E501

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PAGES = [
    ROOT / "README.md",
    *sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md")]),
]
LIBRARIES = {  # beyond the development tools
    "README": ("transformers",),
    "checkpoints": ("transformers",),
    "data": ("tokenizers",),
    "first-run": ("tokenizers", "transformers"),
    "library": ("transformers",),
}
_BLOCK = re.compile(
    r"(?:<!-- ((?:(?!-->).)*?) -->\n+)?^```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_PROGRAMS = (
    r"parallel3d-\w+|torchrun|python3?|pip|make|bash|git|srun|sbatch|kubectl|vllm|lm_eval|"
    r"tensorboard|pytest"
)
_COMMAND = re.compile(rf"(?:\$ )?(?:[A-Za-z_]+=\S+ )*(?:{_PROGRAMS}) ")
_FILE = re.compile(r"# (\S+\.(?:py|yaml|json))\b")
_TRAIN = """\
#!/usr/bin/env bash
case "$*" in
quickstart* | "range-test quickstart"*)
    set -- "$@" model.hidden=48 model.ffn_hidden=64 train.seq_len=32 train.eval_sequences=16 train.global_batch_size=16
    case "$*" in *train.steps=* | range-test* | *--print-config*) ;; *) set -- "$@" train.steps=24 ;; esac ;;
esac
exec python -m parallel3d.recipes.pretrain "$@"
"""  # noqa: E501
_SHIMS = {
    "parallel3d-check-layout": "parallel3d.tools.check_layout",
    "parallel3d-checkpoint": "parallel3d.tools.checkpoint",
    "parallel3d-data": "parallel3d.tools.data",
    "parallel3d-launch": "parallel3d.tools.launch",
    "parallel3d-plan": "parallel3d.tools.plan",
    "parallel3d-report": "parallel3d.tools.report",
    "torchrun": "torch.distributed.run",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, or None."""
        found = _FILE.match(self.text)
        if found and self.language in ("python", "yaml", "json"):
            return found[1]
        return None

    @property
    def is_shell(self) -> bool:
        if self.language:
            return self.language in ("sh", "bash", "console", "shell")
        return any(_COMMAND.match(line + " ") for line in self.text.splitlines())

    @property
    def is_run(self) -> bool:
        is_code = self.is_shell or self.language == "python"
        shows_output = self.text.startswith("$ ")
        return is_code and not shows_output and not re.match("not run:|run by ", self.mark)

    def commands(self) -> list[str]:
        """The commands that are run, each with its continuation lines."""
        commands = re.findall(r"(?:.*\\\n)*.+\n", self.text)
        return [each for each in commands if "# not run: " not in each]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    whole = re.match(r"<!-- (run by .*?) -->\n", text)
    return [
        Block(
            page,
            text[: found.start(2)].count("\n") + 1,
            found[2],
            found[3],
            found[1] or (whole[1] if whole else ""),
        )
        for found in _BLOCK.finditer(text)
    ]


def script_of(blocks: list[Block]) -> str:
    """Returns the shell script of a page: its files, then its blocks in their order."""
    lines = [
        f"cat > {each.file} <<'END OF FILE'\n{each.text}END OF FILE\n"
        for each in blocks
        if each.file is not None
    ]
    for block in blocks:
        if not block.is_run:
            continue
        lines.append(f"echo '{block.where}' >> blocks\n")
        if block.mark.startswith("given: "):
            lines.append(block.mark.removeprefix("given: ") + "\n")
        if block.language == "python":
            lines += [] if block.file else [f"python - <<'END OF FILE'\n{block.text}END OF FILE\n"]
        else:
            lines += block.commands()
    return "".join(lines)


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.is_run for b in blocks_of(page))], ids=lambda p: p.stem
)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    for library in LIBRARIES.get(page.stem, ()):
        pytest.importorskip(library, reason="a command of the page needs it")
    programs = tmp_path / "bin"
    folder = tmp_path / "folder"
    programs.mkdir()
    folder.mkdir()
    (folder / "recipes").symlink_to(ROOT / "recipes")
    shims = {
        name: f'#!/usr/bin/env bash\nexec python -m {module} "$@"\n'
        for name, module in _SHIMS.items()
    }
    shims |= {
        "parallel3d-train": _TRAIN,
        "python": f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n',
    }
    for name, text in shims.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    blocks = blocks_of(page)
    command = ["bash", "-euo", "pipefail", "-c", script_of(blocks)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (
        f"{(folder / 'blocks').read_text().split()[-1]}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
