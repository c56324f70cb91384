"""Prefill nodes and decode nodes in one process, assembled by the product.

The server processes and the network are fakes, and the test gives each event loop its turns. Freed
pages are reused first, which exposes premature releases. Every node runs its self-check after each
turn.
"""

import itertools
import math
import random
import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import msgspec

from common.config import PrefixSharingConfig, SchedulerConfig, TransferConfig
from common.process.ipc import WakeUp, socket_pair
from common.request import PrefixHint, Remaining, RequestSpec
from common.requests.namespace import as_bytes
from common.requests.sampling import SamplingParams
from engine.batch.request import FinishReason
from engine.runner.stream import DeviceStream, WorkerStream
from kvtransfer.messages import GrantHandoff
from node.messages import (
    CancelSubmitted,
    Command,
    MigrateFrom,
    NodeCall,
    Placement,
    RouterStreamClosed,
    SubmitRequest,
)
from tests.pair import timeline_laws
from tests.pair.node import STREAM, Asked, Common, Loaded, Node, Size, make_node
from tests.pair.wires import Wires
from tests.support.hardware.devices import compute_as_a_node
from tests.support.network.loopback import LoopbackBackend

TIMEOUT_S = 60.0  # of every wait of a test
SCHEDULER = SchedulerConfig.model_fields
SPEC = frozenset(RequestSpec.__struct_fields__)
NAP_S = 0.02  # between two turns without any work
# No timeout fires unless a test sets its own, and every page is compared.
PATIENT = TransferConfig(
    max_missed_heartbeats=60,
    chunk_timeout_s=60.0,
    release_timeout_s=60.0,
    read_timeout_s=60.0,
    checksum_interval=1,
    canary_tokens=0,
)

# Reading always pays and has no time limit, because its duration on a test machine is arbitrary.
ALWAYS_SHARES = PrefixSharingConfig(max_cost_ratio=1e9, fetch_timeout_s=300.0)


def prompt(length: int, seed: int = 1) -> list[int]:
    """Return a prompt without repetitions. Each seed has another prompt."""
    return [(seed * 31 + 7 * i + i * i) % 250 for i in range(length)]


def random_prompts(vocabulary_size: int, *lengths: int) -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(vocabulary_size) for _ in range(length)] for length in lengths]


def joined(asked: Asked, successor: Asked, num_known: int) -> list[int]:
    """Return the client's tokens. The successor must repeat the tokens that its predecessor sent
    after the first `num_known`."""
    repeated = asked.tokens[num_known:]
    assert successor.tokens[: len(repeated)] == repeated
    return asked.tokens[:num_known] + successor.tokens


