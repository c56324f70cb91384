"""The event loop with overlap, and the watchdog that checks its progress."""
