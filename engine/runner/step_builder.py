"""Builds steps from the scheduler's decisions and the slot table."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import msgspec
import numpy as np

from engine.adapters.adapters import AdapterManager
from engine.batch.batch import Ints, ScheduleBatch
from engine.batch.forward import BatchBuilder, HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.table import SlotTable
from engine.batch.upload import packed_bytes
from engine.batch.verified_rows import places_of
from engine.models.spec import ModelSpec
from engine.runner.forwards import ForwardSizes
from engine.runner.rehearsal import decode_rehearsal, mixed_rehearsal, verify_rehearsal
from engine.runner.step import NOTHING, SpeculativeStep, Step
from engine.sampling.composition import NOTHING_ASKED, SamplingFeatures, SamplingInputs
from engine.sampling.heads import HeadInputs

# Prompt lengths at which attention splits the keys, with few and with many queries per part.
SHORT_PROMPTS = (2, 20)


class GraphOf(Protocol):
    def __call__(self, rows: HostBatch, *, late: bool, adapted: bool) -> GraphShape | None: ...


class StepBuilder:
    """Builds the steps of an engine from the requests of its table. Engine thread only.

    Args:
        features, adapters: for the requests of the table.
        axial_images: see RowImages.
    """

    def __init__(
        self,
        table: SlotTable,
        features: SamplingFeatures,
        adapters: AdapterManager,
        *,
        axial_images: bool = False,
    ) -> None:
        self._table = table
        self._rows = BatchBuilder(table, axial_images=axial_images)
        self._features = features
        self._adapters = adapters

    def sizes(self, spec: ModelSpec) -> ForwardSizes:
        """Return the sizes of the largest steps of a model."""
        num_slots, max_pages = self._table.num_slots, self._table.page_table[0].size
        sampling = self._features.rehearsals(num_slots, 0, spec)
        num_bytes = packed_bytes(sampling[0].columns()) if sampling else 0
        return ForwardSizes(num_slots, max_pages, num_bytes)

    def build(
        self, batch: ScheduleBatch, graph_of: GraphOf | None = None
    ) -> tuple[Step, SamplingInputs]:
        """Build a step when it is launched, and the sampling of its tokens. All inputs are copied.

        Args:
            graph_of: returns the shape of the captured graph for a step, see Forwards. None: the
                step has no graph.
        """
        if not len(batch.slots):
            return Step(swap_out=batch.swap_out, swap_in=batch.swap_in), NOTHING_ASKED
        rows, sampling = self._rows.build(batch), self._features.build(batch)
        adapters = self._adapters.build(batch)
        speculated = SpeculativeStep.of(batch, self._table)
        if places := sampling.places:
            rows = rows.wanting(places)
        late, adapted = speculated.most > 0, adapters.tokens is not None
        graph = None if graph_of is None else graph_of(rows, late=late, adapted=adapted)
        copies = batch.swap_out, batch.swap_in
        return Step(rows, speculated, adapters, sampling.heads, graph, *copies), sampling

    def note_drafts(self, batch: ScheduleBatch, token_ids: Ints) -> None:
        """Write drafts of the device to the table, after the tokens that are known when the
        previous step has ended.

        Args:
            token_ids: all tokens of the step.
        """
        rows, indices = batch.before_last()
        counts, numbers = batch.ends - batch.starts, indices - batch.starts[rows]
        drafts = token_ids[(np.cumsum(counts) - counts)[rows] + numbers + 1]
        slots = batch.slots[rows]
        self._table.tokens[slots, self._table.known[slots] + numbers] = drafts

    def build_late(self, batch: ScheduleBatch, sampling: SamplingInputs) -> SamplingInputs:
        """Return the part of the sampling that had to wait for the previous step."""
        return SamplingInputs(works=self._features.build_late(batch, sampling.late))

    def rehearsals(self, num_tokens: int, spec: ModelSpec) -> Iterator[tuple[Step, SamplingInputs]]:
        """Yield the largest steps of a model, over dummy tokens, for warmup. They write no page.
        `num_tokens`: see ModelRunner.rehearse."""
        num_slots, tables = self._table.num_slots, self._table.tables
        num_tables, state_pages = tables.num_tables, tables.state_pages
        mixed = mixed_rehearsal(num_tokens, num_slots, num_tables, tables.page_size, state_pages)
        decode = decode_rehearsal(num_slots, num_tables, state_pages=state_pages)
        for sampling in self._features.rehearsals(num_slots, num_tokens, spec):
            yield _rehearsal(mixed, sampling), sampling
        for sampling in self._features.rehearsals(num_slots, 0, spec):
            yield _rehearsal(decode, sampling), sampling
        # A chunk after a long prefix, whose latents are not expanded.
        over_latents = msgspec.structs.replace(mixed, extends=())
        yield Step(over_latents, heads=HeadInputs(chosen=False)), NOTHING_ASKED
        for count in SHORT_PROMPTS:
            short = mixed_rehearsal(count, 1, num_tables, tables.page_size, state_pages)
            yield Step(short, heads=HeadInputs(chosen=False)), NOTHING_ASKED
        if num_slots > 1:  # otherwise there is no slot for a draft
            verify, batch = verify_rehearsal(
                num_slots // 2, num_tables, tables.page_size, state_pages
            )
            speculated = SpeculativeStep.of(batch, self._table)
            if spec.draft is not None:
                places = (places_of(batch),)
                speculated = replace(speculated, places=places, to_guess=(len(batch.slots),))
            for sampling in self._features.rehearsals(batch.num_tokens, 0, spec):
                yield _rehearsal(verify, sampling, speculated), sampling
        adapters = self._adapters.rehearsal(num_tokens)
        if adapters.tokens is not None:
            yield Step(mixed, adapters=adapters, heads=HeadInputs(chosen=False)), NOTHING_ASKED


def _rehearsal(
    rows: HostBatch, sampling: SamplingInputs, speculated: SpeculativeStep = NOTHING
) -> Step:
    if places := sampling.places:
        rows = rows.wanting(places)
    return Step(rows, speculated, heads=sampling.heads)
