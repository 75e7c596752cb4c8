"""Recipes: their keys as dataclasses, loading from YAML, and the rules between keys. Does not
import torch."""