class PairRig:
    """Nodes of one model. Every decode node is paired with every prefill node.

    `with` starts the nodes. At the end of `with`, the rig waits until the nodes are idle, and
    checks that no resource is held and that every timeline is consistent, unless the test has
    failed.

    Args:
        prefill, decode: one entry for each node. Without prefill nodes the decode nodes compute
            prompts.
        make_stream: the forward stream of each node.
        migrates: pair decode nodes with each other, too.
        prefix_sharing: pair all nodes with each other. They fetch prefixes that hints name, after
            they have measured a prompt (`learn_what_computing_takes`).
        own_models: each node has its own copy of the weights.
        paired: wait until all nodes are paired.
        settings: fields of SchedulerConfig for all nodes, and of DecodeConfig. By default requests
            do not wait for a lost prefill node. With a small `new_token_ratio`, which is also the
            minimum, a small pool runs out during decoding.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        prefill: Sequence[Size] = (Size(),),
        decode: Sequence[Size] = (Size(),),
        page_size: int = 16,
        context_length: int = 512,
        transfer: TransferConfig = PATIENT,
        make_stream: Callable[[], DeviceStream] = WorkerStream,
        migrates: bool = False,
        prefix_sharing: PrefixSharingConfig | None = None,
        own_models: bool = False,
        paired: bool = True,
        **settings: Any,
    ) -> None:
        compute_as_a_node()
        self._wake = WakeUp()
        settings = {"chunked_prefill_tokens": 64, "reconnect_wait_s": 0.0, **settings}
        if "new_token_ratio" in settings:
            settings.setdefault("min_new_token_ratio", settings["new_token_ratio"])
        scheduler = {name: settings.pop(name) for name in SCHEDULER if name in settings}
        common = Common(
            loaded,
            page_size,
            context_length,
            scheduler,
            transfer,
            make_stream,
            LoopbackBackend(),
            self._wake.wake,
            prefix_sharing or PrefixSharingConfig(enabled=False),
            own_models,
        )
        all_read = prefix_sharing is not None
        migrates |= all_read
        port = ":1" if all_read else ""  # messages name them by host and port
        self._exits = ExitStack()
        self._paired = paired
        self._numbers = itertools.count(1)
        self.wires = Wires()

        def make(
            role: str, instance: int, size: Size, producer: bool, consumer: bool, **fields
        ) -> Node:
            ours, theirs = socket_pair()
            address = f"{role}-{instance % 1000}{port}"
            front = self.wires.add(theirs, address, is_producer=producer, is_consumer=consumer)
            return make_node(common, role, instance, size, front, ours, fields)

        self.prefill = [
            make("prefill", 1000 + i, size, producer=True, consumer=all_read)
            for i, size in enumerate(prefill)
        ]
        self.faults = [common.backend.faults(1000 + i) for i in range(len(prefill))]
        self.decode = [
            make("decode", 2000 + i, size, producer=migrates, consumer=True, **settings)
            for i, size in enumerate(decode)
        ]
        self._num_producers = len(prefill) + (len(decode) - 1 if migrates else 0)
        self._consumers = self.nodes if all_read else self.decode
        self.asked: list[Asked] = []
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self.wires.register(self._poll)

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode]

    # Requests and commands ------------------------------------------------------------------------

    def ask(
        self,
        prompt: Iterable[int],
        max_tokens: int = 8,
        *,
        generated: Sequence[int] = (),
        budget_s: float = 300.0,
        queue_s: float = math.inf,
        node: int = 0,
        prefill: Sequence[int] | None = None,
        request_id: str = "",
        move_from: MigrateFrom | None = None,
        prefix_hints: Sequence[PrefixHint] = (),
        prediction: Sequence[int] = (),
        **fields: Any,
    ) -> Asked:
        """Submit a request to a decode node. By default it is greedy and ignores EOS.

        Args:
            prefill: indices of prefill nodes in order of preference; None: all.
            fields: of RequestSpec and SamplingParams.
        """
        number = next(self._numbers)
        of_spec = {name: fields.pop(name) for name in SPEC if name in fields}
        fields = {"temperature": 0.0, "seed": number, "ignore_eos": True, **fields}
        asked = Asked(
            number,
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens, **fields),
            of_spec,
            ticket=(1 << 63) + number,
            migrates=move_from is not None,
        )
        self.asked.append(asked)
        router = self.decode[node].router
        router.asked[number] = asked
        indices = range(len(self.prefill)) if prefill is None else prefill
        router.inbox.append(
            SubmitRequest(
                stream=STREAM,
                number=number,
                spec=RequestSpec(
                    request_id=request_id or f"request {number}",
                    token_ids=as_bytes([*asked.prompt, *generated]),
                    num_generated=len(generated),
                    sampling=asked.sampling,
                    prediction=as_bytes(prediction),
                    **of_spec,
                ),
                remaining=Remaining(budget_s, queue_s),
                placement=Placement(
                    prefill_addresses=tuple(self.prefill[i].front.address for i in indices),
                    prefix_hints=tuple(prefix_hints),
                    ticket=asked.ticket,
                    move_from=move_from,
                    own_address=self.decode[node].front.address,
                ),
            )
        )
        return asked

    def serve(self, *prompt: Any, **options: Any) -> Asked:
        """Submit a request, and run until all have ended. For the arguments see `ask`."""
        asked = self.ask(*prompt, **options)
        self.run()
        return asked

    def learn_what_computing_takes(self) -> None:
        """Let every node that computes prompts measure the duration of a prompt."""
        for turn in range(9):
            for i in range(len(self.prefill)):
                self.ask([200, turn], 1, prefill=[i])
            if not self.prefill:
                for i in range(len(self.decode)):
                    self.ask([200, turn], 1, node=i)
            self.run()

    def move(self, asked: Asked, source: int, target: int) -> Asked:
        """Submit a request that runs on one decode node to another one, with its current tokens.
        Return the second submission."""
        return self.ask(
            asked.prompt,
            generated=asked.tokens,
            node=target,
            move_from=MigrateFrom(self.decode[source].front.address, asked.ticket),
            **asked.of_spec,
            **msgspec.structs.asdict(asked.sampling),
        )

    def moved_midway(self, asked: Asked, num_tokens: int = 4) -> list[int]:
        """Move a request from the first decode node to the second after this number of tokens,
        and run until all requests have ended. Return the client's tokens. The second submission
        repeats the tokens that the first one sent during the migration."""
        self.until(lambda: len(asked.tokens) >= num_tokens, "it generates")
        num_known = len(asked.tokens)
        successor = self.move(asked, 0, 1)
        self.until_granted(0)
        self.run()
        assert asked.reason is FinishReason.MOVED
        return joined(asked, successor, num_known)

    def cancel(self, asked: Asked, node: int = 0) -> None:
        self.decode[node].router.inbox.append(CancelSubmitted(STREAM, asked.number))

    def router_leaves(self, node: int = 0) -> None:
        self.decode[node].router.inbox.append(RouterStreamClosed(STREAM))

    def command(self, node: Node, command: Command) -> None:
        """Send a command to a node."""
        node.router.inbox.append(NodeCall(next(self._numbers), command))

    # Turns ----------------------------------------------------------------------------------------

    def turn(self, *nodes: Node) -> None:
        """Give a turn to every node, or to these nodes. Sleep briefly if there was no work."""
        self._wake.clear()
        moved = self.wires.pump()
        for node in nodes or self.nodes:
            moved |= node.step()
        moved |= self.wires.pump()
        if not moved:
            self._poll.poll(NAP_S * 1000.0)

    def until(
        self, condition: Callable[[], object], what: str, *nodes: Node, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Give turns to every node, or to these, until `condition` is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                state = "; ".join(node.describe() for node in self.nodes)
                raise AssertionError(f"not within {timeout_s:g} s: {what}. {state}")
            self.turn(*nodes)

    def until_news(self, condition: Callable[[], object], what: str, node: Node) -> None:
        """Give turns until `condition` is true. `node` gets a turn only when its transfer thread
        has input for it, so that its requests do not continue in between."""
        others = [one for one in self.nodes if one is not node]
        while not condition():
            self.until(lambda: node.router.woken.is_set(), what, *others)
            self.turn(node)

    def until_granted(self, source: int) -> None:
        """Run until the decode node gets the Grant of a migration that has just been requested.
        Its requests cannot end earlier, even if the transfer threads are slow."""
        node, before = self.decode[source], self._num_migrations_granted()
        self.until_news(
            lambda: self._num_migrations_granted() > before, "the migration is granted", node
        )
        self.settle()
        self.turn(node)

    def _num_migrations_granted(self) -> int:
        return sum(one.room_tokens > 0 for one in self.wires.said(GrantHandoff))

    def settle(self) -> None:
        """Run until all transfer threads have handled all messages, and the messages that these
        caused. No node gets a turn."""
        moved = True
        while moved:
            for node in self.nodes:
                node.catch_up(TIMEOUT_S)
            moved = self.wires.pump()

    def let_time_pass(self, until: float) -> None:
        """Deliver messages until time.monotonic() is `until`. No node gets a turn."""
        while (left_s := until - time.monotonic()) > 0:
            self.wires.pump()
            self._poll.poll(1000.0 * min(left_s, NAP_S))
            self._wake.clear()

    def run(self, *asked: Asked) -> None:
        """Run until these requests, or all, have ended."""
        awaited = asked or tuple(self.asked)
        self.until(lambda: all(one.ended for one in awaited), "the requests end")

    def until_free(self, *nodes: Node, timeout_s: float = TIMEOUT_S) -> None:
        awaited = nodes or tuple(self.nodes)
        self.until(
            lambda: all(node.holds_nothing for node in awaited),
            "no page is held",
            timeout_s=timeout_s,
        )

    def until_paired(self) -> None:
        self.until(
            lambda: all(
                len(node.control.sources.links) == self._num_producers for node in self._consumers
            ),
            "all nodes are paired",
        )

    def flush(self, *nodes: Node) -> None:
        """Empty the prefix caches of nodes at rest."""
        self.until_free()
        for node in nodes:
            node.role.scheduler.flush_cache()

    # Start and end --------------------------------------------------------------------------------

    def __enter__(self) -> "PairRig":
        self._exits.callback(self.wires.close)
        for node in self.nodes:
            self._exits.callback(node.engine.backend.stream.close)
            self._exits.callback(node.engine.backend.copier.close)
            if node.engine.tiers is not None:
                self._exits.callback(node.engine.tiers.close)
            if node.engine.encoder is not None:
                self._exits.callback(node.engine.encoder.close)
            self._exits.callback(node.engine.weights.close)
            self._exits.callback(node.transfer.stop, TIMEOUT_S)
            node.transfer.start()
        if self._paired:
            self.until_paired()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._exits:
            if kind is None:
                self.run()
                self.until_free()
                for node in self.nodes:
                    node.check_at_rest()
                for one in self.asked:
                    timeline_laws.check(one.ended, len(one.tokens))
