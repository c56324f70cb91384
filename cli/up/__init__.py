"""`baton up`: runs a system on this machine until Ctrl-C."""
