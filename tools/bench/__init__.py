"""`python -m parallel3d.tools.bench NAME`: the benchmarks, each beside its peer in the same run."""
