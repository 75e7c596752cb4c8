"""What a check is, what it finds, and how it ended. No torch here."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Result = Literal["pass", "fail", "skipped", "timeout"]
Figure = float | str


class NotPossible(Exception):
    """Raised by a check that can show nothing on this machine; the message is the reason why it is skipped."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of the acceptance. A child process calls `target` ("module:function") with the check's `Findings`."""

    id: str
    title: str
    bound: str  # what makes it pass
    limit_s: float  # on a GPU, from the start of the process to its end
    target: str
    needs: str = ""  # the check without whose pass this one is skipped


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended. `figures` are what it measured, `reason` why it did not pass, `log` the end of what its
    processes wrote, their stacks among it after a time-out."""

    id: str
    title: str
    result: Result
    seconds: float = 0.0
    figures: dict[str, Figure] = field(default_factory=dict)
    reason: str = ""
    log: str = ""

    def line(self) -> dict[str, Any]:
        """Returns the fields of a JSON line; `log` is there where the check failed."""
        fields = asdict(self)
        return fields if self.log else {name: value for name, value in fields.items() if name != "log"}


class Findings:
    """What one check is told, and collects: its device ("cuda" or "cpu"), the time until it is stopped, its figures,
    and a line for each bound that one of them breaks."""

    def __init__(self, device: str, limit_s: float) -> None:
        self.device, self.on_gpu = device, device == "cuda"
        self.figures: dict[str, Figure] = {}
        self.broken: list[str] = []
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """The seconds until the check is stopped."""
        return self._end - time.monotonic()

    def note(self, name: str, value: Figure) -> None:
        """Keeps a figure that has no bound."""
        is_number = not isinstance(value, str) and math.isfinite(value)  # JSON has no NaN
        self.figures[name] = float(f"{value:.4g}") if is_number else str(value)

    def at_most(self, name: str, value: float, most: float, *, gpu_only: bool = False) -> None:
        """Keeps a figure that must not exceed `most`. `gpu_only`: on a CPU the bound says nothing."""
        self.note(name, value)
        if not value <= most and (self.on_gpu or not gpu_only):  # not: NaN exceeds all
            self.broken.append(f"{name} = {value:.4g}: at most {most:g}")

    def at_least(self, name: str, value: float, least: float, *, gpu_only: bool = False) -> None:
        """Keeps a figure that must reach `least`."""
        self.note(name, value)
        if not value >= least and (self.on_gpu or not gpu_only):
            self.broken.append(f"{name} = {value:.4g}: at least {least:g}")

    def holds(self, name: str, truth: bool) -> None:
        """Keeps a statement that must be true."""
        self.figures[name] = "yes" if truth else "no"
        if not truth:
            self.broken.append(f"{name}: no")
