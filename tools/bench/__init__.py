"""Benchmarks of parallel3d against peers: `python -m parallel3d.tools.bench NAME`."""
