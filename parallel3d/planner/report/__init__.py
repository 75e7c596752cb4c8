"""Reports of a plan: text and JSON."""
