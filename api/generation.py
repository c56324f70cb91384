"""One request from its arrival to its last piece of text, for every client protocol."""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypedDict

from api.auth.client import Client
from api.requests import validation
from api.requests.answer import FinalChunk, OutputChunk, ResponseBuilder
from api.requests.deadline import DeadlineScope
from api.requests.generate_params import GenerateParams
from api.requests.job import TokenizedRequest
from api.requests.limiter import RequestLimiter, new_request_id
from api.requests.priorities import PriorityLimits
from api.requests.record import RequestRecord, RequestRecords
from api.requests.served_model import ServedModel
from api.requests.token_reports import PromptReport, Spell, TokenReport, told, told_prompt
from api.text.detokenizer import Detokenizer
from common.errors import NodeUnavailable
from common.request import Remaining, RequestSpec
from common.requests.logprobs import TokenLogprobs
from common.requests.weights import WeightsId, made_with
from protos.decode_pb2 import MoveFrom
from router.attempt import Attempt, AttemptMigration
from router.cluster.cluster import Cluster, Placed
from router.losses import AttemptLosses, died
from router.policy.backlogs import WHENEVER, RequestDue
from router.policy.choices import PlacementKey
from router.timelines import AttemptTimings
from router.token_buffer import StreamEnd

# Factor by which a node may wait longer than the router estimates. The node has better information,
# and a late rejection costs a round trip. It is worthwhile only if the router's estimate was far
# off.
_LENIENCE = 2.0

Write = Callable[[str, OutputChunk | FinalChunk], Awaitable[None]]
Offer = Callable[[OutputChunk], bool]


