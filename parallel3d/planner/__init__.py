"""The planner predicts the memory and step time of layouts and searches for the fastest one. It
does not import torch."""
