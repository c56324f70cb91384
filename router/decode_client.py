"""One decode node as this router uses it: one long-lived Serve stream, many requests on it.

Reconnects for ever. A stream's end is the end of every request on it; request numbers are never
reused, so what a node still says about a request that was left finds nothing.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc.aio

from common.errors import NodeUnavailable, ProtocolViolation
from common.logs import kv
from common.sampling import to_proto
from protos import decode_pb2, decode_pb2_grpc
from router.node_ends import end_of
from router.token_buffer import TokenBuffer
from router.validation import Job

log = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


class DecodeClient:
    """For one event loop. `run` keeps the stream; everything else returns at once."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        *,
        peers: Sequence[str],
        on_move: Callable[[str], None],
    ) -> None:
        """
        Args:
            peers: addresses of all prefill nodes, which the node is told first.
            on_move: called with the address when `status` has changed.
        """
        self.address = address
        # The node's last Status on the stream that is open; None: no stream, or none yet.
        self.status: decode_pb2.Status | None = None
        self._stub = decode_pb2_grpc.DecodeNodeStub(channel)  # type: ignore[no-untyped-call]
        self._peers = decode_pb2.Peers(prefill_addresses=peers)
        self._on_move = on_move
        self._live: dict[int, TokenBuffer] = {}
        self._next_number = 1
        # What the node has not been sent, by kind and request. Never more than two messages for
        # each request that it was sent or waits to be, so bounded as live requests are.
        self._unsent: dict[tuple[str, int], decode_pb2.ToNode] = {}
        self._has_unsent = asyncio.Event()

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def run(self) -> None:
        """Serves until cancelled; requests still live then fail with NodeUnavailable."""
        backoff_s = _MIN_BACKOFF_S
        while True:
            opened_at = time.monotonic()
            reason = "the router is shutting down"
            try:
                reason = await self._serve()
                if self.status is not None:
                    log.warning("decode node lost %s", kv(address=self.address, reason=reason))
            finally:
                self._lose(reason)
            if time.monotonic() - opened_at > _MAX_BACKOFF_S:
                backoff_s = _MIN_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    @contextmanager
    def submitted(self, job: Job, prefill: Sequence[str], budget_s: float) -> Iterator[TokenBuffer]:
        """Submits `job`; leaving the block before its end cancels it on the node.

        Args:
            prefill: candidate prefill nodes in order of preference.
            budget_s: what is left of the request's total budget.
        Raises:
            NodeUnavailable: the node has no open stream.
        """
        if self.status is None:
            raise NodeUnavailable(f"decode node {self.address} is not connected")
        number = self._next_number
        self._next_number += 1
        buffer = self._live[number] = TokenBuffer(job.sampling.max_tokens)
        submit = decode_pb2.Submit(
            request=number,
            request_id=job.request_id,
            token_ids=job.token_ids,
            sampling=to_proto(job.sampling),
            prefill_addresses=prefill,
            budget_s=budget_s,
        )
        self._post("submit", number, decode_pb2.ToNode(submit=submit))
        try:
            yield buffer
        finally:
            if number in self._live:
                self._cancel(number)

    def _cancel(self, number: int) -> None:
        del self._live[number]
        if self._unsent.pop(("submit", number), None) is None:
            cancel = decode_pb2.CancelRequest(request=number)
            self._post("cancel", number, decode_pb2.ToNode(cancel=cancel))

    def _post(self, kind: str, number: int, message: decode_pb2.ToNode) -> None:
        self._unsent[kind, number] = message
        self._has_unsent.set()

    async def _serve(self) -> str:
        """Opens the stream and reads it to its end. Returns why it ended."""
        # The channel connects with a backoff of its own; until then nothing is sent.
        call = self._stub.Serve(wait_for_ready=True)
        self._unsent.clear()
        self._post("peers", 0, decode_pb2.ToNode(peers=self._peers))
        sending = asyncio.create_task(self._send(call))
        try:
            async for message in call:
                self._take(message)
            return "the node ended the stream"
        except ProtocolViolation as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            sending.cancel()
            call.cancel()

    async def _send(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        try:
            while True:
                await self._has_unsent.wait()
                self._has_unsent.clear()
                while self._unsent:
                    await call.write(self._unsent.pop(next(iter(self._unsent))))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream is over: whoever reads it learns why.
            return

    def _take(self, message: decode_pb2.FromNode) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._take_step(message.step)
            case "status":
                if self.status is None:
                    log.info("decode node connected %s", kv(address=self.address))
                self.status = message.status
                self._on_move(self.address)
            case unknown:
                raise ProtocolViolation(f"the node sent an unknown message: {unknown}")

    def _take_step(self, step: decode_pb2.Step) -> None:
        ends = (step.ended, step.reason, step.cached_tokens, step.error, step.error_code)
        if len(step.request) != len(step.token) or len({len(column) for column in ends}) != 1:
            raise ProtocolViolation("the node sent a step with columns of different lengths")
        live = self._live
        for number, token in zip(step.request, step.token, strict=True):
            buffer = live.get(number)
            if buffer is not None and not buffer.append(token):
                buffer.end(NodeUnavailable(f"decode node {self.address} sent too many tokens"))
                self._cancel(number)
        for index, number in enumerate(step.ended):
            buffer = live.pop(number, None)
            if buffer is not None:
                buffer.end(
                    end_of(
                        step.reason[index],
                        step.cached_tokens[index],
                        step.error[index],
                        step.error_code[index],
                    )
                )

    def _lose(self, reason: str) -> None:
        self.status = None
        for buffer in self._live.values():
            buffer.end(NodeUnavailable(f"decode node {self.address} is gone: {reason}"))
        self._live.clear()
        self._on_move(self.address)
