"""A fault as data, and its trial: a run of the real command is started, the fault is done to it from outside, and what
it says, how soon it ends, what it leaves and how it goes on is compared with what the fault's row promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from uuid import uuid4

import parallel3d
from parallel3d.checkpoint.store import find_checkpoints
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.errors import RankError

STEPS, BATCH, SEQ_LEN = 60, 8, 16
_LONGEST_S = 120.0  # a run or a wait that takes longer has hung
_PEER_S = 40.0  # the longest that is waited for the peer's end
_ORPHANS_S = 5.0  # the longest that a process may stay after the command has ended
_TORCHS_OWN = ("torchinductor_", "torchelastic_")  # a cache for the next run; what torchrun leaves when it is killed
_MARK = "PARALLEL3D_FAULT_RUN"  # an environment variable that all processes of a run inherit
_PLANT = "PARALLEL3D_FAULT_PLANT"

TINY = ModelConfig(layers=2, hidden=16, heads=2, ffn_hidden=32, vocab=258)
PLANTED = replace(TINY, architecture="parallel3d.tools.bench.faults.planted:Planted")

Launch = Callable[[int], list[str]]  # the command before the recipe, for so many ranks


def local(ranks: int) -> list[str]:
    """The command that starts its workers itself."""
    return [sys.executable, "-m", "parallel3d.recipes.pretrain"]


def torchrun(ranks: int) -> list[str]:
    """torchrun on this host, without restarts."""
    return [*_TORCHRUN, "--nproc-per-node", str(ranks), "-m", "parallel3d.recipes.pretrain"]


def as_srun(ranks: int) -> list[str]:
    """A shell that starts the ranks with srun's variables, tells of each how it ends, and ends as rank 0 does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = (
        f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} SLURM_NTASKS={ranks} SLURM_TASKS_PER_NODE={ranks}; "
        f'for each in {{0..{ranks - 1}}}; do SLURM_PROCID=$each SLURM_LOCALID=$each "$@" & tasks[each]=$!; done; '
        f"for each in {{{ranks - 1}..0}}; do wait ${{tasks[each]}}; status=$?; "
        'echo "task $each: exited with exit code $status" >&2; done; exit $status'
    )
    return ["bash", "-c", start, "bash", *local(ranks)]


def under_nohup(ranks: int) -> list[str]:
    """The command, which nohup(1) starts."""
    return ["nohup", *local(ranks)]


def under_timeout(ranks: int) -> list[str]:
    """timeout(1) around the command; SIGALRM to it is the end of its time."""
    return ["timeout", "--preserve-status", "1h", *local(ranks)]


_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table of faults. `act` is done to the run when it has told of step `at_step`. `words` are regular
    expressions, each of which what the run says on stderr must match.

    A run ends with `status` (its command's, or under torchrun, which makes 1 of each, and with srun's variables that of
    outcome.json; None: as it likes), or `goes_on` to its end, and then the fault is found when the words are there."""

    name: str
    act: Callable[[LiveRun], None]
    words: tuple[str, ...]
    within_s: float
    parallel: ParallelConfig = ParallelConfig(dp_shard=2)
    launch: Launch = local
    status: int | None = 70
    goes_on: bool = False
    within_steps: int | None = None  # the most steps until a run that goes on has said them
    saves: bool = False  # the run saves the step at which it ends, which is one of the next two
    is_resumed: bool = True  # the same command goes on, with the losses of a run without a fault
    has_peer: bool = False  # plain torch under torchrun can suffer the same
    at_step: int = 12
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe  # other keys of the run, also of the one without a fault
    prepare: Callable[[Path], None] = lambda folder: None  # called with the run's parent folder before it starts
    mend: Callable[[Path], None] = lambda folder: None  # the same, before the command is started again


def to_rank(rank: int, signum: int) -> Callable[[LiveRun], None]:
    """Sends a signal to one rank."""
    return lambda run: os.kill(run.rank_pid(rank), signum)


def to_launcher(signum: int) -> Callable[[LiveRun], None]:
    """Sends a signal to the process that the user has started: the command itself, torchrun or timeout."""
    return lambda run: run.command.send_signal(signum)


def to_group(signum: int) -> Callable[[LiveRun], None]:
    """Sends a signal to all processes of the run, as a terminal, systemd and SLURM do."""
    return lambda run: os.killpg(run.command.pid, signum)


def to_fork_server(signum: int) -> Callable[[LiveRun], None]:
    """Sends a signal to the server that has forked the workers."""
    return lambda run: os.kill(run.fork_server(), signum)


def after(*acts: Callable[[LiveRun], None], pause_s: float = 0.2) -> Callable[[LiveRun], None]:
    """Does one thing after the other, with a pause between them."""

    def act(run: LiveRun) -> None:
        for number, each in enumerate(acts):
            time.sleep(pause_s if number else 0.0)
            each(run)

    return act


def plant(rank: int, function: str) -> Callable[[LiveRun], None]:
    """Has a rank call a function of `planted` in its next forward. The run's model must be PLANTED."""

    def act(run: LiveRun) -> None:
        partial = run.folder / "plant.partial"
        partial.write_text(f"{rank} {function}")
        partial.rename(run.folder / "plant")

    return act


