"""The rows of signals to a run: those that kill, and those that ask it to save and end, or to save and go on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.tools.bench.faults.fault import (
    PLANTED,
    Fault,
    Launch,
    LiveRun,
    after,
    as_srun,
    local,
    plant,
    to_fork_server,
    to_group,
    to_launcher,
    to_rank,
    torchrun,
    under_nohup,
    under_timeout,
)

_PLACE_1 = r"(?m)^error: rank 1 \(.*, pp 0, dp_replicate 0, dp_shard 1, tp 0\)"
_LAST_SEEN = r"last seen in [a-z ]+ after step \d+"
_TWO, _FOUR = ParallelConfig(tp=2), ParallelConfig(pp=2, tp=2)
_WHOM: dict[str, Callable[[int], Callable[[LiveRun], None]]] = {
    "the launcher": to_launcher,
    "rank 1": lambda signum: to_rank(1, signum),
    "the group": to_group,
}
_LAUNCHERS: dict[Launch, str] = {local: "", torchrun: ", torchrun", as_srun: ", srun's variables"}
_ASKED = ((signal.SIGTERM, 75, "SIGTERM"), (signal.SIGHUP, 75, "SIGHUP"), (signal.SIGINT, 130, "Ctrl-C"))


def _stopped_by(name: str) -> tuple[str, ...]:
    return (rf"(?m)^error: stopped by {name} after step \d+, saved: ",)


def _killed(rank: int, parallel: ParallelConfig, launch: Launch = local) -> Fault:
    axes = " x ".join(f"{axis} {size}" for axis, size in (("pp", parallel.pp), ("tp", parallel.tp)) if size > 1)
    what = "was killed by SIGKILL" if launch is local else "ended without a word"
    return Fault(
        name=f"SIGKILL of rank {rank}, {axes}{_LAUNCHERS[launch]}",
        act=to_rank(rank, signal.SIGKILL),
        words=(rf"(?m)^error: rank {rank} \(.*, {parallel.coordinates(rank)}\) {what}, {_LAST_SEEN}; ",),
        within_s=2.0,
        parallel=parallel,
        launch=launch,
    )


def _with_planted_model(recipe: Recipe) -> Recipe:
    return replace(recipe, model=PLANTED)


def _with_little_grace(recipe: Recipe) -> Recipe:
    return replace(_with_planted_model(recipe), checkpoint=replace(recipe.checkpoint, grace_s=1.0))


KILLED: tuple[Fault, ...] = (
    *(_killed(rank, _TWO) for rank in (0, 1)),
    *(_killed(rank, _FOUR) for rank in (0, 1, 3)),
    _killed(3, _FOUR, torchrun),
    *(_killed(rank, _FOUR, as_srun) for rank in (0, 3)),
    Fault(
        name="SIGKILL of the launcher, pp 2 x tp 2",
        act=to_launcher(signal.SIGKILL),
        words=(),
        within_s=2.0,
        parallel=_FOUR,
        status=-signal.SIGKILL,
    ),
    Fault(
        name="SIGKILL of the fork server, pp 2 x tp 2",
        act=to_fork_server(signal.SIGKILL),
        words=(
            rf"(?m)^error: rank \d \(.*\) ended with status 255 and without a word, {_LAST_SEEN}; "
            "all ranks do when the server that forks them is killed",
        ),
        within_s=2.0,
        parallel=_FOUR,
    ),
    Fault(
        name="SIGKILL of the launcher",
        act=to_launcher(signal.SIGKILL),
        words=(),
        within_s=5.0,
        status=-signal.SIGKILL,
        has_peer=True,
    ),
    Fault(
        name="SIGKILL of the launcher, with rank 1 stopped",
        act=after(to_rank(1, signal.SIGSTOP), to_launcher(signal.SIGKILL)),
        words=(),
        within_s=5.0,
        status=-signal.SIGKILL,
        has_peer=True,
    ),
    Fault(
        name="SIGKILL of torchrun, with rank 1 stopped",
        act=after(to_rank(1, signal.SIGSTOP), to_launcher(signal.SIGKILL)),
        words=(),
        within_s=5.0,
        launch=torchrun,
        status=-signal.SIGKILL,
    ),
    Fault(
        name="SIGKILL of the fork server",
        act=to_fork_server(signal.SIGKILL),
        words=("all ranks do when the server that forks them is killed",),
        within_s=3.0,
    ),
    *(
        Fault(
            name=f"{signum.name} of rank 1",
            act=to_rank(1, signum),
            words=(f"{_PLACE_1} was killed by {signum.name}",),
            within_s=3.0,
        )
        for signum in (signal.SIGABRT, signal.SIGSEGV, signal.SIGUSR2)
    ),
    Fault(
        name="abort() in rank 1 of pp 2 x tp 2",
        act=plant(1, "abort"),
        words=(r"(?m)^error: rank 1 \(.*, pp 0, dp_replicate 0, dp_shard 0, tp 1\) was killed by SIGABRT",),
        within_s=3.0,
        parallel=ParallelConfig(pp=2, tp=2),
        change=_with_planted_model,
    ),
)

ASKED_TO_SAVE: tuple[Fault, ...] = (
    *(
        Fault(
            name=f"{signum.name} to {whom}",
            act=send(signum),
            words=_stopped_by(by),
            within_s=3.0,
            status=status,
            saves=True,
        )
        for signum, status, by in _ASKED
        for whom, send in _WHOM.items()
    ),
    Fault(
        name="SIGTERM to torchrun",
        act=to_launcher(signal.SIGTERM),
        words=_stopped_by("SIGTERM"),
        within_s=3.0,
        launch=torchrun,
        status=75,
        saves=True,
    ),
    Fault(
        name="timeout(1), whose time is over",
        act=to_launcher(signal.SIGALRM),
        words=_stopped_by("SIGTERM"),
        within_s=3.0,
        launch=under_timeout,
        status=75,
        saves=True,
    ),
    Fault(
        name="SIGHUP to the group, under nohup",
        act=to_group(signal.SIGHUP),
        words=(r"(?m)^step 20/",),
        within_s=5.0,
        launch=under_nohup,
        goes_on=True,
    ),
    Fault(
        name="SIGTERM to the group, with rank 1 stopped",
        act=after(to_rank(1, signal.SIGSTOP), to_group(signal.SIGTERM)),
        words=_stopped_by("SIGTERM"),
        within_s=3.0,
        status=75,
        saves=True,
    ),
    Fault(
        name="Ctrl-C twice",
        act=after(plant(1, "save_slowly"), to_group(signal.SIGINT), to_group(signal.SIGINT)),
        words=("Ctrl-C again ends at once", "(?m)^error: stopped by SIGINT$"),
        within_s=3.0,
        status=130,
        change=_with_planted_model,
    ),
    Fault(
        name="SIGTERM, and a save that takes too long",
        act=after(plant(1, "save_slowly"), to_group(signal.SIGTERM)),
        words=(
            r"(?m)^error: .*stopped by SIGTERM, and not saved within checkpoint.grace_s = 1.0: .*/step_00000010 is the "
            "last good one",
        ),
        within_s=4.0,
        status=143,
        change=_with_little_grace,
    ),
    Fault(
        name="SIGUSR1 to the launcher",
        act=to_launcher(signal.SIGUSR1),
        words=(r"SIGUSR1: saves after step 1\d, and goes on",),
        within_s=1.0,
        goes_on=True,
    ),
    Fault(
        name="SIGUSR1 to the group",
        act=to_group(signal.SIGUSR1),
        words=(r"SIGUSR1: saves after step 1\d, and goes on",),
        within_s=1.0,
        goes_on=True,
    ),
)
