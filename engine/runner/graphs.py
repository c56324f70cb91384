"""CUDA graphs of steps: one graph per shape, captured once and replayed. Forwards uses them.

A graph contains the layers of the model and its last norm. The head and sampling have graphs of
their own (ChoiceGraphs), for requests without features that change logits or report more than
tokens. Graphs of layers therefore need no memory for logits, except those that draw drafts.

All graphs read their inputs from one block of memory. Parameters of sampling come first, then the
tensors whose sizes follow from the shape. Each of these tensors therefore has the same address in
every step of a shape. If a step is smaller than its shape, padding rows of the capture fill the
rest.

Steps with drafts, and steps after them, run by graphs alone, too: the first graph moves rows that
begin early, the graphs of a drafter draw drafts (DraftGraphs), and the graph that chooses tokens
then verifies them. State updates after verification are the last graph. This work changes nothing
in rows that do not begin early or have no drafts.
"""

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from common.errors import EngineFault
from common.logs import kv
from engine.adapters.adapters import AdapterBank, AdapterStep, most_tiles
from engine.batch.batch import Ints
from engine.batch.forward import NUM_VARYING, ForwardBatch, HostBatch
from engine.batch.graph_shapes import GraphShape, graph_shapes, max_tokens
from engine.batch.upload import (
    ONLY_PADDING,
    HostColumn,
    InputBlock,
    PaddedBlock,
    divided,
    packed_bytes,
    upload,
)
from engine.models.blocks.layer import LateStates
from engine.runner.draft_graphs import DraftGraphs, GraphDrafter, GraphDrafts
from engine.runner.host_waits import Uncapturable, check_capturable
from engine.runner.rehearsal import padding
from engine.runner.step import SpeculativeStep, row_inputs
from engine.sampling.choice_graphs import (
    NUM_PARAMETERS,
    ChoiceGraphs,
    Choose,
    Graph,
    Recorder,
    Verification,
    Verify,
    choice_padding,
)
from kernels.adapters.low_rank import TokensBySlot
from kernels.sampling.early_rows import EarlyRows, RowInputs

log = logging.getLogger(__name__)

_DRAFT_BYTES = 512  # columns of a row in SpeculativeStep, at most

_Kind: TypeAlias = tuple[bool, bool, bool]  # is_ragged, late and adapted of a shape

# Runs the model. Has the arguments of Model.forward without the pool and the future tokens.
Forward: TypeAlias = Callable[[ForwardBatch, AdapterStep | None, LateStates | None], Tensor]

# Moves early rows. The tensor has the positions of samples, see move_early_rows.
Move: TypeAlias = Callable[[EarlyRows, RowInputs, Tensor], None]

_GREEDY = (ONLY_PADDING,) * NUM_PARAMETERS
_NO_EARLY = (ONLY_PADDING,) * 2


