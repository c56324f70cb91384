"""Guides on their way to grammars: tried, compiled beside the engine thread, and kept.

Knows nothing of slots and steps, and the engine thread never waits for it. xgrammar and the words
of the vocabulary are loaded with the first guide: nodes that never meet one pay nothing.

A guide is tried first (`grammar_verifier.py`), for two seconds of a core; what takes longer goes to
a second thread behind others of its kind, and is refused if its time there is not enough either. So
a guide that takes long keeps no other one waiting for longer than those two seconds.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidRequest, Overloaded
from common.logs import kv
from common.requests.guide import Guide
from engine.batch.request import Request
from engine.grammar.bits import forbid, words_of
from engine.grammar.grammar_verifier import Lane, Prover, TooSlow
from engine.grammar.matching import CompiledGuide, Match, MatchThreads

if TYPE_CHECKING:
    from engine.grammar.compilers import Compilers

log = logging.getLogger(__name__)

MAX_KEPT = 128  # grammars, and reasons why there is none
MAX_WAITING = 64  # guides
MAX_SLOW = 8  # of these, such as have not got through in the time of the quick lane
SLOW_S = 1.0  # to compile one: said in the log


class Guides:
    """Of one model. Engine thread only.

    Attributes:
        tell: called from another thread when a guide is done.
    """

    def __init__(
        self,
        directory: Path,
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        prover: Prover,
    ) -> None:
        """Owns the prover."""
        self._directory = directory
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = list(eos_token_ids)
        self._prover = prover
        self._thinking = np.full(words_of(vocabulary_size), -1, np.int32)  # anything but an end
        for token in eos_token_ids:
            if token < vocabulary_size:  # configurations may name others
                forbid(self._thinking, token)
        self._threads = MatchThreads(lambda: self.tell())
        self._kept: OrderedDict[Guide, Future[CompiledGuide]] = OrderedDict()
        self._workers = {lane: ThreadPoolExecutor(1, f"guides-{lane.name}") for lane in Lane}
        self._slow: list[Future[CompiledGuide]] = []  # the quick worker's: those that the other has
        self._lock = threading.Lock()
        self._compilers: Compilers | None = None
        self.tell: Callable[[], None] = lambda: None

    def compiled(self, guide: Guide) -> "Future[CompiledGuide]":
        """The grammar, InvalidRequest that says what is wrong and where, or Overloaded.

        Raises:
            Overloaded: too many others wait, or take too long.
        """
        self._threads.check_room()
        known = self._kept.get(guide)
        if known is not None and not _may_be_asked_again(known):
            self._kept.move_to_end(guide)
            return known
        if sum(not each.done() for each in self._kept.values()) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} guides wait to be compiled already")
        made: Future[CompiledGuide] = Future()
        self._kept[guide] = made
        made.add_done_callback(lambda _: self.tell())
        quick = self._workers[Lane.QUICK].submit(self._compile, guide, Lane.QUICK)
        quick.add_done_callback(partial(self._after_quick, guide, made))
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(each for each, other in self._kept.items() if other.done())]
        return made

    def match(self, compiled: CompiledGuide, request: Request) -> Match:
        """Return the way of the request's answer through its grammar, which is under way to the
        mask of its next token."""
        match = Match(compiled, request.sampling.thought, self._thinking, self._threads)
        match.ask(request.token_ids[request.num_prompt :].tolist())
        self._threads.start(match)
        return match

    def close(self) -> None:
        self._threads.close()
        for worker in self._workers.values():
            worker.shutdown(wait=False, cancel_futures=True)
        self._prover.close()

    # The workers' -------------------------------------------------------------------------------

    def _after_quick(
        self, guide: Guide, made: "Future[CompiledGuide]", quick: "Future[CompiledGuide]"
    ) -> None:
        if quick.cancelled() or not isinstance(quick.exception(), TooSlow):
            _settle(made, quick)
            return
        self._slow = [each for each in self._slow if not each.done()]
        if len(self._slow) >= MAX_SLOW:
            sentence = f"{MAX_SLOW} guides that take long wait to be compiled already"
            made.set_exception(Overloaded(sentence))
            return
        slow = self._workers[Lane.SLOW].submit(self._compile, guide, Lane.SLOW)
        self._slow.append(slow)
        slow.add_done_callback(partial(_settle, made))

    def _compile(self, guide: Guide, lane: Lane) -> CompiledGuide:
        began = time.monotonic()
        form = self._prover.prove(guide, lane)
        compiled = CompiledGuide(self._loaded().compiled(form))
        took_s = time.monotonic() - began
        if took_s > SLOW_S:
            log.warning("guide was slow to compile %s", kv(kind=guide.kind, seconds=took_s))
        return compiled

    def _loaded(self) -> "Compilers":
        with self._lock:
            if self._compilers is None:
                from engine.grammar.compilers import Compilers

                self._compilers = Compilers.of_model(
                    self._directory, self._vocabulary_size, self._eos_token_ids
                )
            return self._compilers


def _settle(made: "Future[CompiledGuide]", done: "Future[CompiledGuide]") -> None:
    """As another one has ended; unless that was cancelled, at the end of all."""
    if done.cancelled():
        return
    error = done.exception()
    if error is None:
        made.set_result(done.result())
    elif isinstance(error, TooSlow):
        made.set_exception(InvalidRequest(str(error)))
    else:
        made.set_exception(error)


def _may_be_asked_again(made: "Future[CompiledGuide]") -> bool:
    """Whether it failed for another reason than the guide."""
    return made.done() and isinstance(made.exception(), Overloaded)
