"""The acceptance tests of the CUDA path on one GPU: `make test-gpu`."""
