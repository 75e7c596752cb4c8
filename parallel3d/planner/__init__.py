"""The planner: the memory of a layout, its step time, and the search for the fastest one. It does
not import torch."""
