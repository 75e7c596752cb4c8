"""Training in plain torch as an experienced user would write it: the reference for benchmarks and
tests."""
