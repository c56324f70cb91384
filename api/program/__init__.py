"""The router as a program: its parts put together, its processes."""
