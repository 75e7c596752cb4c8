"""The names that people have for models, hardware files and engines (names.toml), and how a name is
looked up."""
