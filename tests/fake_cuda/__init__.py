"""The trainer on fake tensors of `cuda:0`, with a CPU build of torch: `tests/test_fake_cuda.py` says what it is for.

`python -m tests.fake_cuda` runs programs in a process of its own, because `guard.cpp`, compiled, has to be loaded
before torch is imported. One program is one rank of one layout of `layouts`, which trains a step; `census` writes down
what the step does, as `facts`. `faults` are mistakes that the checks have to find.
"""
