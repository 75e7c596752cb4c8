"""Training in plain torch as an experienced user writes it: the reference of benchmarks and
tests."""
