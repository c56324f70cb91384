"""`baton check`: checks that a configuration and a model run on this machine."""
