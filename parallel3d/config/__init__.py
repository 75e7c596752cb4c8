"""A recipe: its keys as dataclasses, the YAML file that holds them, and the rules that they keep.
No torch here."""
