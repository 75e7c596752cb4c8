"""The acceptance of the CUDA path on one GPU: `make test-gpu`. docs/gpu.md says what it proves."""
