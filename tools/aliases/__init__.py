"""The names that people have for models, hardware files and engines (aliases.toml), and how a name
is looked up."""
