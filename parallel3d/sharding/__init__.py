"""The data dimension: what of the parameters, gradients and optimizer states each data rank holds, and what is sent.

`config/sharding_strategies.py` names the strategies. `apply.shard` puts one on a module: `fully_sharded` for those that
split parameters, `replicated` for those that do not. `bytes` counts what each holds and sends.
"""
