"""Decoding of images in a helper process. Clients take turns, one image at a time."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import msgspec

from api.auth.client import Client
from api.auth.fair_slots import FairShareLimiter
from api.images.jobs import Decoded, ImageJob, Outcome, Refused
from common.errors import InvalidRequest, NodeUnavailable
from common.logs import kv
from common.process.helper import ANSWERED, Helper, HelperLost, Question

log = logging.getLogger(__name__)

LANES = 2  # images that are decoded concurrently
MAX_WAITING = 64  # images in the queue
MAX_BYTES = 448 << 20  # memory for one image, see MAX_PIXELS
CPU_S = 5  # for one image
_LONGEST_WAIT_S = 30.0  # in the queue
_DEADLINE_S = 60.0  # for decoding, on a machine that is busy with other work


class Decoding:
    """The decoder of one event loop. Starts the helper process with the first image."""

    def __init__(self) -> None:
        self.helper = Helper("api.images.decoder", [], num_lanes=LANES, deadline_s=_DEADLINE_S)
        self._turns = FairShareLimiter(
            LANES,
            longest_wait_s=_LONGEST_WAIT_S,
            max_waiting=MAX_WAITING,
            what="images are being decoded",
        )
        self._lanes = list(range(LANES))  # free lanes
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="images")

    async def decoded(self, job: ImageJob, client: Client) -> Decoded:
        """Return the image of a job.

        Raises:
            InvalidRequest: it is not an image, or is too large.
            Overloaded: the queue is full, or the job waited too long.
            NodeUnavailable: the helper process has failed.
        """
        await self._turns.take(client)
        # A turn ends with the decoding, even if the request was cancelled.
        turn = asyncio.ensure_future(self._turn(job, client))
        turn.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(turn)

    def close(self) -> None:
        self.helper.close()
        self._threads.shutdown(wait=False)

    async def _turn(self, job: ImageJob, client: Client) -> Decoded:
        lane = self._lanes.pop()
        try:
            run = asyncio.get_running_loop().run_in_executor
            outcome = await run(self._threads, self._ask, lane, job)
        finally:
            self._lanes.append(lane)
            self._turns.give_back(client)
        match outcome:
            case Refused(sentence):
                raise InvalidRequest(sentence)
            case Decoded():
                return outcome

    def _ask(self, lane: int, job: ImageJob) -> Outcome:
        """Wait for the decoded image, on a thread of the executor."""
        question = Question(msgspec.msgpack.encode(job), CPU_S, MAX_BYTES)
        try:
            answer = self.helper.ask(lane, question)
        except HelperLost as error:
            log.warning("image decoder failed %s", kv(reason=repr(error.__cause__)))
            raise NodeUnavailable(
                "images: the process that decodes them has ended and is started again: send the "
                "request again"
            ) from error
        if answer.took_too_long:
            raise InvalidRequest(f"decoding an image takes more than {CPU_S} s of a core")
        if answer.code != ANSWERED:
            raise InvalidRequest(
                f"decoding an image takes more than {MAX_BYTES >> 20} MiB, or it is damaged"
            )
        outcome: Outcome = msgspec.msgpack.decode(answer.content, type=Outcome)
        return outcome
