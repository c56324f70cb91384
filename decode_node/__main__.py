"""Entry point of `python -m decode_node`: a node that starts as a decode node."""

import sys

from node.roles import main

if __name__ == "__main__":
    sys.exit(main("decode"))
