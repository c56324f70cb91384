"""The `baton` command and the reading of configurations. Starts the programs, imports none."""
