"""The `baton` command, and the demo model. Starts the programs, imports none."""
