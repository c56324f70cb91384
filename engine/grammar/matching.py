"""Matching of a response against its grammar, off the engine thread and with a budget of CPU time.

The engine thread passes the known tokens and gets the mask of the next one, one bit for each token
of the vocabulary. Matchers release the GIL, and an ambiguous grammar can keep one busy for seconds.
So a step waits for a matcher only as long as an ordinary one takes. A row whose matcher takes
longer is *slow* from then on. It is computed when its mask is ready, and other rows continue
without it.

Budget: a response may spend ALLOWANCE_S of a core, and S_PER_TOKEN more for each of its tokens.
Time is CPU time of the thread, so a busy machine does not end responses.

If a response begins with reasoning, the grammar applies to the text after it. `ReasoningTracker`
detects the end of the reasoning.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import Overloaded
from common.requests.sampling import ReasoningTokens
from engine.grammar.grammar_verifier import S_PER_TOKEN

WORD = 32


def words_of(vocabulary_size: int) -> int:
    """Return the number of words in a row of bits."""
    return -(-vocabulary_size // WORD)


def allow(bits: NDArray[np.int32], token: int) -> None:
    """Set the token's bit in a row."""
    bits.view(np.uint32)[token // WORD] |= np.uint32(1 << (token % WORD))


def forbid(bits: NDArray[np.int32], token: int) -> None:
    """Clear the token's bit in a row."""
    bits.view(np.uint32)[token // WORD] &= ~np.uint32(1 << (token % WORD))


class ReasoningStage(Enum):
    AHEAD = auto()  # the first token decides whether there is reasoning
    INSIDE = auto()
    BEHIND = auto()


class ReasoningTracker:
    """The reasoning of one response.

    Attributes:
        num_tokens: reasoning tokens so far, without the delimiters.
    """

    def __init__(self, thought: ReasoningTokens | None) -> None:
        """Start at the first token of a response.

        Args:
            thought: None: there is no reasoning.
        """
        self._thought = thought
        self.num_tokens = 0
        if thought is None:
            self.stage = ReasoningStage.BEHIND
        else:
            self.stage = ReasoningStage.INSIDE if thought.open is None else ReasoningStage.AHEAD

    def read(self, tokens: Sequence[int]) -> Sequence[int]:
        """Read the next tokens. Return those after the reasoning."""
        if self._thought is None or not tokens:
            return tokens
        if self.stage is ReasoningStage.AHEAD:
            opens = tokens[0] == self._thought.open
            self.stage = ReasoningStage.INSIDE if opens else ReasoningStage.BEHIND
            tokens = tokens[1:] if opens else tokens
        if self.stage is ReasoningStage.BEHIND:
            return tokens
        if self._thought.close not in tokens:
            self.num_tokens += len(tokens)
            return ()
        end = tokens.index(self._thought.close)
        self.num_tokens += end
        self.stage = ReasoningStage.BEHIND
        return tokens[end + 1 :]


ALLOWANCE_S = 2.0  # CPU seconds for each response
MAX_STUCK = 4  # threads whose matcher was too slow for a step and has not returned yet
_PATIENCE_S = 0.03  # CPU seconds that a step waits for one matcher
_STARVED_S = 1.0  # seconds that a step waits for one matcher that gets no core
_LOOK_S = 0.005
_NICENESS = 10  # lower priority than an engine thread


@dataclass(slots=True, eq=False)
class CompiledGuide:
    """A grammar, and whether it was too slow for a step. The engine thread sets `slow`."""

    grammar: Any  # xgrammar.CompiledGrammar
    slow: bool = False


class Match:
    """The matcher of one response. A thread drives it between `ask` and `busy` becoming False.

    Attributes:
        num_followed: tokens of the response that `mask` accounts for, or will when it is not busy.
        mask: int32 [words], the tokens that may come next.
        busy: a thread drives it, or is going to.
        fault: the reason why the response must end, or "".
    """

    def __init__(
        self,
        compiled: CompiledGuide,
        thought: ReasoningTokens | None,
        thinking: NDArray[np.int32],
        threads: "MatchThreads",
    ) -> None:
        """Create a matcher at the start of a response.

        Args:
            thinking: the mask during reasoning, to which the grammar does not apply.
        """
        from xgrammar import GrammarMatcher

        self.compiled = compiled
        self.threads = threads
        self.num_followed = 0
        self.mask = np.full(len(thinking), -1, np.int32)
        self.busy = False
        self.fault = ""
        self._matcher: Any = GrammarMatcher(compiled.grammar)
        self._reader = ReasoningTracker(thought)
        self._opens = None if thought is None else thought.open
        self._thinking = thinking
        self._tokens: list[int] | None = []  # to follow. None: the mask is ready
        self._spent_s = 0.0
        self._clock = 0  # of the thread that drives it, if any
        self._began_s = 0.0  # on that clock

    @property
    def ready(self) -> bool:
        """Return whether the mask belongs to the token after `num_followed` tokens."""
        return not self.busy and self._tokens is None and not self.fault

    @property
    def spending_s(self) -> float:
        """Return the CPU seconds of the thread that drives it now, or 0 if there is none."""
        began_s, clock = self._began_s, self._clock
        if not clock:
            return 0.0
        try:
            return max(time.clock_gettime(clock) - began_s, 0.0)
        except OSError:  # the thread has ended since the clock was read
            return 0.0

    def ask(self, tokens: Sequence[int]) -> None:
        """Pass the tokens that follow. Must not be busy. The caller then has a thread drive it."""
        if tokens:
            self._tokens = [*(self._tokens or ()), *tokens]
            self.num_followed += len(tokens)

    def look(self) -> None:
        """Check the budget, which a running matcher does not check itself."""
        budget_s = ALLOWANCE_S + S_PER_TOKEN * self.num_followed
        if not self.fault and self._spent_s + self.spending_s > budget_s:
            self.fault = (
                f"sampling.guide: its grammar has taken {budget_s:.1f} s of a core for "
                f"{self.num_followed} tokens, which is the limit: a grammar in which a text has "
                "fewer readings takes less"
            )

    def drive(self) -> None:
        """Follow the tokens and compute the mask. On a thread of MatchThreads."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._began_s = time.clock_gettime(self._clock)
        try:
            self._follow()
        except RuntimeError as error:
            self.fault = f"sampling.guide: its grammar cannot be followed: {error}"
        spent_s = time.clock_gettime(self._clock) - self._began_s
        self._clock = 0
        self._spent_s += spent_s
        self.look()
        self.busy = False

    def _follow(self) -> None:
        matcher = self._matcher
        for token in self._reader.read(self._tokens or ()):
            if self.fault or matcher.is_terminated() or not matcher.accept_token(token):
                break
        if self.fault:
            return
        self.mask[:] = -1
        if self._reader.stage is ReasoningStage.INSIDE:
            self.mask[:] = self._thinking
        elif not matcher.is_terminated():
            matcher.fill_next_token_bitmask(self.mask[None], 0)
            if self._reader.stage is ReasoningStage.AHEAD and self._opens is not None:
                allow(self.mask, self._opens)
        self._tokens = None


class MatchThreads:
    """The threads of all matchers. Called on the engine thread only.

    Ordinary matchers share one thread, for which a step waits. Slow ones share two others with a
    lower priority, for which nothing waits. New responses have a thread of their own.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        """Start the threads.

        Args:
            tell: called from another thread when a matcher is done for which no step waited.
        """
        self._tell = tell
        self._ordinary = ThreadPoolExecutor(1, "matchers")
        self._slow = ThreadPoolExecutor(2, "matchers-slow", initializer=_go_behind)
        self._first = ThreadPoolExecutor(1, "matchers-first", initializer=_go_behind)
        self._stuck: list[Future[None]] = []

    def check_room(self) -> None:
        """Raise Overloaded while too many threads are stuck with slow grammars."""
        self._stuck = [each for each in self._stuck if not each.done()]
        if len(self._stuck) >= MAX_STUCK:
            raise Overloaded(f"{MAX_STUCK} grammars already exceed their time")

    def start(self, match: Match) -> None:
        """Drive a slow or new matcher, for which no step waits."""
        match.busy = True
        pool = self._slow if match.compiled.slow else self._first
        pool.submit(match.drive).add_done_callback(lambda _: self._tell())

    def drive(self, matches: Sequence[Match]) -> None:
        """Drive ordinary matchers for a step, and wait for each as long as an ordinary one takes.
        Later ones are still busy on return, and slow from then on."""
        left = list(matches)
        while left:
            job = _Job(left)
            for each in left:
                each.busy = True
            future = self._ordinary.submit(job.run)
            if _waited(job, future):
                return
            late = job.give_up()
            if late is None:
                return
            late.compiled.slow |= late.busy
            self._stuck.append(future)
            future.add_done_callback(lambda _: self._tell())
            self._ordinary.shutdown(wait=False)
            self._ordinary = ThreadPoolExecutor(1, "matchers")
            left = left[left.index(late) + 1 :]

    def close(self) -> None:
        for each in (self._ordinary, self._slow, self._first):
            each.shutdown(wait=False, cancel_futures=True)


class _Job:
    """Ordinary matchers, driven one after another until the job is given up."""

    def __init__(self, matches: Sequence[Match]) -> None:
        self._left = list(reversed(matches))
        self._lock = threading.Lock()
        self._given_up = False
        self.current: Match | None = None

    def run(self) -> None:
        while True:
            with self._lock:
                if self._given_up or not self._left:
                    return
                match = self.current = self._left.pop()
            match.drive()

    def give_up(self) -> Match | None:
        """Start no further matcher. Return the running one, or None if all are done."""
        with self._lock:
            self._given_up = True
            done = not self._left and (self.current is None or not self.current.busy)
            return None if done else self.current


def _waited(job: _Job, future: "Future[None]") -> bool:
    """Wait for the job. Return False as soon as one of its matchers takes too long."""
    seen, since = job.current, time.monotonic()
    while True:
        try:
            future.result(_LOOK_S)
            return True
        except Late:
            match, now = job.current, time.monotonic()
            if match is not seen:
                seen, since = match, now
            if match is None:
                continue
            if match.spending_s > _PATIENCE_S or now - since > _STARVED_S:
                return False


def _go_behind() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
