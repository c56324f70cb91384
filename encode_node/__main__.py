"""Entry point of `python -m encode_node`."""

import sys
from functools import partial

from common import settings
from common.config import EncodeConfig
from encode_node.program import program
from node.frontend.frontend import EngineProcess, run_node


def main() -> int:
    about = "Run an encode node, which encodes images for prefill nodes."
    config = settings.read(EncodeConfig, "baton serve encode", sys.argv[1:], about=about)
    return run_node(program(config), spawn=partial(EngineProcess, "encode_node.engine_main"))


if __name__ == "__main__":
    sys.exit(main())