class LiveRun:
    """A run of real processes in a session of their own, whose words go into a file. Its metrics say where it is."""

    def __init__(self, command: Sequence[str], folder: Path, metrics: Path) -> None:
        self.folder, self._metrics, self._mark = folder, metrics, uuid4().hex
        self._words = folder / "stderr"
        self._temporary = Path(tempfile.mkdtemp(prefix="p3d-"))  # short: sockets are made there
        source = str(Path(parallel3d.__file__).parents[1])
        own = {_MARK: self._mark, _PLANT: str(folder / "plant"), "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1"}
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        with self._words.open("w") as words:
            self.command = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=words,
                start_new_session=True,
                env=os.environ | own,
                # What a shell starts with & ignores Ctrl-C, and so would all that it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def said(self) -> str:
        return self._words.read_text(errors="replace")

    def step(self) -> int:
        """Returns the last step that the run has told of, 0 before the first."""
        lines = _lines(self._metrics)
        return int(lines[-1]["step"]) if lines else 0

    def wait_for_step(self, step: int) -> None:
        """Waits until the run has told of a step. Raises RankError where it ends before."""
        for _ in _patiently(_LONGEST_S):
            if self.step() >= step:
                return
            if self.command.poll() is not None:
                break
        raise RankError(f"the run did not reach step {step}:\n{self.said()}")

    def processes(self) -> list[int]:
        """Returns the processes of the run that have not ended, orphans included."""
        return [pid for pid in _all_processes() if _environment(pid).get(_MARK) == self._mark and _is_alive(pid)]

    def fork_server(self) -> int:
        """Returns the server that forks the workers, which have its command line."""
        alike = {pid for pid in self.processes() if "multiprocessing.forkserver" in _read(pid, "cmdline")}
        return next(pid for pid in alike if _parent(pid) not in alike)

    def rank_pid(self, rank: int) -> int:
        """Returns the process of a rank: a launcher has set RANK, or it is one of those that were forked in order."""
        environments = {pid: _environment(pid) for pid in self.processes()}
        by_rank = {each.get("RANK", each.get("SLURM_PROCID")): pid for pid, each in environments.items()}
        if str(rank) in by_rank:
            return by_rank[str(rank)]
        server = self.fork_server()
        return sorted((pid for pid in self.processes() if _parent(pid) == server), key=_started)[rank]

    def end(self) -> list[str]:
        """Kills what is left of the run. Returns what it has left in its temporary folder."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.command.wait()
        left = [str(path) for path in self._temporary.iterdir() if not path.name.startswith(_TORCHS_OWN)]
        shutil.rmtree(self._temporary, ignore_errors=True)
        return left


class Trial:
    """A fault, done once to a run in `folder`. `shared` is where the runs without a fault are kept for other trials."""

    def __init__(self, fault: Fault, folder: Path, shared: Path) -> None:
        self.fault, self._folder, self._shared = fault, folder, shared
        self._run_dir = folder / "run"
        self._left: list[str] = []
        self._at_step = self._found_at_step = 0

    @cached_property
    def run(self) -> LiveRun:
        """The run, to which the fault has been done."""
        self._folder.mkdir()
        self.fault.prepare(self._folder)
        run = _start(self.fault, self._folder)
        try:
            run.wait_for_step(self.fault.at_step)
            self._at_step = run.step()
            self.fault.act(run)
        except BaseException:
            run.end()
            raise
        return run

    def found_after_s(self) -> float:
        """Returns the seconds from the fault until the last process has ended, or until a run that goes on has said
        the words."""
        run, fault, begun = self.run, self.fault, time.monotonic()
        try:
            for _ in _patiently(_LONGEST_S):
                if fault.goes_on and not self._missing_words():
                    break
                if run.command.poll() is not None:
                    break
            took_s, self._found_at_step = time.monotonic() - begun, run.step()
            run.command.wait(_LONGEST_S)
            ended = time.monotonic()
            for _ in _patiently(_ORPHANS_S):
                if not run.processes():
                    break
            self._left = [f"process {pid}: {_read(pid, 'cmdline')}".replace("\0", " ") for pid in run.processes()]
            return took_s if fault.goes_on else took_s + time.monotonic() - ended
        except subprocess.TimeoutExpired:
            return time.monotonic() - begun
        finally:
            self._left += run.end()

    def wrong(self) -> Iterator[str]:
        """Yields what the row has not promised, but for the time."""
        fault, run = self.fault, self.run
        said, status = run.said(), run.command.returncode
        for word in self._missing_words():
            yield f"nothing that the run says matches {word!r}:\n{said}"
        if fault.within_steps is not None and self._found_at_step - self._at_step > fault.within_steps:
            yield f"it was done at step {self._at_step} and found at step {self._found_at_step}"
        outcome = self._run_dir / "outcome.json"
        if outcome.exists() and (fault.launch is as_srun or (fault.launch is torchrun and status == 1)):
            status = json.loads(outcome.read_text())["exit_status"]
        wanted = 0 if fault.goes_on else fault.status
        if wanted is not None and status != wanted:
            yield f"the run ended with status {status}, not {wanted}:\n{said}"
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if wanted not in (0, None, -signal.SIGKILL) and len(errors) != 1:
            yield f"the run told {len(errors)} errors, not one:\n{said}"
        if self._left:
            yield f"left behind: {'; '.join(self._left)}"
        if fault.saves:
            last, saved = run.step(), find_checkpoints("auto", self._run_dir / "checkpoints")
            if not saved or saved[0].name != f"step_{last:08d}" or last > self._at_step + 2:
                yield f"it saved {saved[:1]}, and the fault was at step {self._at_step}, the last one {last}"

    def wrong_again(self) -> Iterator[str]:
        """Yields how the same command, started again, differs from a run without a fault."""
        if self.fault.goes_on or not self.fault.is_resumed:
            return
        self.fault.mend(self._folder)
        expected = self._losses_without_a_fault()
        again = _start(self.fault, self._folder)
        status = _status(again)
        found = _losses(self._run_dir)
        if status:
            yield f"started again, it ended with status {status}:\n{again.said()}"
        elif found != expected:
            steps = [step for step, (one, other) in enumerate(zip(found, expected, strict=False), 1) if one != other]
            yield f"started again, it has {len(found)} losses of {len(expected)}, and others from step {steps[:1]} on"

    def _missing_words(self) -> list[str]:
        said = self.run.said()
        return [word for word in self.fault.words if not re.search(word, said)]

    def _losses_without_a_fault(self) -> list[float]:
        recipe = to_yaml(replace(_recipe(self.fault, Path("/")), model=TINY))
        for known in self._shared.glob("straight-*/recipe"):
            if known.read_text() == recipe:
                return _losses(known.parent / "run")
        folder = self._shared / f"straight-{uuid4().hex}"
        folder.mkdir()
        self.fault.prepare(folder)
        run = _start(replace(self.fault, launch=local), folder)
        if status := _status(run):
            raise RankError(f"{self.fault.name}: the run without a fault ended with status {status}:\n{run.said()}")
        (folder / "recipe").write_text(recipe)
        return _losses(folder / "run")


def seconds_of_peer(fault: Fault, shared: Path) -> float:
    """Returns the seconds from the fault until the last process of a plain torch program under torchrun has ended;
    at most `_PEER_S`, where it is then killed."""
    folder = shared / f"peer-{uuid4().hex}"
    folder.mkdir()
    ranks, metrics = str(fault.parallel.world_size), folder / "metrics.jsonl"
    plain = ("--nproc-per-node", ranks, "-m", "parallel3d.tools.bench.faults.plain", str(metrics))
    run = LiveRun([*_TORCHRUN, *plain], folder, metrics)
    try:
        run.wait_for_step(fault.at_step)
        fault.act(run)
        begun = time.monotonic()
        for _ in _patiently(_PEER_S):
            if run.command.poll() is not None and not run.processes():
                break
        return time.monotonic() - begun
    finally:
        run.end()


def _recipe(fault: Fault, folder: Path) -> Recipe:
    return fault.change(
        Recipe(
            model=TINY,
            train=TrainConfig(
                steps=STEPS,
                global_batch_size=BATCH,
                seq_len=SEQ_LEN,
                device="cpu",
                callbacks=("parallel3d.tools.bench.faults.pace:Pace",),
            ),
            parallel=fault.parallel,
            data=DataConfig(source="text", path=str(folder / "corpus.txt")),
            checkpoint=CheckpointConfig(every=10, resume="auto"),
            logging=LoggingConfig(every=1),
            run_dir=str(folder / "run"),
        )
    )


def write_corpus(path: Path) -> None:
    path.write_text("\n".join(f"line {number} of a text" for number in range(400)))


def _start(fault: Fault, folder: Path) -> LiveRun:
    path, recipe = folder / "recipe.yaml", _recipe(fault, folder)
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    path.write_text(to_yaml(recipe))
    return LiveRun([*fault.launch(fault.parallel.world_size), str(path)], folder, folder / "run" / "metrics.jsonl")


def _status(run: LiveRun) -> int:
    """Waits for the end of a run that nothing happens to, and returns its status."""
    try:
        return run.command.wait(_LONGEST_S)
    finally:
        run.end()


def _lines(metrics: Path) -> list[dict[str, float]]:
    """Returns the whole lines of a file of metrics, none where there is no file."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _losses(run_dir: Path) -> list[float]:
    lines = _lines(run_dir / "metrics.jsonl")
    if [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
        raise RankError(f"{run_dir}: the steps of metrics.jsonl are not in a row")
    return [line["loss"] for line in lines]


def _patiently(seconds: float) -> Iterator[None]:
    """Yields every few milliseconds, until the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def _all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _read(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _environment(pid: int) -> dict[str, str]:
    return dict(each.split("=", 1) for each in _read(pid, "environ").split("\0") if "=" in each)


def _stat(pid: int) -> list[str]:
    """Returns the fields of a process after its name: its state, its parent, ...; none where it has gone."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int((_stat(pid) or ["", "0"])[1])


def _started(pid: int) -> tuple[int, int]:
    """Returns what orders processes by their start: the clock's ticks, and the number where they are the same."""
    return int((_stat(pid) or ["0"] * 20)[19]), pid


def _is_alive(pid: int) -> bool:
    return bool(_stat(pid)) and _stat(pid)[0] != "Z"
