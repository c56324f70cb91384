"""Shared parts of commands that drain processes: calls, order of restarts, exit codes."""
