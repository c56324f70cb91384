"""Application of a step's result to its requests: computed chunks, new tokens, ended requests.

The scheduler calls it once per step. Rows of requests that have ended meanwhile are discarded. With
overlap, this wastes one row in the forward that follows a request's last token. Only FinishRule
decides whether a token ends a request. The event loop reports the StepOutcome.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from grpc import StatusCode
from numpy.typing import NDArray

from common.request import PredictionUsage
from common.requests.logprobs import Logprobs, join
from engine.batch.batch import (
    NOT_FINITE,
    AcceptedRuns,
    BatchResult,
    Ints,
    RowLogprobRequest,
    ScheduleBatch,
)
from engine.batch.holding import ONE
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from engine.scheduler.admission import ExtendRow, PrefillAdmission
from engine.scheduler.assembly import ScheduledStep
from engine.scheduler.retraction import RetractedRequests
from engine.scheduler.slot_owners import CorruptPrefix, SlotOwners


class ChunkDone(msgspec.Struct, frozen=True, eq=False):
    """A computed chunk. The KV of token indices [start, end) is final, in the request's own pages
    unless it has been retracted since.

    Attributes:
        first_token, pooled: result of the last chunk: the token sampled after it, or the pooled
            vector.
        logprobs: of the first token, if requested.
        prompt_logprobs: logprobs of the prompt tokens from the first requested one on.
    """

    request: Request
    start: int
    end: int
    first_token: int | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: NDArray[np.float32] | None = None


class FinishedRequest(msgspec.Struct, frozen=True):
    """A request that has ended.

    num_generated: number of tokens of the response, if its own last token ended it. Otherwise 0.
    corrupt_prefix: the KV of the request, if its logits contained NaN or Inf.
    """

    request: Request
    finish: RequestEnd
    num_generated: int = 0
    corrupt_prefix: CorruptPrefix | None = None


class StepOutcome(msgspec.Struct, frozen=True, eq=False):
    """The results of one step. New tokens come in columns with one entry per token, including the
    token that ends a request.

    Attributes:
        streams, requests: origin of each token.
        logprobs: by origin, for requests that asked for them.
        predicted: by origin, accepted and rejected tokens of clients' predictions.
    """

    streams: NDArray[np.uint64]
    requests: NDArray[np.uint64]
    tokens: NDArray[np.int32]
    chunks: list[ChunkDone]
    finished: list[FinishedRequest]
    logprobs: Sequence[tuple[tuple[int, int], Logprobs]] = ()
    predicted: Sequence[tuple[tuple[int, int], PredictionUsage]] = ()


def _fault(sentence: str) -> RequestEnd:
    return RequestEnd(FinishReason.ERROR, sentence, StatusCode.INTERNAL)


class FinishRule:
    """The finish conditions of one model."""

    def __init__(self, eos_token_ids: Sequence[int], vocabulary_size: int) -> None:
        self._eos = frozenset(eos_token_ids)
        self.vocabulary_size = vocabulary_size

    def decide(self, request: Request, token: int, at_limit: bool) -> RequestEnd | None:
        """Return how the newest token ends the request, or None if the request continues.

        If a stop token is also the last token allowed, the reason is STOP, because nothing was cut
        off.

        Args:
            at_limit: whether the request now has the maximum number of tokens.
        """
        if request.to_finish is not None:
            return request.to_finish
        if token == NOT_FINITE:
            return _fault("the model's logits contain NaN or Inf")
        if not 0 <= token < self.vocabulary_size:
            return _fault(f"token {token} is outside the vocabulary")
        sampling = request.sampling
        if token in sampling.stop_token_ids:
            return RequestEnd(FinishReason.STOP)
        if token in self._eos and sampling.ends_at_eos:
            return RequestEnd(FinishReason.STOP)
        return RequestEnd(FinishReason.LENGTH) if at_limit else None


class StepResults:
    """Applies the results of steps. Engine thread only.

    Attributes:
        num_tokens: tokens reported since the start.
    """

    def __init__(
        self,
        core: EngineCore,
        admission: PrefillAdmission,
        retracted: RetractedRequests,
        owners: SlotOwners,
    ) -> None:
        self.rule = FinishRule(core.limits.eos_token_ids, core.limits.vocabulary_size)
        self._table = core.table
        self._sliding = bool(core.table.tables.sliding)
        self._pages = core.pages
        self._cache = core.cache
        self._admission = admission
        self._retracted = retracted
        self._owners = owners
        self._vocabulary_size = np.array(core.limits.vocabulary_size, np.uint32)
        self.num_tokens = 0

    def apply(
        self,
        step: ScheduledStep,
        result: BatchResult,
        predicted: Sequence[tuple[tuple[int, int], PredictionUsage]] = (),
    ) -> StepOutcome:
        """Apply the result of a step. Must be called once per step, in launch order.

        Args:
            predicted: as in StepOutcome.
        """
        chunks: list[ChunkDone] = []
        finished: list[FinishedRequest] = []
        wanted = self._wanted_logprobs(step.batch, result.logprobs)
        slots, tokens = step.slots, result.tokens
        if step.extends:
            begun = self._finish_chunks(step.extends, result, chunks, finished)
            num_prompts = len(step.extends)
            decoded = slots[num_prompts:], tokens[num_prompts:]
            slots, tokens = slots[begun], tokens[begun]
            if len(decoded[0]):
                decoded = self._finish_decodes(*decoded, None, finished)
                slots = np.concatenate((slots, decoded[0]))
                tokens = np.concatenate((tokens, decoded[1]))
        else:
            slots, tokens = self._finish_decodes(slots, tokens, result.runs, finished)
        self.num_tokens += len(tokens)
        streams, requests = self._table.origin_stream[slots], self._table.origin_request[slots]
        logprobs = self._reported_logprobs(slots, wanted) if wanted else ()
        return StepOutcome(streams, requests, tokens, chunks, finished, logprobs, predicted)

    def _finish_decodes(
        self,
        slots: NDArray[np.intp],
        tokens: Ints,
        runs: AcceptedRuns | None,
        finished: list[FinishedRequest],
    ) -> tuple[NDArray[np.intp], Ints]:
        """Append the tokens of decode rows. Return slot and token of all tokens to report."""
        computed, places = slots, self._table.known[slots]
        before = places
        if runs is not None:
            slots, places, tokens = self._in_order(slots, places, runs)
        slots, places, tokens = self._chosen(slots, places, tokens)
        reported = self._finish_tokens(slots, places, tokens, finished)
        if self._sliding:
            self._free_behind(computed, before)
        return reported

    def _chosen(
        self, slots: NDArray[np.intp], places: Ints, tokens: Ints
    ) -> tuple[NDArray[np.intp], Ints, Ints]:
        """Drop rows that continue but got no token, as if they had not been in the step."""
        table = self._table
        if not np.count_nonzero(table.unchosen):
            return slots, places, tokens
        dropped = table.unchosen[slots] & (table.max_length[slots] > 0) & (tokens >= 0)
        dropped &= table.live[slots]
        np.subtract.at(table.length, slots[dropped], ONE)  # a row may have several tokens
        return slots[~dropped], places[~dropped], tokens[~dropped]

    def _finish_chunks(
        self,
        extends: Sequence[ExtendRow],
        result: BatchResult,
        chunks: list[ChunkDone],
        finished: list[FinishedRequest],
    ) -> list[int]:
        """Insert computed chunks into the prefix cache, and append first tokens. End requests that
        were aborted between two chunks.

        Returns:
            The rows whose token is to be reported.
        """
        begun = []
        tokens = result.tokens[: len(extends)].tolist()
        for place, (row, token) in enumerate(zip(extends, tokens, strict=True)):
            request = row.request
            if request.slot != row.slot:
                continue  # the request ended in an earlier step
            self._admission.computed(row)
            if token == NOT_FINITE:  # no request may use its pages
                finish = self.rule.decide(request, token, at_limit=False)
                assert finish is not None
                corrupt = self._owners.end_at_fault(request)
                finished.append(FinishedRequest(request, finish, corrupt_prefix=corrupt))
                continue
            if request not in self._retracted:  # retracted requests have no pages on the device
                self._insert(row)
            finish, num_tokens = request.to_finish, row.end
            if finish is None:
                chosen = row.samples and not self._table.unchosen[row.slot]
                chunks.append(_chunk(row, place, token if chosen else None, result))
                if chosen:
                    num_tokens += 1
                    if 0 <= token < self.rule.vocabulary_size:
                        self._table.tokens[row.slot, row.end] = token
                        self._table.known[row.slot] = num_tokens
                        begun.append(place)
                    at_limit = bool(num_tokens >= self._table.max_length[row.slot])
                    finish = self.rule.decide(request, token, at_limit)
                elif row.samples:  # as if it had not been in the step
                    self._table.length[row.slot] -= 1
                elif row.last:
                    finish = RequestEnd(FinishReason.STOP)
            if finish is not None:
                finished.append(_finished(request, finish, num_tokens))
                self._owners.end(request)
        return begun

    def _insert(self, row: ExtendRow) -> None:
        """Insert a computed chunk into the prefix cache."""
        request, holding = row.request, self._table.holding_of(row.slot)
        self._cache.insert(request.token_ids[: row.end], holding, request.namespace)
        if len(row.kept):
            self._cache.insert(
                request.token_ids[: row.keep], holding, request.namespace, state=row.kept
            )
        if self._sliding:
            self._pages.drop(self._table.free_behind(row.slot, row.end), PageHolder.REQUEST)

    def _free_behind(self, slots: NDArray[np.intp], known: Ints) -> None:
        """Free the pages that left the attention window, for rows that filled a page.

        Tokens in flight do not count, because the launched step may still read those pages.

        Args:
            known: number of tokens known before this step, per row.
        """
        size, done = self._table.page_size, self._table.known[slots] - 1
        at_edge = (done // size > (known - 1) // size) & self._table.live[slots]
        for slot, past in zip(slots[at_edge].tolist(), done[at_edge].tolist(), strict=True):
            # Row by row, because two rows that share a prefix may release the same page.
            self._pages.drop(self._table.free_behind(slot, past), PageHolder.REQUEST)

    def _wanted_logprobs(
        self, batch: ScheduleBatch, found: RowLogprobRequest | None
    ) -> Mapping[int, Logprobs]:
        """Return the logprobs by slot, for requests that asked for them and still have a slot."""
        wanted: dict[int, Logprobs] = {}
        if found is None:
            return wanted
        for row in np.unique(found.rows).tolist():
            slot = int(batch.slots[row])
            request = self._owners.by_slot.get(slot)
            if request is not None and self._table.live[slot]:
                sampling = request.sampling
                wanted[slot] = found.of(row, sampling.logprobs, sampling)
        return wanted

    def _reported_logprobs(
        self, slots: NDArray[np.intp], wanted: Mapping[int, Logprobs]
    ) -> Sequence[tuple[tuple[int, int], Logprobs]]:
        """Return the logprobs by origin, for the reported tokens of each slot."""
        counts = zip(*(column.tolist() for column in np.unique_counts(slots)), strict=True)
        return [
            (self._table.origin_of(slot), wanted[slot].first(count))
            for slot, count in counts
            if slot in wanted
        ]

    def _in_order(
        self, slots: NDArray[np.intp], known: Ints, runs: AcceptedRuns
    ) -> tuple[NDArray[np.intp], Ints, Ints]:
        """Return slot, index and token of all tokens of rows with several tokens, row by row.
        Tokens after the one that ends its request are left out."""
        counts = runs.counts
        rows, numbers = np.nonzero(np.arange(runs.tokens.shape[1]) < counts[:, None])
        slots, tokens = slots[rows], runs.tokens[rows, numbers]
        places = known[rows] + numbers.astype(np.int32)
        stops, odd, last = self._ending(slots, places, tokens)
        ends = stops.any(axis=1) | odd | last
        if np.count_nonzero(ends):
            # Number of ending tokens before each token, over all rows.
            ended: NDArray[np.intp] = np.cumsum(ends) - ends
            firsts = np.cumsum(counts) - counts
            kept: NDArray[np.bool_] = ended == ended[firsts][rows]
            slots, places, tokens = slots[kept], places[kept], tokens[kept]
        return slots, places, tokens

    def _ending(
        self, slots: NDArray[np.intp], places: Ints, tokens: Ints
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return three masks of why tokens end their requests: stop token (one column per stop
        token), id outside the vocabulary, last token allowed."""
        table = self._table
        stops = table.stop_ids[slots] == tokens[:, None]
        odd = tokens.view(np.uint32) >= self._vocabulary_size  # includes negative ids
        return stops, odd, places + ONE >= table.max_length[slots]

    def _finish_tokens(
        self,
        slots: NDArray[np.intp],
        places: Ints,
        tokens: Ints,
        finished: list[FinishedRequest],
    ) -> tuple[NDArray[np.intp], Ints]:
        """Append each token to its row at token index places[row]. Return the rows and tokens to
        report.

        Only the last of a row's tokens may end its request.
        """
        table = self._table
        live = table.live[slots]
        if np.count_nonzero(live) < len(slots):
            slots, places, tokens = slots[live], places[live], tokens[live]
        known = places + ONE
        stops, odd, last = self._ending(slots, places, tokens)
        if not (np.count_nonzero(stops) or np.count_nonzero(odd) or np.count_nonzero(last)):
            table.tokens[slots, places] = tokens
            table.known[slots] = known
            return slots, tokens
        kept = ~odd & (table.max_length[slots] > 0)
        reported = slots, tokens, places, known
        if np.count_nonzero(kept) < len(slots):
            reported = slots[kept], tokens[kept], places[kept], known[kept]
        table.tokens[reported[0], reported[2]] = reported[1]
        table.known[reported[0]] = reported[3]
        for row in (stops.any(axis=1) | odd | last).nonzero()[0].tolist():
            slot, token = int(slots[row]), int(tokens[row])
            request = self._owners.by_slot[slot]
            finish = self.rule.decide(request, token, at_limit=bool(last[row]))
            assert finish is not None
            corrupt = None
            if token == NOT_FINITE:
                corrupt = self._owners.end_at_fault(request)
            else:
                self._owners.end(request, insert=True)
            finished.append(_finished(request, finish, int(places[row]) + 1, corrupt))
        return reported[:2]


