"""`parallel3d-plan`: one module per subcommand."""