class CudaRecorder:
    """Records CUDA graphs. They share two memory pools: graphs recorded with `apart`, and others.
    A graph may overwrite what an earlier captured one of its pool has left, or a later captured one
    will leave."""

    def __init__(self) -> None:
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(2)]

    def __call__(self, work: Callable[[], Tensor], *, apart: bool = False) -> tuple[Graph, Tensor]:
        work()
        check_capturable(work, torch.device("cuda"))
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture.
        with torch.cuda.graph(
            graph,
            pool=self._pools[apart],
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            output = work()
        return graph, output


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of the steps that graphs compute.

    Attributes:
        max_rows: rows of a decode step. A step with drafts has at most as many tokens.
        num_tables: page tables of every row.
        max_pages: pages of one row, in all tables together.
        hidden_size: numbers per hidden state.
        max_drafts: drafts of one row. 0: graphs move no rows and verify no drafts.
        state_pages: pages of one row for recurrent states, in addition.
        late: whether steps with drafts have shapes of their own, see GraphShape.
        beside_bytes: bytes for sampling tensors that are uploaded together with a step's inputs.
    """

    max_rows: int
    num_tables: int
    max_pages: int
    hidden_size: int
    max_drafts: int
    state_pages: int = 0
    late: bool = False
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GraphModel:
    """The part of a model that graphs contain."""

    forward: Forward
    choose: Choose
    move: Move
    verify: Verify
    device: torch.device
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class _Inputs:
    """The inputs of a graph.

    Attributes:
        batch, adapted: a step of this shape and its adapters, on the device.
        early: the rows that the graph moves, of the same step.
        fixed: tensors of `batch` whose sizes follow from the shape.
        padding: padding of the choice of tokens, of `fixed`, of early rows and of adapters, in host
            memory.
    """

    shape: GraphShape
    batch: ForwardBatch
    adapted: AdapterStep | None
    early: EarlyRows
    fixed: Sequence[Tensor]
    padding: PaddedBlock
    # Where padding rows end, by the numbers of rows and tokens that a step of this shape may have.
    _padding_ends: dict[tuple[int, int], Ints] = field(default_factory=dict)

    def columns(self, batch: HostBatch) -> list[HostColumn]:
        """Return the columns of a step for `fixed`, without padding. Empty if equal to the
        padding."""
        starts = sampled = ONLY_PADDING
        if self.shape.is_ragged:
            starts, sampled = self._padded_starts(batch), batch.sampled
        states = (ONLY_PADDING,) * 4
        if batch.state_reads.shape[1]:
            states = batch.state_reads, batch.state_writes, batch.state_marks, batch.state_kept
        each = batch.positions, batch.lengths, starts, sampled
        return [batch.token_ids, *batch.locations, *batch.page_starts, *each, *states]

    def _padded_starts(self, batch: HostBatch) -> Ints:
        key = len(batch.lengths), len(batch.token_ids)
        ends = self._padding_ends.get(key)
        if ends is None:
            ends = self._padding_ends[key] = self.shape.padding_ends(*key)
        return np.concatenate((batch.query_starts, ends))


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A captured graph.

    Attributes:
        hidden: hidden states of the latest replay, one per token of a ragged shape, otherwise one
            per row.
        drafts: graphs of the drafter over the same inputs, which also move early rows. None: the
            device draws no drafts in steps of this shape.
        update: the state updates after verification, which read results of `graph`. None: there are
            none.
    """

    inputs: _Inputs
    graph: Graph
    hidden: Tensor
    drafts: DraftGraphs | None
    update: Graph | None


class StepGraphs:
    """Captures and replays the graphs of steps. For use on the forward stream only.

    Args:
        bank: the LoRA adapters that steps may use.
        drafter: the drafter of the model. None: the model has none on the device.
    """

    def __init__(
        self,
        model: GraphModel,
        recorder: Recorder,
        bank: AdapterBank,
        sizes: GraphSizes,
        drafter: GraphDrafter | None = None,
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._bank = bank
        self._sizes = sizes
        self._device = device = model.device
        self._drafter = drafter
        self._choice_padding = choice_padding(sizes.max_rows, sizes.max_rows)
        self._shapes = graph_shapes(sizes.max_rows, late=sizes.late, adapted=bank.num_slots > 0)
        self._graphs: dict[GraphShape, _Recorded] = {}
        self._captured = defaultdict[_Kind, list[GraphShape]](list)  # ascending
        self._impossible: set[_Kind] = set()
        # Every graph reads its inputs here. The inputs of every step are copied here.
        num_bytes = max(sum(map(packed_bytes, self._columns(shape))) for shape in self._shapes)
        num_bytes += sizes.beside_bytes + _DRAFT_BYTES * max_tokens(sizes.max_rows)
        self._block = InputBlock(num_bytes, device)
        self._hidden = torch.zeros(
            max_tokens(sizes.max_rows), sizes.hidden_size, dtype=model.dtype, device=device
        )
        self._choice = self._made_choice(model)

    def _made_choice(self, model: GraphModel) -> ChoiceGraphs:
        memory, sizes = self._block.memory, self._sizes
        inputs, verification = upload(self._choice_padding, self._device, memory), None
        if sizes.max_drafts:
            # The next column of every shape has the token ids.
            token_ids = memory[packed_bytes(self._choice_padding) :].view(torch.int32)
            size = max_tokens(sizes.max_rows), 2 + 1 + sizes.max_drafts
            verified = torch.zeros(size, dtype=torch.int32, device=self._device)
            verification = Verification(model.verify, token_ids, verified)
        return ChoiceGraphs(model.choose, self._recorder, self._hidden, inputs, verification)

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Shapes of the graphs to capture, in descending order. The largest comes first, so that
        the others reuse its memory."""
        return self._shapes[::-1]

    def capture(self, shape: GraphShape, *, choice: bool) -> None:
        """Capture the graph of a shape over a batch of padding. For the shape of a decode step,
        also capture the choice of its tokens.

        If the model waits for the device in a forward of this kind, the kind gets no graphs. This
        is logged once.

        Args:
            choice: see Forwards.capture.
        Raises:
            OutOfMemoryError: there is not enough memory for the graph.
            EngineFault: the capture failed. The allocator of torch does not recover from that, so
                nothing else may run in this process.
        """
        if _kind(shape) in self._impossible:
            return
        try:
            recorded = self._recorded(shape, choice=choice)
            if choice and shape.chooses:
                self._capture_choice(shape.rows)
        except Uncapturable as error:
            self._give_up(shape, error)
            return
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise EngineFault(
                f"the CUDA graph of a step of {shape.tokens} tokens in {shape.rows} rows could not "
                f"be captured ({reason}), and torch cannot continue after that; start with "
                "--no-engine.cuda-graphs"
            ) from error
        self._graphs[shape] = recorded
        insort(self._captured[_kind(shape)], shape)

    def _capture_choice(self, num_rows: int) -> None:
        """Capture the choice of the tokens of `num_rows` rows, unless the head waits for the
        device."""
        try:
            self._choice.capture(num_rows)
        except Uncapturable as error:
            self._give_up_choice(error)

    def _give_up_choice(self, error: Uncapturable) -> None:
        self._choice.give_up()
        log.warning("sampling runs without CUDA graphs %s", kv(operations=error))

    def _recorded(self, shape: GraphShape, *, choice: bool) -> _Recorded:
        inputs, model, drafter = self._inputs(shape), self._model, self._drafter
        batch, drafts, update = inputs.batch, None, None
        late: LateStates | None = None
        if shape.late and drafter is not None:
            drafts = self._recorded_drafts(drafter, inputs, choice=choice)

        def work() -> Tensor:
            nonlocal late
            if drafts is None:
                self._move(inputs)
            late = LateStates() if shape.late else None
            hidden = model.forward(batch, inputs.adapted, late)
            return self._hidden[: len(hidden)].copy_(hidden)

        graph, hidden = self._recorder(work)
        # The updates keep results of the layers in memory until they are captured.
        if late is not None and late.has_updates:
            update, _ = self._recorder(lambda: self._update(batch, late))
        return _Recorded(inputs, graph, hidden, drafts, update)

    def _move(self, inputs: _Inputs) -> None:
        """Move early rows. The positions of their samples follow."""
        if self._sizes.max_drafts:
            positions = self._choice.parameters.positions
            self._model.move(inputs.early, row_inputs(inputs.batch), positions)

    def _recorded_drafts(
        self, drafter: GraphDrafter, inputs: _Inputs, *, choice: bool
    ) -> DraftGraphs:
        """Capture the graphs of the drafter for a shape. The first one also moves early rows."""
        batch, num_rows, parameters = inputs.batch, self._choice.num_rows, self._choice.parameters
        drafter.allocate(batch, max_tokens(self._sizes.max_rows))

        def begin() -> Tensor:
            self._move(inputs)
            return drafter.begin(batch, num_rows)

        first, _ = self._recorder(begin)
        advance, _ = self._recorder(lambda: drafter.advance(batch, num_rows))
        draw = None
        if choice and self._choice.possible:
            try:
                draw, _ = self._recorder(lambda: drafter.draw(batch, num_rows, parameters))
            except Uncapturable as error:
                self._give_up_choice(error)
        return DraftGraphs(first, advance, draw)

    def _update(self, batch: ForwardBatch, late: LateStates | None) -> Tensor:
        """Update the states of a shape's rows, after the verification of drafts. Return the number
        of new tokens of each row."""
        assert late is not None
        num_rows, num_tokens = batch.num_rows, len(batch.token_ids)
        counts = self._choice.verified(num_rows)[:, 0].contiguous()
        if late.has_layers:
            late.write(batch.states_after(counts), num_tokens)
        rows = torch.arange(num_rows, device=counts.device)
        places = batch.query_starts[:-1] + counts - 1
        # The last token belongs to padding, for which nothing is stored.
        places = torch.where(rows < self._choice.num_rows, places, num_tokens - 1)
        late.continue_from(places.long())
        return counts

    def _inputs(self, shape: GraphShape) -> _Inputs:
        """Return the inputs of a graph on the device, filled with padding."""
        columns = self._columns(shape)
        host = [column for part in columns for column in part]
        sent = upload(host, self._device, self._block.memory)
        _, fixed, (most, guesses), adapters, varying = divided(sent, columns)
        adapted = self._bank.adapted(TokensBySlot(*adapters)) if adapters else None
        batch = ForwardBatch.of([*fixed, *varying], shape.num_decodes, (), ())
        of_rows = batch.query_starts, self._choice.slots, self._choice.num_rows
        early, padding = EarlyRows(most, guesses, *of_rows), PaddedBlock(host[:-NUM_VARYING])
        return _Inputs(shape, batch, adapted, early, fixed, padding)

    def _columns(self, shape: GraphShape) -> Sequence[Sequence[HostColumn]]:
        """Return the inputs of a graph in host memory, filled with padding: of the choice of
        tokens, of rows, of early rows, of adapters, and the columns without padding."""
        sizes = self._sizes
        num_rows = min(shape.rows, sizes.max_rows)
        num_pages = num_rows * sizes.max_pages
        rows = padding(shape, sizes.num_tables, num_pages, sizes.state_pages).columns()
        width = 2 * sizes.max_drafts if shape.is_ragged else 0  # other rows have no drafts
        early = [np.zeros(num_rows, np.int32), np.zeros((num_rows, width), np.int32)]
        adapters: list[HostColumn] = []
        if shape.adapted:
            num_tiles = most_tiles(shape.tokens, self._bank.num_slots)
            adapters = [np.zeros(shape.tokens, np.int32), np.zeros((num_tiles, 3), np.int32)]
        fixed, varying = rows[:-NUM_VARYING], rows[-NUM_VARYING:]
        return self._choice_padding, fixed, early, adapters, varying

    def _give_up(self, shape: GraphShape, error: Uncapturable) -> None:
        """Remove all graphs of the shape's kind."""
        self._impossible.add(_kind(shape))
        for captured in self._captured.pop(_kind(shape), []):
            del self._graphs[captured]
        log.warning(
            "steps of a kind run without CUDA graphs %s",
            kv(
                decode=not shape.is_ragged,
                drafts=shape.late,
                adapters=shape.adapted,
                operations=error,
            ),
        )

    def shape_for(self, batch: HostBatch, *, late: bool, adapted: bool) -> GraphShape | None:
        """Return the shape of the smallest graph for this step, or None if no graph fits.

        Args:
            late: whether rows have drafts.
            adapted: whether tokens have adapters.
        """
        if batch.seen:  # a graph has no images or embeddings
            return None
        shapes = self._captured[not batch.is_decode, late and self._sizes.late, adapted]
        for place in range(bisect_left(shapes, (len(batch.token_ids),)), len(shapes)):
            if shapes[place].fits(batch):
                return shapes[place]
        return None

    def upload(
        self,
        shape: GraphShape,
        batch: HostBatch,
        adapters: Sequence[HostColumn],
        beside: Sequence[HostColumn],
    ) -> tuple[ForwardBatch, list[Tensor]]:
        """Copy a step whose tokens no graph chooses to the inputs of a graph. Return the step
        without padding and the columns of `beside`, on the device. Both are valid until the next
        `upload`.

        The returned tensors are the inputs of the graph, so a change of them in place has an effect
        on `replay`. The graph moves no rows.

        Args:
            adapters: see `send`.
            beside: columns to upload in the same copy.
        """
        own, inputs = batch.columns(), self._graphs[shape].inputs
        num_rows = np.array((len(batch.slots),), np.int32)
        choice = ONLY_PADDING, *_GREEDY, ONLY_PADDING, num_rows
        sent = inputs.padding.upload(
            [*choice, *inputs.columns(batch), *_NO_EARLY, *adapters],
            [*own[-NUM_VARYING:], *beside],
            self._block,
        )
        views = [
            padded if padded.shape == column.shape else padded[: len(column)]
            for padded, column in zip(inputs.fixed, own, strict=False)
        ]
        views += sent[:NUM_VARYING]
        return ForwardBatch.of(views, batch.num_decodes, (), ()), sent[NUM_VARYING:]

    def drafts(self, shape: GraphShape, batch: ForwardBatch) -> GraphDrafts:
        """Return the forwards of the drafter before a step of a shape with drafts.

        Args:
            batch: result of `upload`.
        """
        graphs, drafter = self._graphs[shape].drafts, self._drafter
        assert graphs is not None and drafter is not None
        graphs.begin.replay()
        return GraphDrafts(batch.token_ids, graphs, drafter.vectors)

    def chooses(self, num_tokens: int) -> bool:
        """Return whether there is a graph for the choice of this many tokens."""
        return self._choice.fits(num_tokens)

    def send(
        self,
        shape: GraphShape,
        batch: HostBatch,
        adapters: Sequence[HostColumn],
        parameters: Sequence[HostColumn],
        speculated: SpeculativeStep,
    ) -> None:
        """Copy a step to the inputs of a graph, in one copy to the device.

        Args:
            adapters: adapters of an adapted shape.
            parameters: see TokenSampling.
        """
        inputs, verified, num_rows = self._graphs[shape].inputs, ONLY_PADDING, ONLY_PADDING
        if speculated.most:
            verified = batch.query_starts
        if speculated.most or speculated.early:
            num_rows = np.array((len(batch.slots),), np.int32)
        choice = batch.slots, *(parameters or _GREEDY), verified, num_rows
        early = speculated.early or _NO_EARLY
        columns = [*choice, *inputs.columns(batch), *early, *adapters]
        inputs.padding.send(columns, (batch.page_ids,), self._block)

    def run(self, shape: GraphShape, num_tokens: int, num_drafts: int) -> Tensor:
        """Compute the step of the latest `send`, choose its tokens and verify drafts, by graphs
        alone.

        The last token of each row is stored for the next step.

        Args:
            num_tokens: number of samples of the step.
            num_drafts: maximum number of drafts of a row that the device draws.
        Returns:
            int32 [num_tokens], valid until the next step.
        """
        recorded = self._graphs[shape]
        if recorded.drafts is not None:
            recorded.drafts.replay(num_drafts)
        recorded.graph.replay()
        tokens = self._choice.replay(num_tokens)
        if recorded.update is not None:
            recorded.update.replay()
        return tokens

    def verified(self, num_rows: int) -> Tensor:
        """Return the result of VerifiedRows.verify after `run`, valid until the next step."""
        return self._choice.verified(num_rows)

    def replay(self, shape: GraphShape, num_tokens: int) -> Tensor:
        """Replay the layers for the step of the latest `upload`. Return the hidden states of the
        first tokens in `sampled`, valid until the next `replay`."""
        recorded = self._graphs[shape]
        recorded.graph.replay()
        return recorded.hidden[:num_tokens]

    def update(self, shape: GraphShape, counts: Tensor) -> None:
        """Update states after `replay` and the verification of drafts.

        Args:
            counts: int32 [num_rows], number of new tokens of each row.
        """
        update = self._graphs[shape].update
        if update is not None:
            self._choice.verified(len(counts))[:, 0].copy_(counts)
            update.replay()


def _kind(shape: GraphShape) -> _Kind:
    return shape.is_ragged, shape.late, shape.adapted
