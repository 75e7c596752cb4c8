"""All faults of `bench faults`, one a row: each kind has a file of its own. `fault.Fault` says what the fields mean."""

from __future__ import annotations

from parallel3d.tools.bench.faults.fault import Fault
from parallel3d.tools.bench.faults.number_rows import NUMBERS_GONE_WRONG
from parallel3d.tools.bench.faults.signal_rows import ASKED_TO_SAVE, KILLED
from parallel3d.tools.bench.faults.slow_rows import SLOW_NODES
from parallel3d.tools.bench.faults.spike_rows import SPIKES
from parallel3d.tools.bench.faults.standstill_rows import STANDSTILL

FAULTS: tuple[Fault, ...] = (*KILLED, *STANDSTILL, *SLOW_NODES, *ASKED_TO_SAVE, *NUMBERS_GONE_WRONG, *SPIKES)
