"""Loads nixl where it is imported: into the server that the tests' processes are forked from."""

from kvtransfer.backends.nixl_agent import Agent

Agent().destroy()  # the first one of a process loads the plugins
