"""The event loop of a node with overlap, and the watchdog that detects a stalled engine."""
