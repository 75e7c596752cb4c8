"""Training as a careful user of plain torch writes it: what the benchmarks and the tests compare
with."""
