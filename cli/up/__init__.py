"""The command that runs a system on this machine until Ctrl-C: `baton up`."""
