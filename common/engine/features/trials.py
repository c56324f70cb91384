"""A program beside an engine, in which guides are tried before the engine compiles them.

    python -m common.engine.features.trials DIRECTORY VOCABULARY EOS,EOS DESCRIPTOR...

What compiles a grammar cannot be stopped, and a guide of a few characters can keep it busy for
hours, take all memory or overflow its stack. So each is compiled first in a process of its own,
forked from this one, which has the vocabulary ready: the kernel ends it when it has used its share
of a core or of memory. Nothing of what it has made is kept. Ends when its descriptors do.
"""

import sys
from pathlib import Path

import msgspec

from common.engine.features.compilers import Compilers
from common.errors import InvalidRequest
from common.process import helper_program
from common.requests.guide import Guide


def main(directory: str, vocabulary: str, eos: str, *descriptors: str) -> None:
    eos_token_ids = [int(token) for token in eos.split(",") if token]
    compilers = Compilers.of_model(Path(directory), int(vocabulary), eos_token_ids)

    def tried(content: bytes) -> bytes:
        """Compile the guide. Any answer, a refusal too, means that its compilation ends."""
        try:
            compilers.compiled(msgspec.msgpack.decode(content, type=Guide))
        except InvalidRequest as error:
            if "bad_alloc" in str(error):
                raise MemoryError from error
        return b""

    helper_program.serve(descriptors, tried)


if __name__ == "__main__":
    main(*sys.argv[1:])