def _finished(
    request: Request, finish: RequestEnd, num_tokens: int, corrupt: CorruptPrefix | None = None
) -> FinishedRequest:
    """Return the end of a request whose last token is its token number `num_tokens`."""
    is_complete = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
    num_generated = num_tokens - request.num_prompt if is_complete else 0
    return FinishedRequest(request, finish, num_generated, corrupt)


def _chunk(row: ExtendRow, place: int, token: int | None, result: BatchResult) -> ChunkDone:
    """Return the computed chunk of row `place`. A recomputed prompt discards its earlier logprobs
    and pooled vector. `token`: chosen after the chunk, or None."""
    request, prompt = row.request, result.prompt_logprobs
    sampling = request.sampling
    if row.start < sampling.first_prompt_logprob:
        request.prompt_logprobs.clear()
        request.pooled = None
    if prompt is not None and sampling.prompt_logprobs >= 0:
        part_of_prompt = prompt.of(place, sampling.prompt_logprobs, sampling)
        request.prompt_logprobs.append(part_of_prompt)
    if place in result.pooled:
        part = result.pooled[place]
        request.pooled = part if request.pooled is None else request.pooled + part
    if token is None:
        vector = request.pooled if row.last and not row.samples else None
        return ChunkDone(request, row.start, row.end, None, pooled=vector)
    own = result.logprobs if sampling.logprobs >= 0 else None
    return ChunkDone(
        request,
        row.start,
        row.end,
        token,
        own.of(place, sampling.logprobs, sampling) if own else None,
        join(request.prompt_logprobs) if request.prompt_logprobs else None,
    )
