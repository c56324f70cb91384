"""`baton check`: whether a configuration and a model run on this machine."""
