"""One request from its arrival to its last piece of text, whatever protocol its client speaks."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from common.errors import DeadlineExceeded
from common.metrics import RouterMetrics
from protos import router_pb2
from router import validation
from router.admission import Admission
from router.answer import Answer, LastPiece, Piece
from router.cluster import Cluster
from router.detokenizer import Detokenizer
from router.record import RequestRecord
from router.tokenizer import RouterTokenizer
from router.validation import Job, Limits, Prompts

Write = Callable[[str, Piece | LastPiece], Awaitable[None]]


class Generator:
    """For one event loop."""

    def __init__(
        self,
        tokenizer: RouterTokenizer,
        prompts: Prompts,
        limits: Limits,
        cluster: Cluster,
        admission: Admission,
        metrics: RouterMetrics,
        *,
        budget_s: float,
    ) -> None:
        """
        Args:
            budget_s: total time a request may take; one that asks for less gets less.
        """
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._limits = limits
        self._cluster = cluster
        self._admission = admission
        self._metrics = metrics
        self._budget_s = budget_s

    async def generate(self, request: router_pb2.GenerateRequest, write: Write) -> None:
        """Calls `write(request_id, piece)` until the LastPiece is written.

        What arrives while a `write` is waiting goes into the next piece. Cancelling this call
        cancels the request on its nodes.

        Raises:
            ServingError: instead of the last piece.
        """
        request_id = request.request_id or uuid.uuid4().hex
        with RequestRecord(self._metrics, request_id) as record:
            validation.check_request_id(request_id)
            budget_s = validation.budget_s(request, self._budget_s)
            with self._admission.admitted(request_id):
                async with _within(budget_s) as deadline:
                    job = await validation.parse(request, request_id, self._prompts, self._limits)
                    await self._stream(job, deadline, write, record)

    async def _stream(self, job: Job, deadline: float, write: Write, record: RequestRecord) -> None:
        chosen = self._cluster.choose(job.token_ids)
        record.accept(len(job.token_ids), chosen.decode.address)
        answer = Answer(
            Detokenizer(self._tokenizer, self._tokenizer.some_text),
            job.stop,
            num_prompt_tokens=len(job.token_ids),
        )
        left_s = max(0.0, deadline - time.monotonic())
        with chosen.decode.submitted(job, chosen.prefill, left_s) as tokens:
            while True:
                piece = answer.add(*await tokens.drain())
                record.write(len(piece.token_ids))
                if isinstance(piece, LastPiece):
                    break
                await write(job.request_id, piece)
        # Out of the block: a stop string's Cancel does not wait for a slow client.
        record.finish(piece.finish_reason)
        await write(job.request_id, piece)


@asynccontextmanager
async def _within(budget_s: float) -> AsyncIterator[float]:
    """Gives the deadline, in time.monotonic() seconds, and raises DeadlineExceeded at it."""
    try:
        async with asyncio.timeout(budget_s) as limit:
            yield time.monotonic() + budget_s
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the request's total budget of {budget_s:g} s is spent") from error
