"""Entry point of `python -m prefill_node`: a node that starts as a prefill node."""

import sys

from node.roles import main

if __name__ == "__main__":
    sys.exit(main("prefill"))
