"""Diagnosis of non-finite numbers and differing replicas: names the rank and the parameter."""
