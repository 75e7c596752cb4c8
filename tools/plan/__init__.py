"""`parallel3d-plan`: its subcommands, one file each."""
