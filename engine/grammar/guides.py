"""The cache of grammars: verifies guides and compiles them on worker threads.

It is independent of slots and steps, and the engine thread never waits for it. xgrammar and the
vocabulary are loaded with the first guide, so that nodes without guides do not need the memory.

A guide is first verified (`grammar_verifier.py`) with a limit of two CPU seconds. If it takes
longer, it moves to a second thread with its own queue, and is rejected if it exceeds the time limit
there. A slow guide therefore delays others by at most two seconds.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidRequest, Overloaded
from common.logs import kv
from common.requests.sampling import GuidedDecoding
from engine.batch.request import Request
from engine.grammar.grammar_verifier import GrammarTimeout, GrammarVerifier, VerifierLane
from engine.grammar.matching import CompiledGuide, Match, MatchThreads, forbid, words_of

if TYPE_CHECKING:
    from engine.grammar.compilers import GrammarCompilers

log = logging.getLogger(__name__)

MAX_KEPT = 128  # limit of cached grammars and rejections
MAX_WAITING = 64  # limit of queued guides
MAX_SLOW = 8  # limit of queued guides that exceeded the limit of the quick lane
SLOW_S = 1.0  # slower compilations are logged


class GrammarCache:
    """The grammars of one model. Engine thread only.

    Attributes:
        notify: called from another thread when a guide is done.

    Args:
        verifier: owned by this object.
    """

    def __init__(
        self,
        directory: Path,
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        verifier: GrammarVerifier,
    ) -> None:
        self._directory = directory
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = list(eos_token_ids)
        self._verifier = verifier
        # Everything except end tokens.
        self._thinking = np.full(words_of(vocabulary_size), -1, np.int32)
        for token in eos_token_ids:
            if token < vocabulary_size:  # model configurations may name larger ids
                forbid(self._thinking, token)
        self._threads = MatchThreads(lambda: self.notify())
        self._kept: OrderedDict[GuidedDecoding, Future[CompiledGuide]] = OrderedDict()
        self._workers = {
            lane: ThreadPoolExecutor(1, f"guides-{lane.name}") for lane in VerifierLane
        }
        # Guides that moved to the slow lane. Only the quick worker uses this list.
        self._slow: list[Future[CompiledGuide]] = []
        self._lock = threading.Lock()
        self._compilers: GrammarCompilers | None = None
        self.notify: Callable[[], None] = lambda: None

    def compiled(self, guide: GuidedDecoding) -> "Future[CompiledGuide]":
        """Return a future of the grammar, or of an InvalidRequest with the defect and its place, or
        of Overloaded.

        Raises:
            Overloaded: too many guides are queued or slow.
        """
        self._threads.check_room()
        known = self._kept.get(guide)
        if known is not None and not _may_be_asked_again(known):
            self._kept.move_to_end(guide)
            return known
        if sum(not each.done() for each in self._kept.values()) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} grammars are already waiting for compilation")
        made: Future[CompiledGuide] = Future()
        self._kept[guide] = made
        made.add_done_callback(lambda _: self.notify())
        self._workers[VerifierLane.QUICK].submit(self._work, guide, made, VerifierLane.QUICK)
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(each for each, other in self._kept.items() if other.done())]
        return made

    def match(self, compiled: CompiledGuide, request: Request) -> Match:
        """Return the matcher of the request's response. A thread starts to compute the mask of the
        next token."""
        match = Match(compiled, request.sampling.thought, self._thinking, self._threads)
        match.ask(request.token_ids[request.num_prompt :].tolist())
        self._threads.start(match)
        return match

    def close(self) -> None:
        self._threads.close()
        for worker in self._workers.values():
            worker.shutdown(wait=False, cancel_futures=True)
        self._verifier.close()

    def _work(
        self, guide: GuidedDecoding, made: "Future[CompiledGuide]", lane: VerifierLane
    ) -> None:
        """Complete `made`, on the worker thread of a lane."""
        try:
            made.set_result(self._compile(guide, lane))
        except GrammarTimeout as error:
            if lane is VerifierLane.QUICK:
                self._move(guide, made)
            else:
                made.set_exception(InvalidRequest(str(error)))
        except Exception as error:  # noqa: BLE001  every end is a result
            made.set_exception(error)

    def _move(self, guide: GuidedDecoding, made: "Future[CompiledGuide]") -> None:
        """Move a guide from the quick lane to the slow one."""
        self._slow = [each for each in self._slow if not each.done()]
        if len(self._slow) >= MAX_SLOW:
            sentence = f"{MAX_SLOW} slow grammars are already waiting for compilation"
            made.set_exception(Overloaded(sentence))
            return
        self._slow.append(made)
        self._workers[VerifierLane.SLOW].submit(self._work, guide, made, VerifierLane.SLOW)

    def _compile(self, guide: GuidedDecoding, lane: VerifierLane) -> CompiledGuide:
        began = time.monotonic()
        form = self._verifier.verify(guide, lane)
        compilers = self._loaded()
        compiled = CompiledGuide(compilers.compiled(form), compilers.words)
        took_s = time.monotonic() - began
        if took_s > SLOW_S:
            log.warning("slow grammar compilation %s", kv(kind=guide.kind, seconds=took_s))
        return compiled

    def _loaded(self) -> "GrammarCompilers":
        with self._lock:
            if self._compilers is None:
                from engine.grammar.compilers import GrammarCompilers

                self._compilers = GrammarCompilers.of_model(
                    self._directory, self._vocabulary_size, self._eos_token_ids
                )
            return self._compilers


def _may_be_asked_again(made: "Future[CompiledGuide]") -> bool:
    """Return whether the guide failed for a temporary reason, so that it may be compiled again."""
    return made.done() and isinstance(made.exception(), Overloaded)
