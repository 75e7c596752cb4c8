"""`parallel3d-data`: folders of tokens from text, and what is in them."""
