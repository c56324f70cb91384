"""One step as every rank computes it: all inputs of a forward, without its requests."""

import msgspec

from engine.adapters.adapters import NO_ADAPTERS, AdapterBatch
from engine.batch.batch import PageCopies
from engine.batch.forward import HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.runner.speculated import NOTHING, SpeculativeStep
from engine.sampling.heads import SAMPLES, HeadInputs


class Step(msgspec.Struct, frozen=True, eq=False):
    """A step in host memory. Immutable.

    Attributes:
        rows: None: the step has only copies.
        graph: shape of the captured graph that computes the forward. None: no graph does.
        swap_out: before the forward, pool -> host.
        swap_in: before the forward and after swap_out, host -> pool.
    """

    rows: HostBatch | None = None
    speculated: SpeculativeStep = NOTHING
    adapters: AdapterBatch = NO_ADAPTERS
    heads: HeadInputs = SAMPLES
    graph: GraphShape | None = None
    swap_out: PageCopies | None = None
    swap_in: PageCopies | None = None
