"""A plan written down: a page for people, JSON, HTML with its figures."""
