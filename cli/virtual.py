"""The process of `baton sim`: a run in virtual time, with an optional planner."""

import sys
from importlib import import_module

from simulation.virtual.__main__ import main

if __name__ == "__main__":
    # Imported by `main` after it has replaced the clocks.
    sys.exit(main(lambda: import_module("cli.planner.virtual").planner))
