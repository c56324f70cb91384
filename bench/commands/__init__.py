"""The subcommands of `baton bench`, and what each says of what it has measured."""
