"""Data parallelism: how parameters, gradients and optimizer states are split over DP ranks.

`apply.shard` applies a strategy to a module: a `fully_sharded` one, which splits parameters, or a
`replicated` one.
"""
