"""A whole system as processes on this machine: its plan, start, restarts and shutdown."""