class Dispatcher:
    """Dispatcher of generation requests to nodes. For one event loop."""

    def __init__(
        self,
        model: ServedModel,
        cluster: Cluster,
        admission: RequestLimiter,
        records: RequestRecords,
        *,
        budget_s: float,
        queue_share: float = 1.0,
        tells_cached_tokens: bool = True,
        priorities: PriorityLimits | None = None,
    ) -> None:
        """
        Args:
            budget_s: total time limit of a request. A request may ask for less.
            queue_share: share of its budget that a request may wait in queues of the nodes.
            tells_cached_tokens: whether clients learn how much of their prompt was cached.
            priorities: priorities that clients may request. By default clients may only lower
                theirs.
        """
        self._model = model
        self._cluster = cluster
        self._admission = admission
        self._records = records
        self._budget_s = budget_s
        self._queue_share = queue_share
        self._tells_cached_tokens = tells_cached_tokens
        self._priorities = priorities or PriorityLimits()

    async def generate(
        self,
        wanted: GenerateParams,
        client: Client,
        write: Write,
        traceparent: str = "",
        offer: Offer = lambda piece: False,
    ) -> None:
        """Call `write(request_id, piece)` until the FinalChunk is written.

        Tokens that arrive while a `write` is waiting go into the next piece. Cancelling this call
        cancels the request on its nodes.

        Args:
            client: the authenticated client. Its limits are not checked yet.
            traceparent: as the client sent it.
            offer: called with each piece except the last. Returns whether it has written the piece
                without waiting. If not, `write` is called.
        Raises:
            ServingError: the request failed, and there is no last piece.
        """
        request_id = wanted.request_id or new_request_id()
        label = wanted.label[: validation.MAX_LABEL_CHARACTERS]  # for logs, in case it is too long
        with self._records.begin(request_id, label, client, traceparent) as record:
            validation.check_label(wanted.label)
            budget_s = validation.budget_s(wanted.timeout_s, self._budget_s)
            priority = self._priorities.decide(wanted.priority, client)
            with DeadlineScope(budget_s) as deadline:
                async with self._admission.admitted(client, priority):
                    queue_s = budget_s * self._queue_share
                    due = RequestDue(time.monotonic() + queue_s, deadline, priority)
                    self._cluster.check_in_time(due)
                    job = await validation.parse(
                        wanted,
                        request_id,
                        self._model.prompts,
                        self._model.limits,
                        client,
                        priority,
                        self._cluster.adapters.of(wanted.adapter),
                    )
                    await wanted.together.counted.get(partial(self._count, wanted, client))
                    record.timeline.tokenised = time.monotonic()
                    await self._stream(job, due, write, offer, record)

    async def _count(self, wanted: GenerateParams, client: Client) -> None:
        """Count the prompts of all responses to one request.

        Raises:
            RateLimited, InvalidRequest: see Usage.prompts and validation.check_prompt_logprobs.
        """
        together = wanted.together
        lengths = [
            len(await self._model.prompts.checked(each, client)) for each in together.prompts
        ]
        of_all = sum(lengths) * (together.num_answers // len(lengths))
        validation.check_prompt_logprobs(wanted.sampling, of_all)
        client.usage.prompts(sum(lengths), together.num_answers)

    async def _stream(
        self,
        job: TokenizedRequest,
        due: RequestDue,
        write: Write,
        offer: Offer,
        record: RequestRecord,
    ) -> None:
        spec, tokenizer = job.spec, self._model.tokenizer
        answer = ResponseBuilder(
            Detokenizer(tokenizer, tokenizer.some_text, tokenizer.spelt(job.shown)),
            job.stops.begin(),
            spec.sampling.stop_token_ids,
            num_prompt_tokens=spec.num_tokens,
            min_tokens=spec.sampling.min_tokens,
            tells_cached_tokens=self._tells_cached_tokens,
            predicts=bool(spec.prediction),
            **_tells(job, tokenizer.spelling),
        )
        chosen = await self._choose(job, due)
        record.accept(spec.num_tokens, chosen.decode.address)
        losses = AttemptLosses()
        stay: Attempt | None = None  # after a migration. None: not yet submitted
        submit = partial(self._submit, spec, answer, losses, due.deadline, record)

        def may_move() -> bool:
            return bool(answer.token_ids) and not losses.engine_deaths

        while True:
            try:
                with (
                    stay or submit(chosen) as here,
                    AttemptMigration(
                        here, may_move, partial(self._move, job.session_id, submit), record.stay
                    ) as moving,
                ):
                    stay = None
                    try:
                        last = await self._follow(here, job, answer, write, offer, record)
                    except NodeUnavailable as lost:
                        answer.note_cached_tokens(here.tokens.cached_tokens)
                        stay = moving.take_target_attempt() if not died(lost) else None
                        raise
                break
            except NodeUnavailable as error:
                if stay is not None:
                    chosen = stay.chosen
                    record.move(stay.submission)
                    continue
                record.timeline.lose(str(error))
                losses.add(chosen.decode.address, error, len(answer.token_ids))
                if len(answer.token_ids) >= spec.sampling.max_tokens:
                    raise
                chosen = await self._choose_again(job, error, losses.addresses)
                suspect = losses.engine_deaths > 0
                record.replay(chosen.decode.address, error, suspect=suspect)
        # Written after the submission is closed, so the Cancel after a stop does not wait for a
        # slow client.
        record.finish(last.finish_reason, last.cached_tokens)
        await write(spec.request_id, last)

    def _submit(
        self,
        spec: RequestSpec,
        answer: ResponseBuilder,
        losses: AttemptLosses,
        deadline: float,
        record: RequestRecord,
        chosen: Placed,
        move_from: MoveFrom | None = None,
    ) -> Attempt:
        """Submit the rest of a request to a decode node.

        Args:
            move_from: the node where it runs, for a migration. Else the submission is the last in
                the timeline.

        Raises:
            NodeUnavailable: the node is gone.
        """
        now = time.monotonic()
        left_s, queue_s = max(0.0, deadline - now), math.inf
        if chosen.start_by > -math.inf:
            queue_s = min(max(0.0, chosen.start_by - now) * _LENIENCE, left_s)
        rest = spec.continued(answer.token_ids, losses.engine_deaths)
        timeline = record.timeline
        moves = move_from is not None
        submission = (
            AttemptTimings(chosen.decode.address, now) if moves else timeline.submissions[-1]
        )
        try:
            submitted = chosen.decode.submitted(
                rest,
                chosen.prefill,
                Remaining(left_s, queue_s),
                timeline,
                move_from=move_from,
                prefix_hints=chosen.prefix_at,
                submission=submission,
            )
        except NodeUnavailable:
            chosen.charge.close()
            raise
        return Attempt(chosen, submitted, submission, rest)

    def _move(
        self,
        session_id: str,
        submit: Callable[[Placed, MoveFrom], Attempt],
        stay: Attempt,
        target: str,
    ) -> Attempt:
        """Submit a running request to another node.

        Raise NodeUnavailable if no node, or not `target`, can take it.
        """
        key = _key(stay.spec, session_id, self._cluster.weights)
        return submit(self._cluster.choose_target(key, stay.address, target), stay.here)

    async def _follow(
        self,
        stay: Attempt,
        job: TokenizedRequest,
        answer: ResponseBuilder,
        write: Write,
        offer: Offer,
        record: RequestRecord,
    ) -> FinalChunk:
        """Write the output of one decode node and return the last piece unwritten.

        Raises:
            NodeUnavailable: the node takes no more requests or is gone. Its output so far is in
                `answer` and has been written.
        """
        tokens, charge = stay.tokens, stay.chosen.charge
        repeats = stay.repeats(answer.token_ids)

        def take(
            token_ids: Sequence[int], end: StreamEnd | None
        ) -> OutputChunk | FinalChunk | None:
            logprobs = tokens.take_logprobs(len(token_ids))
            num_again = repeats.dropped(token_ids)
            if num_again:
                token_ids, logprobs = token_ids[num_again:], logprobs[num_again:]
                if not token_ids and end is None:
                    return None
            answer.add_predicted(tokens.take_predicted())
            piece = answer.add(
                token_ids, end, tokens.cached_tokens, logprobs, tokens.prompt_logprobs
            )
            charge.first_token()
            record.write(len(piece.token_ids))
            written = not isinstance(piece, FinalChunk) and offer(piece)
            return None if written else piece

        while not isinstance(piece := await tokens.taken(take), FinalChunk):
            await write(job.spec.request_id, piece)
        return piece

    async def _choose(
        self, job: TokenizedRequest, due: RequestDue = WHENEVER, avoid: Sequence[str] = ()
    ) -> Placed:
        if not self._cluster.ready:
            await self._cluster.until_ready()
        key = _key(job.spec, job.session_id, self._cluster.weights)
        return self._cluster.choose(key, avoid, due)

    async def _choose_again(
        self, job: TokenizedRequest, lost: NodeUnavailable, avoid: Sequence[str]
    ) -> Placed:
        """Choose another node. If there is none, raise the error of the failed node."""
        try:
            return await self._choose(job, avoid=avoid)
        except NodeUnavailable:
            raise lost from None


def _key(spec: RequestSpec, session_id: str, weights: WeightsId) -> PlacementKey:
    namespace = made_with(spec.cache_namespace, weights)
    return PlacementKey(spec.tokens, session_id, namespace, spec.adapter)


class _Tells(TypedDict, total=False):
    tells_tokens: Callable[[int, TokenLogprobs], TokenReport]
    tells_prompt: Callable[[Sequence[TokenLogprobs]], PromptReport]
    silent: bool


def _tells(job: TokenizedRequest, spell: Spell) -> _Tells:
    """Return the options of a response for output beyond its text."""
    tells: _Tells = {"silent": job.silent}
    num_top, num_prompt_top = job.spec.sampling.logprobs, job.spec.sampling.prompt_logprobs
    if num_top >= 0:
        tells["tells_tokens"] = partial(told, num_top=num_top, spell=spell)
    if job.echo is not None or num_prompt_top >= 0:
        text = job.echo or ""
        tells["tells_prompt"] = partial(
            told_prompt, text, job.spec.tokens, num_top=num_prompt_top, spell=spell
        )
    return tells
