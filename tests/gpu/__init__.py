"""The acceptance of the CUDA path on one GPU: `make test-gpu`. docs/status.md says what it proves."""
