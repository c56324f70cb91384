"""The share of a rank: the part of the model's layers, heads and experts that it computes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from common.copy_map import NodeShape
from common.errors import ConfigError
from engine.ranks.expert_exchange import ExpertExchange
from engine.ranks.expert_placement import ExpertPlacement
from engine.ranks.group import Group

NUM_STAGES = 2  # stages of a node with pipeline stages


class ExpertPart(NamedTuple):
    """The experts of a layer that a rank has, and its part of the intermediate size of each."""

    experts: Sequence[int]
    inner: range


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a pipeline stage. The first stages have fewer layers, because the first
    one also has the embedding and the head."""
    return range(num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages)


class Stage:
    """One of two pipeline stages, and its exchange of hidden states with the other. Forward stream
    only.

    Args:
        number: 0: the first layers, with the embedding and the head.
        pipe: group of this rank and the rank with the same heads in the other stage, by stage.
            None: nothing is computed.
    """

    def __init__(self, number: int, pipe: Group | None = None) -> None:
        self.number = number
        self._pipe = pipe
        self._held: Sequence[Tensor] = ()
        # One entry per step whose states have not come back.
        self._experts: deque[Tensor | None] = deque()

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def layers(self, num_layers: int) -> range:
        return stage_layers(num_layers, self.number, NUM_STAGES)

    def hold(self, held: Sequence[Tensor], experts: Tensor | None) -> None:
        """Keep the hidden states of the first stage until `send_held`.

        Args:
            held: the hidden states, and the embeddings of their tokens if the last stage has a
                drafter.
            experts: int32 [n, layers, k], experts of the n tokens whose states come back, with
                zeros for the layers of the other stage. None: experts are not recorded.
        """
        self._held = held
        self._experts.append(experts)

    def send_held(self) -> None:
        """Send the kept tensors to the last stage."""
        for each in self._held:
            self._exchange(each, 0)
        self._held = ()

    def receive(self, x: Tensor) -> Tensor:
        """Return the next tensor from the first stage. It has the shape and dtype of `x`, and may
        be in its memory."""
        return self._exchange(x, 0)

    def send_back(self, x: Tensor, experts: Tensor | None) -> None:
        """Send hidden states and experts (see `hold`) from the last stage back to the first one."""
        self._exchange(x, 1)
        if experts is not None:
            self._exchange(experts, 1)

    def receive_back(self, x: Tensor) -> Tensor | None:
        """Write the hidden states from the last stage into `x`. Called once for each `hold`.

        Returns:
            The experts of all layers, int32 [n, layers, k]. None: they are not recorded.
        """
        x.copy_(self._exchange(x, 1))
        experts = self._experts.popleft()
        return None if experts is None else experts + self._exchange(experts, 1)

    def _exchange(self, x: Tensor, sender: int) -> Tensor:
        assert self._pipe is not None
        return self._pipe.broadcast(x, sender)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A rank's share of a model: one of `size` equal parts of each layer of its pipeline stage.

    Attributes:
        group: the ranks with the other parts of the same layers. None: there are no others, or
            nothing is computed (a survey of the weights).
        whole_experts: whether a rank has some whole experts of each layer, instead of a part of
            every expert.
        stage: None: this rank has a part of every layer.
        exchange: the nodes that share the experts of each layer. Each of them has a full copy of
            all other weights. None: experts are not shared.
        placement: placement of whole experts with replicas or rebalancing. None: each rank has
            consecutive experts.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None
    whole_experts: bool = False
    stage: Stage | None = None
    exchange: ExpertExchange | None = None
    placement: ExpertPlacement | None = None

    @classmethod
    def unconnected(
        cls,
        node_rank: int,
        node: NodeShape,
        *,
        whole_experts: bool,
        placement: ExpertPlacement | None = None,
    ) -> "Share":
        """Return the share of a rank that computes nothing."""
        stage, rank = divmod(node_rank, node.tp)
        in_stage = None if node.pp == 1 else Stage(stage)
        return cls(rank, node.tp, whole_experts=whole_experts, stage=in_stage, placement=placement)

    @property
    def node_rank(self) -> int:
        """Return the number of the rank among all ranks of the node, which are ordered by stage."""
        return self.rank + (0 if self.stage is None else self.stage.number * self.size)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the node."""
        return self.size * self.node.pp

    @property
    def node(self) -> NodeShape:
        return NodeShape(self.size, 1 if self.stage is None else NUM_STAGES)

    @property
    def is_first_stage(self) -> bool:
        return self.stage is None or self.stage.is_first

    @property
    def is_last_stage(self) -> bool:
        return self.stage is None or not self.stage.is_first

    def layers(self, num_layers: int) -> range:
        return range(num_layers) if self.stage is None else self.stage.layers(num_layers)

    def part(self, count: int, name: str) -> range:
        """Return this rank's part of `count` units that are divided evenly.

        Args:
            name: name of the units, for the error.
        Raises:
            ConfigError: the number of ranks does not divide `count`.
        """
        if count % self.size:
            raise ConfigError(
                f"engine.parallel.tp: {self.size} ranks cannot have equal parts of {count} {name}"
            )
        own = count // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def expert_part(self, count: int, inner: int) -> ExpertPart:
        """Return this rank's part of `count` experts. Raise ConfigError as `part` does."""
        if self.exchange is not None:
            return ExpertPart(self.exchange.part(count), range(inner))
        if self.whole_experts:
            return ExpertPart(self.part(count, "experts"), range(inner))
        return ExpertPart(range(count), self.part(inner, "inner numbers of experts"))


WHOLE = Share()
