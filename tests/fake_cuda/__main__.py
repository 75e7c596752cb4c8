"""`python -m tests.fake_cuda GUARD usual|long PART PARTS`: runs one in PARTS of these programs, and prints what each
has done as a line of JSON. GUARD is `guard.cpp`, compiled."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import sys
from pathlib import Path


def main(guard: str, of: str, part: int, parts: int) -> None:
    """Loads the guard between torch's libraries and `import torch`, then runs the programs."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    for library in ("libtorch_global_deps.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(guard)

    from tests.fake_cuda.census import run
    from tests.fake_cuda.layouts import programs

    gc.disable()  # a collection looks at the modules of torch, a million objects, and finds a few megabytes here
    for layout, rank, faults in programs(of)[part::parts]:
        print(run(layout, rank, faults).to_json(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
