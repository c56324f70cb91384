"""The `baton` command, and the demo model. Commands start Baton's processes as separate
programs."""
