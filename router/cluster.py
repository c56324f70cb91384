"""The nodes this router knows, and which of them a request can go to now."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import NodeUnavailable
from router.decode_client import DecodeClient
from router.policy import DecodeChoice, Policy
from router.survey import Survey

NOT_READY = "no decode node with a usable prefill node is ready"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where a request goes: submit it before the next await, or choose again."""

    decode: DecodeClient
    prefill: tuple[str, ...]


class Cluster:
    """For one event loop."""

    def __init__(self, decode: Mapping[str, DecodeClient], survey: Survey, policy: Policy) -> None:
        self._decode = decode
        self._survey = survey
        self._policy = policy

    @property
    def ready(self) -> bool:
        """Whether a request could be placed."""
        return bool(self.usable())

    def usable(self) -> list[DecodeChoice]:
        """The decode nodes that a request could go to now."""
        return [choice for client in self._decode.values() if (choice := self._choice(client))]

    def choose(self, token_ids: Sequence[int]) -> Chosen:
        """Raises NodeUnavailable when no decode node, with a prefill node if it needs one, is
        usable."""
        choices = self.usable()
        if not choices:
            raise NodeUnavailable(NOT_READY)
        placement = self._policy.pick(token_ids, choices)
        return Chosen(self._decode[placement.decode], placement.prefill)

    async def run(self) -> None:
        """Keeps the streams to all decode nodes and the survey, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for client in self._decode.values():
                tasks.create_task(client.run())
            tasks.create_task(self._survey.run())

    def _choice(self, client: DecodeClient) -> DecodeChoice | None:
        status = client.status
        if status is None or status.state != "ready" or not self._survey.fit(client.address):
            return None
        prefill = tuple(address for address in status.paired if self._survey.fit(address))
        if not prefill and not status.serves_alone:
            return None
        return DecodeChoice(client.address, prefill, client.num_live)
