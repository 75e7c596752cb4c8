"""`parallel3d-data`: creates, inspects, checks and merges folders of tokens."""
