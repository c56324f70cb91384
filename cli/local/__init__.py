"""Programs of a system on this machine: which, with which flags, and kept running."""
