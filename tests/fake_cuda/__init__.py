"""The trainer on fake tensors of `cuda:0`, with a CPU build of torch. `tests/test_fake_cuda.py`
says what it proves."""
