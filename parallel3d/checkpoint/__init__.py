"""Checkpoints that any layout can read, stored as torch.distributed.checkpoint shards."""
