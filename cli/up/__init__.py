"""baton up: a system on this machine, until Ctrl-C."""
