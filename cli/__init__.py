"""The `baton` command, and the demo model. Commands start Baton's processes by exec."""
