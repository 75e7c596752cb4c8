"""The data dimension: what of parameters, gradients and optimizer states each data rank holds, and
what is sent. `apply.shard` puts a strategy on a module: a `fully_sharded` one that splits
parameters, or a `replicated` one."""
