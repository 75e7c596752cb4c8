"""Data parallelism: how parameters, gradients and optimizer states are split over DP ranks.

`apply.shard` applies a strategy to a module: one of `fully_sharded`, which shards parameters, or of
`replicated`.
"""
