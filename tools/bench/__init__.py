"""Benchmarks, each against a peer in the same run: `python -m parallel3d.tools.bench NAME`."""
