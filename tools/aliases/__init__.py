"""Alternative names of models, hardware files and frameworks (aliases.toml), and their lookup."""
