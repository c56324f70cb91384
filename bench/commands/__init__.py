"""The subcommands of `baton bench` and their reports."""
