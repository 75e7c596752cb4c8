"""`python -m parallel3d.tools.trusted.layouts`: whether plans find the layouts that people trust."""
