"""Loads nixl where it is imported: into the server that the tests' processes are forked from."""

from pathlib import Path

from kvtransfer.backends.nixl.agent import NixlAgent, load

load()
if not Path("/dev/nvidiactl").exists():  # or forked processes would inherit a CUDA they cannot use
    NixlAgent().destroy()  # the first one of a process loads the plugins
