"""Shared memory between processes of one host, a fast path for small CPU tensors."""
