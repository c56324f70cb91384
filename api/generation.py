"""One request from its arrival to its last piece of text, for every client protocol."""

import time
from collections.abc import Awaitable, Callable
from functools import partial

from api.auth.client import Client
from api.requests import validation
from api.requests.answer import (
    FinalChunk,
    OutputChunk,
    ResponseBuilder,
    ResponseOptions,
    Spell,
    prompt_report,
    token_report,
)
from api.requests.generate_params import GenerateParams, TokenizedRequest
from api.requests.limiter import DeadlineScope, PriorityLimits, RequestLimiter, new_request_id
from api.requests.served_model import ServedModel
from api.text.tokenizer import Detokenizer
from router.cluster.cluster import Cluster
from router.generation import Generation
from router.policy.load import RequestDue
from router.record import RequestRecord, RequestRecords
from router.token_buffer import ModelVersion, NodeOutput

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
        returns_cached_tokens: bool = True,
        priorities: PriorityLimits | None = None,
        stream_interval: int = 1,
    ) -> None:
        """
        Args:
            budget_s: total time limit of a request. A request may ask for less.
            queue_share: share of its budget that a request may wait in queues of the nodes.
            returns_cached_tokens: whether clients learn how much of their prompt was cached.
            priorities: priorities that clients may request. By default clients may only lower
                theirs.
            stream_interval: tokens of an event, if the client does not set it.
        """
        self._model = model
        self._cluster = cluster
        self._admission = admission
        self._records = records
        self._budget_s = budget_s
        self._queue_share = queue_share
        self._returns_cached_tokens = returns_cached_tokens
        self._priorities = priorities or PriorityLimits()
        self._stream_interval = stream_interval

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
        with self._records.begin(request_id, label, client.name, traceparent) as record:
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
                        self._stream_interval,
                    )
                    await wanted.together.counted.get(partial(self._count, wanted, client))
                    record.timeline.tokenized = time.monotonic()
                    writing = partial(write, request_id)
                    sink = ResponseSink(self._builder(job), writing, offer, record, client)
                    cluster, session_id = self._cluster, job.session_id
                    await Generation(job.spec, due, sink, record, cluster, session_id).run()
                    # After the Cancel to the node, which must not wait for a slow client.
                    record.finish(sink.last.finish_reason, sink.last.cached_tokens)
                    await sink.flush()

    async def _count(self, wanted: GenerateParams, client: Client) -> None:
        """Count the prompts of all responses to one request.

        Raises:
            RateLimited, InvalidRequest: see KeyUsage.prompts and validation.check_prompt_logprobs.
        """
        together = wanted.together
        lengths = [
            len(await self._model.prompts.checked(each, client)) for each in together.prompts
        ]
        of_all = sum(lengths) * (together.num_answers // len(lengths))
        validation.check_prompt_logprobs(wanted.sampling, of_all)
        client.usage.prompts(sum(lengths), together.num_answers)

    def _builder(self, job: TokenizedRequest) -> ResponseBuilder:
        tokenizer = self._model.tokenizer
        return ResponseBuilder(
            Detokenizer(tokenizer, tokenizer.some_text, tokenizer.spelt(job.shown)),
            job.stops.begin(),
            _options(job, tokenizer.spelling, returns_cached_tokens=self._returns_cached_tokens),
        )


class ResponseSink:
    """A response on its way to the client: the TokenSink of its Generation."""

    def __init__(
        self,
        builder: ResponseBuilder,
        write: Callable[[OutputChunk], Awaitable[None]],
        offer: Offer,
        record: RequestRecord,
        client: Client,
    ) -> None:
        self.token_ids = builder.token_ids
        self.ended = False
        self.last: FinalChunk  # once it has ended
        self._builder = builder
        self._write = write
        self._offer = offer
        self._record = record
        self._client = client
        self._piece: OutputChunk

    @property
    def version(self) -> ModelVersion:
        return self._builder.version

    def note_cached_tokens(self, cached_tokens: int | None) -> None:
        self._builder.note_cached_tokens(cached_tokens)

    def add(self, output: NodeOutput) -> bool:
        piece = self._piece = self._builder.add(output)
        num_tokens = len(piece.token_ids)
        self._record.write(num_tokens)
        self._client.usage.generated(num_tokens)
        if isinstance(piece, FinalChunk):
            self.ended, self.last = True, piece
            return True
        return not self._offer(piece)

    async def flush(self) -> None:
        await self._write(self._piece)


def _options(
    job: TokenizedRequest, spell: Spell, *, returns_cached_tokens: bool
) -> ResponseOptions:
    params = job.asked
    report_token = report_prompt = None
    if params.logprobs >= 0:
        report_token = partial(token_report, num_top=params.logprobs, spell=spell)
    if job.echo is not None or params.prompt_logprobs >= 0:
        num_top, text = params.prompt_logprobs, job.echo or ""
        first = params.first_prompt_logprob
        report_prompt = partial(
            prompt_report, text, job.spec.tokens, first=first, num_top=num_top, spell=spell
        )
    return ResponseOptions(
        num_prompt_tokens=job.spec.num_tokens,
        seed=job.spec.sampling.seed,
        prompt_token_ids=job.spec.token_ids,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        returns_cached_tokens=returns_cached_tokens,
        report_token=report_token,
        report_prompt=report_prompt,
        silent=job.silent,
        predicts=bool(job.spec.prediction),
        returns_states=params.returns_states,
    )
