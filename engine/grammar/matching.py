"""Matching of a response against its grammar, on other threads and with a budget of CPU time.

The engine thread passes the known tokens and gets the mask of the next token, one bit per token of
the vocabulary. Matchers release the GIL. An ambiguous grammar can keep a matcher busy for seconds,
so a step waits for a matcher only as long as an ordinary one takes. A row whose matcher takes
longer is *slow* from then on. It is computed when its mask is ready, and other rows continue
without it.

Budget: a response may use ALLOWANCE_S of CPU time, and S_PER_TOKEN more for each of its tokens. The
CPU time of the thread counts, so that a busy machine does not end responses.

If a response begins with reasoning, the grammar applies to the text after it. `ReasoningTracker`
detects the end of the reasoning.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import Overloaded
from common.requests.sampling import ReasoningTokens
from engine.grammar.grammar_verifier import S_PER_TOKEN
from engine.processor import usable_cores

WORD = 32


def words_of(vocabulary_size: int) -> int:
    """Return the number of int32 words in a bit row."""
    return -(-vocabulary_size // WORD)


def allow(bits: NDArray[np.int32], token: int) -> None:
    """Set the token's bit in a row."""
    bits.view(np.uint32)[token // WORD] |= np.uint32(1 << (token % WORD))


def allows(bits: NDArray[np.int32], token: int) -> bool:
    """Return whether the token's bit is set in a row. False for a token outside the row."""
    if not 0 <= token < len(bits) * WORD:
        return False
    return bool(int(bits.view(np.uint32)[token // WORD]) >> (token % WORD) & 1)


def forbid(bits: NDArray[np.int32], token: int) -> None:
    """Clear the token's bit in a row."""
    bits.view(np.uint32)[token // WORD] &= ~np.uint32(1 << (token % WORD))


class ReasoningStage(Enum):
    AHEAD = auto()  # the first token decides whether there is reasoning
    INSIDE = auto()
    BEHIND = auto()


class ReasoningTracker:
    """Tracks the reasoning of one response.

    Attributes:
        num_tokens: reasoning tokens so far, without the delimiters.

    Args:
        thought: None: there is no reasoning.
    """

    def __init__(self, thought: ReasoningTokens | None) -> None:
        self._thought = thought
        self.num_tokens = 0
        if thought is None:
            self.stage = ReasoningStage.BEHIND
        else:
            self.stage = ReasoningStage.INSIDE if thought.open is None else ReasoningStage.AHEAD

    def read(self, tokens: Sequence[int]) -> Sequence[int]:
        """Read the next tokens. Return the tokens after the reasoning."""
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


ALLOWANCE_S = 2.0  # CPU seconds per response
MAX_STUCK = 4  # limit of threads whose matcher was too slow for a step and still runs
_PATIENCE_S = 0.03  # CPU seconds for which a step waits for one matcher
_DRAFTS_S = 0.01  # CPU seconds that the masks of one row's drafts may take in a step
_MAX_FORCED = 32  # a token is forced only if at most this many are allowed
_SEPARATOR = re.compile(rb"([:,])(?=.)")
_STARVED_S = 1.0  # seconds for which a step waits for one matcher that gets no CPU
_LOOK_S = 0.005
_MOST_THREADS = 8  # of ordinary matchers
_NICENESS = 10  # lower priority than an engine thread


@dataclass(slots=True, eq=False)
class CompiledGuide:
    """A grammar, and whether it was too slow for a step. The engine thread sets `slow`."""

    grammar: Any  # xgrammar.CompiledGrammar
    words: Sequence[bytes]  # the vocabulary
    slow: bool = False


class Match:
    """The matcher of one response. A thread drives it between `ask` and `busy` becoming False.

    It follows the known tokens. It also looks ahead along drafts, computes a mask after each, and
    then rolls its grammar back to the known tokens. Masks of accepted drafts are used again.

    Attributes:
        num_followed: tokens of the response that were passed as known.
        busy: whether a thread drives it or is going to.
        fault: the reason why the response must end, or "".

    Args:
        thinking: the mask during reasoning, to which the grammar does not apply.
    """

    def __init__(
        self,
        compiled: CompiledGuide,
        thought: ReasoningTokens | None,
        thinking: NDArray[np.int32],
        threads: "MatchThreads",
    ) -> None:
        from xgrammar import GrammarMatcher

        self.compiled = compiled
        self.threads = threads
        self.num_followed = 0
        self.busy = False
        self.fault = ""
        self._matcher: Any = GrammarMatcher(compiled.grammar)
        self._reader = ReasoningTracker(thought)
        self._opens = None if thought is None else thought.open
        self._thinking = thinking
        self._tokens: list[int] = []  # known tokens that the matcher has not followed yet
        self._last: int | None = None  # the newest token that the matcher has followed
        self._wanted: list[int] = []  # drafts after the known tokens
        self._room = 0  # limit of drafts, including forced tokens
        self._path: list[int] = []  # allowed tokens after the followed ones
        self._masks: list[NDArray[np.int32]] = []  # masks after each prefix of the path
        self._mask_s = 0.0  # CPU seconds of a token and its mask, in the last drive
        self._spent_s = 0.0
        self._clock = 0  # CPU clock of the thread that drives it, if any
        self._began_s = 0.0  # value of that clock at the start

    @property
    def ready(self) -> bool:
        """Return whether the masks belong to the tokens and drafts that were passed last."""
        if self.busy or self.fault:
            return False
        asked = [*self._tokens, *self._wanted]
        covered = len(self._path)
        if self._path[: len(asked)] != asked[:covered] or not self._masks:
            return False
        if covered >= len(asked):
            return True
        return covered >= len(self._tokens) and not allows(self._masks[covered], asked[covered])

    @property
    def masks(self) -> Sequence[NDArray[np.int32]]:
        """The masks of the next token, int32 [words], then of the tokens after each draft. The
        masks end before the first draft that is forbidden."""
        first = len(self._tokens)
        return self._masks[first : first + len(self._wanted) + 1]

    @property
    def continuation(self) -> Sequence[int]:
        """The allowed drafts of the last `ask`, then the forced tokens that replace the forbidden
        ones."""
        return self._path[len(self._tokens) :][: self._room]

    @property
    def continued(self) -> bool:
        """Return whether the matcher is ready, and no token can be added to `continuation`."""
        if not self.ready:
            return False
        if len(self._path) - len(self._tokens) >= self._room:
            return True
        last = self._path[-1] if self._path else self._last
        return self._forced(self._masks[-1], last) is None

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts for which a step waits no longer than for an ordinary
        matcher."""
        return int(_DRAFTS_S / self._mask_s) if self._mask_s else 0

    @property
    def spending_s(self) -> float:
        """Return the CPU seconds of the thread that drives the matcher now, or 0 if none does."""
        began_s, clock = self._began_s, self._clock
        if not clock:
            return 0.0
        try:
            return max(time.clock_gettime(clock) - began_s, 0.0)
        except OSError:  # the thread has ended
            return 0.0

    def ask(self, tokens: Sequence[int], drafts: Sequence[int] = (), room: int = 0) -> None:
        """Pass the next known tokens, and drafts after them. The matcher must not be busy. Unless
        it is `ready` then, the caller has a thread drive it.

        Args:
            room: number of drafts wanted. If fewer are given, or some are forbidden, tokens that
                the grammar forces are added.
        """
        self._tokens += tokens
        self.num_followed += len(tokens)
        self._wanted, self._room = list(drafts), room

    def look(self) -> None:
        """Check the budget. A running matcher does not check it itself."""
        budget_s = ALLOWANCE_S + S_PER_TOKEN * self.num_followed
        if not self.fault and self._spent_s + self.spending_s > budget_s:
            self.fault = (
                f"sampling.guide: its grammar has used its limit of {budget_s:.1f} s of CPU time "
                f"within {self.num_followed} tokens: make it less ambiguous"
            )

    def drive(self) -> None:
        """Follow the tokens and compute the masks. On a thread of MatchThreads."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._began_s = time.clock_gettime(self._clock)
        try:
            self._follow()
        except RuntimeError as error:
            self.fault = f"sampling.guide: matching its grammar failed: {error}"
        spent_s = time.clock_gettime(self._clock) - self._began_s
        self._clock = 0
        self._spent_s += spent_s
        self._mask_s = spent_s / max(len(self._masks), 1)
        self.look()
        self.busy = False

    def _follow(self) -> None:
        self._path, self._masks = [], []
        self._accept(self._reader, self._tokens)
        if self.fault:
            return
        self._last, self._tokens = self._tokens[-1] if self._tokens else self._last, []
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Compute the masks along the drafts, then along forced tokens."""
        reader, num_accepted = copy(self._reader), 0
        masks, path, wanted = [self._mask(reader)], list[int](), deque(self._wanted)
        most = max(self._room, len(wanted))
        while len(path) < most and not self.fault:
            if self._room and self.spending_s > _DRAFTS_S:
                break
            draft = wanted.popleft() if wanted else None
            if draft is None or not allows(masks[-1], draft):
                wanted.clear()
                last = path[-1] if path else self._last
                draft = self._forced(masks[-1], last) if len(path) < self._room else None
            if draft is None:
                break
            num_accepted += self._accept(reader, [draft])
            path.append(draft)
            masks.append(self._mask(reader))
        if num_accepted:
            self._matcher.rollback(num_accepted)
        self._path, self._masks = path, masks

    def _accept(self, reader: ReasoningTracker, tokens: Sequence[int]) -> int:
        """Follow tokens. Return the number of tokens that the grammar has accepted."""
        matcher, num_accepted = self._matcher, 0
        for token in reader.read(tokens):
            if self.fault or matcher.is_terminated():
                break
            num_accepted += matcher.accept_token(token)
        return num_accepted

    def _mask(self, reader: ReasoningTracker) -> NDArray[np.int32]:
        if reader.stage is ReasoningStage.INSIDE:
            return self._thinking
        mask = np.full(len(self._thinking), -1, np.int32)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(mask[None], 0)
            if reader.stage is ReasoningStage.AHEAD and self._opens is not None:
                allow(mask, self._opens)
        return mask

    def _forced(self, mask: NDArray[np.int32], last: int | None) -> int | None:
        """Return the token that must come next, or None if there is a choice. White space, and the
        split of a text into tokens, are no choice. `last`: the token before it, if any.
        """
        spelling, parts = self.compiled.words, np.flatnonzero(mask)
        if len(parts) > _MAX_FORCED + 1:  # the last part may have bits without a token
            return None
        bits = np.unpackbits(mask[parts].view(np.uint8), bitorder="little").reshape(-1, WORD)
        rows, places = np.nonzero(bits)
        tokens = parts[rows] * WORD + places
        tokens = tokens[tokens < len(spelling)]
        if not 0 < len(tokens) <= _MAX_FORCED:
            return None
        place = _forced_word([spelling[token] for token in tokens.tolist()], self._spelt(last))
        return None if place is None else int(tokens[place])

    def _spelt(self, token: int | None) -> bytes:
        words = self.compiled.words
        return b"" if token is None or token >= len(words) else words[token]


def _forced_word(words: Sequence[bytes], before: bytes) -> int | None:
    """Return the index of the longest word if all others are its prefixes. White space is ignored,
    but preferred after colons and commas, as in JSON. `before`: the previous word."""
    if len(words) == 1:
        return 0
    bare = [word.translate(None, b" \t\n\r") for word in words]
    longest = max(bare, key=len)
    if not all(word and longest.startswith(each) for word, each in zip(words, bare, strict=True)):
        return None
    usual = _SEPARATOR.sub(rb"\1 ", longest)
    wanted = [b" " + usual, b" "] if before.endswith((b":", b",")) else [usual]
    alike = next(place for place, each in enumerate(bare) if each == longest)
    return next((words.index(word) for word in wanted if word in words), alike)


class MatchThreads:
    """The threads of all matchers. Called on the engine thread only.

    Ordinary matchers share some threads, and steps wait for them. Slow ones share two threads with
    a lower priority, and no step waits for these. New responses have another thread.

    Args:
        notify: called from another thread when a matcher is done that no step waited for.
        num_threads: threads of ordinary matchers. None: half of the cores.
    """

    def __init__(self, notify: Callable[[], None], num_threads: int | None = None) -> None:
        self._notify = notify
        half = min(usable_cores() // 2, _MOST_THREADS)
        self._num_threads = max(half, 1) if num_threads is None else num_threads
        self._ordinary = ThreadPoolExecutor(self._num_threads, "matchers")
        self._slow = ThreadPoolExecutor(2, "matchers-slow", initializer=_go_behind)
        self._first = ThreadPoolExecutor(1, "matchers-first", initializer=_go_behind)
        self._stuck: list[Future[None]] = []

    def check_room(self) -> None:
        """Raise Overloaded while too many threads are stuck with slow grammars."""
        self._stuck = [each for each in self._stuck if not each.done()]
        if len(self._stuck) >= MAX_STUCK:
            raise Overloaded(f"{MAX_STUCK} grammars already exceed their time limit")

    def start(self, match: Match) -> None:
        """Drive a slow or new matcher. No step waits for it."""
        match.busy = True
        pool = self._slow if match.compiled.slow else self._first
        pool.submit(match.drive).add_done_callback(lambda _: self._notify())

    def drive(self, matches: Sequence[Match]) -> None:
        """Drive ordinary matchers for a step, and wait for each as long as an ordinary one takes. A
        matcher that takes longer is still busy on return, and slow from then on."""
        for match in matches:
            match.busy = True
        left = self._begun(matches)
        while left:
            done, _ = wait(left, _LOOK_S)
            for future in done:
                future.result()
                del left[future]
            for future in [future for future, job in left.items() if job.is_late()]:
                left |= self._left_behind(future, left.pop(future))

    def close(self) -> None:
        for each in (self._ordinary, self._slow, self._first):
            each.shutdown(wait=False, cancel_futures=True)

    def _begun(self, matches: Sequence[Match]) -> dict[Future[None], "_Job"]:
        """Divide matchers among the threads."""
        parts = [matches[first :: self._num_threads] for first in range(self._num_threads)]
        jobs = [_Job(part) for part in parts if part]
        return {self._ordinary.submit(job.run): job for job in jobs}

    def _left_behind(self, future: Future[None], job: "_Job") -> dict[Future[None], "_Job"]:
        """Leave its thread to the late matcher of a job. Begin the others on new threads."""
        rest, late = job.give_up()
        if late is not None:
            late.compiled.slow |= late.busy
        self._stuck.append(future)
        future.add_done_callback(lambda _: self._notify())
        self._ordinary.shutdown(wait=False)
        self._ordinary = ThreadPoolExecutor(self._num_threads, "matchers")
        return self._begun(rest)


class _Job:
    """Ordinary matchers that one thread drives in order, until the job is given up."""

    def __init__(self, matches: Sequence[Match]) -> None:
        self._left = deque(matches)
        self._current: Match | None = None
        self._seen: Match | None = None  # the current one when `is_late` was called last
        self._since = time.monotonic()  # time since which it is the current one

    def run(self) -> None:
        while (match := self._next()) is not None:
            self._current = match
            match.drive()

    def is_late(self) -> bool:
        """Return whether the current matcher takes too long. Called repeatedly."""
        match, now = self._current, time.monotonic()
        if match is not self._seen:
            self._seen, self._since = match, now
        if match is None:
            return False
        return match.spending_s > _PATIENCE_S or now - self._since > _STARVED_S

    def give_up(self) -> tuple[Sequence[Match], Match | None]:
        """Start no more matchers. Return those that are left, and the current one."""
        return [*iter(self._next, None)], self._current

    def _next(self) -> Match | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None


def _go_behind() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
