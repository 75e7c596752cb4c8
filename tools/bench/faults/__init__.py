"""`bench faults`: real runs with real faults, each with the seconds until it is found, beside the bar and beside a
plain torch program under torchrun with the same fault. `rows` lists the faults, `fault` carries one out; `watching`
measures what it costs that ranks watch each other while there is no fault."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from parallel3d.errors import RankError
from parallel3d.tools.bench.faults.fault import Trial, seconds_of_peer
from parallel3d.tools.bench.faults.rows import FAULTS
from parallel3d.tools.bench.faults.watching import WATCHING
from parallel3d.tools.bench.harness import run_cases
from parallel3d.tools.bench.report import Options, ResultRow, announced, as_table, chosen, row_of

_UNIT = "s_until_found"


def bench_faults(options: Options) -> list[ResultRow]:
    """Returns for each fault a row against its bar, and one against plain torch where that is a peer. Raises RankError
    with all that was wrong, other than the time, after the last fault."""
    rows, wrong, faults = list[ResultRow](), list[str](), {fault.name: fault for fault in FAULTS}
    with tempfile.TemporaryDirectory(prefix="parallel3d-faults-") as folder:
        for number, name in enumerate(announced(chosen([*faults, *WATCHING], options))):
            if name in WATCHING:
                rows += run_cases({name: WATCHING[name]}, options)
                continue
            fault, trial = faults[name], Trial(faults[name], Path(folder) / str(number), Path(folder))
            took_s = trial.found_after_s()
            rows.append(row_of(f"{name}: the bar", _UNIT, [(took_s, fault.within_s)], bar=1.0))
            if fault.has_peer:
                rows.append(row_of(f"{name}: plain torch", _UNIT, [(took_s, seconds_of_peer(fault, Path(folder)))]))
            wrong += [f"{name}: {each}" for each in (*trial.wrong(), *trial.wrong_again())]
    if wrong:
        print(as_table(rows), file=sys.stderr)
        raise RankError("\n".join(wrong))
    return rows
