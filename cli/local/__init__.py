"""The processes of a system on this machine: their flags, and their restarts."""
