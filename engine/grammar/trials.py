"""A process that verifies guides before the engine compiles them.

    python -m engine.grammar.trials DIRECTORY VOCABULARY EOS,EOS DESCRIPTOR...

Compilation of a grammar cannot be interrupted. A guide of a few characters can keep the compiler
busy for hours, use all memory or overflow its stack. Its matcher can do the same later, with a text
that has many readings. So each guide is first prepared, compiled and walked through in its own
process, forked from this one, which has the vocabulary ready. The kernel kills that process at its
limit of CPU time or memory. The only result is the prepared guide, or the refusal. This process
ends when its descriptors are closed.
"""

import math
import resource
import sys
import time
from pathlib import Path

import msgspec

from common.errors import InvalidRequest
from common.process import helper_program
from common.requests.guide import GuidedDecoding
from engine.grammar.compilers import GrammarCompilers, prepared
from engine.grammar.grammar_verifier import S_PER_TOKEN, Verdict
from engine.grammar.walks import NUM_TOKENS, WALKS_S, TooDear, Walks

_SLACK_S = 2  # CPU seconds in addition to the walks', for the one call that they cannot interrupt


def main(directory: str, vocabulary: str, eos: str, *descriptors: str) -> None:
    eos_token_ids = [int(token) for token in eos.split(",") if token]
    compilers = GrammarCompilers.of_model(Path(directory), int(vocabulary), eos_token_ids)
    walks = Walks(compilers.words, eos_token_ids)

    def tried(content: bytes) -> bytes:
        guide = msgspec.msgpack.decode(content, type=GuidedDecoding)
        return msgspec.msgpack.encode(_verdict(compilers, walks, guide))

    helper_program.serve(descriptors, tried)


def _verdict(compilers: GrammarCompilers, walks: Walks, guide: GuidedDecoding) -> Verdict:
    """Verify the guide, in the process forked for it. Raises MemoryError."""
    try:
        form = prepared(guide)
        grammar = compilers.compiled(form)
    except InvalidRequest as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        return Verdict(refusal=str(error))
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    until_s = min(math.ceil(time.process_time() + WALKS_S + _SLACK_S), most_s)
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, until_s))
    try:
        walks.check(grammar)
    except TooDear:
        field, limit_ms = f"sampling.{guide.kind}", round(1e3 * S_PER_TOKEN)
        return Verdict(
            refusal=f"{field}: following it takes more than {limit_ms} ms of a core for a token, "
            f"within {NUM_TOKENS} tokens: write it so that a text has fewer readings",
        )
    return Verdict(form)


if __name__ == "__main__":
    main(*sys.argv[1:])
