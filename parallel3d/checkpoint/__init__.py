"""Checkpoints: torch.distributed.checkpoint shards that any layout reads, written beside and
renamed into place."""
