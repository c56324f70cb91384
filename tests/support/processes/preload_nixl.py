"""Loads nixl into the server from which test processes are forked."""

from pathlib import Path

from kvtransfer.backends.nixl.agent import NixlAgent, load

load()
if not Path("/dev/nvidiactl").exists():  # forked processes cannot use CUDA
    NixlAgent().destroy()  # the first one of a process loads the plugins
