"""Decodes images in a process beside the router. Clients take turns, one image each."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import msgspec

from api.auth.client import Client
from api.auth.fair_slots import FairSlots
from api.images.jobs import Decoded, Job, Outcome, Refused
from common.errors import InvalidRequest, NodeUnavailable
from common.logs import kv
from common.process.helper import ANSWERED, Helper, HelperLost, Question

log = logging.getLogger(__name__)

LANES = 2  # images that are decoded at once
MAX_WAITING = 64  # images that wait for their turn
MAX_BYTES = 448 << 20  # memory of one, see MAX_PIXELS
CPU_S = 5  # of one
_LONGEST_WAIT_S = 30.0  # for a turn
_DEADLINE_S = 60.0  # of a turn, on a machine that is busy with other things


class Decoding:
    """Decodes for one event loop. Starts its program with the first image."""

    def __init__(self) -> None:
        self.helper = Helper("api.images.decoder", [], num_lanes=LANES, deadline_s=_DEADLINE_S)
        self._turns = FairSlots(
            LANES,
            longest_wait_s=_LONGEST_WAIT_S,
            max_waiting=MAX_WAITING,
            what="images are being decoded",
        )
        self._lanes = list(range(LANES))  # that are free
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="images")

    async def decoded(self, job: Job, client: Client) -> Decoded:
        """Return the image of a job.

        Raises:
            InvalidRequest: it is no image, or is too much.
            Overloaded: too many others wait, or have waited too long.
            NodeUnavailable: the program that decodes has failed.
        """
        await self._turns.take(client)
        # A turn ends with its work, not with the request that wanted it.
        turn = asyncio.ensure_future(self._turn(job, client))
        turn.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(turn)

    def close(self) -> None:
        self.helper.close()
        self._threads.shutdown(wait=False)

    async def _turn(self, job: Job, client: Client) -> Decoded:
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

    def _ask(self, lane: int, job: Job) -> Outcome:
        """Wait for the answer, on a thread of the executor."""
        question = Question(msgspec.msgpack.encode(job), CPU_S, MAX_BYTES)
        try:
            answer = self.helper.ask(lane, question)
        except HelperLost as error:
            log.warning("image decoder lost %s", kv(reason=repr(error.__cause__)))
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
