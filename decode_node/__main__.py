"""python -m decode_node: a node that begins as a decode node."""

import sys

from node.roles import main

if __name__ == "__main__":
    sys.exit(main("decode"))
