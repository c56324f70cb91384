"""All row features together: choice of the features that a step needs, and sampling from logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import ForwardMode, Ints, ScheduleBatch
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn
from engine.models.spec import ModelSpec
from engine.sampling.feature import FeatureInput, FeatureState, Samples, SamplingFeature
from engine.sampling.heads import SAMPLES, HeadInputs, HiddenStates
from engine.sampling.logit_edits import BadWordsFilter, LogitBias, Penalties
from engine.sampling.logprobs import (
    EXPERTS_OF,
    HIDDEN_OF,
    PromptLogprobs,
    PromptWork,
    SampledLogprobs,
)
from engine.sampling.pooling import (
    Pooled,
    PoolingFeature,
    PoolingWork,
    nothing_sampled,
)
from engine.sampling.token_masks import AllowedTokens, GrammarMatcher, ThinkingBudget
from kernels.sampling.sample import SamplingColumns, sample

_MAX_SEED = 2**64 - 1


class SamplerFeature:
    """Sampling parameters of requests that are not greedy. Engine thread only.

    A greedy request has temperature 0 and no other parameter.
    """

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.uint64)

    def acquire(self, slot: int, request: Request) -> bool:
        """Assign a slot to the request. Return whether its tokens are random."""
        sampling = request.sampling
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed & _MAX_SEED
        return not sampling.greedy

    def build(self, slots: NDArray[np.intp], positions: Ints) -> Sequence[HostColumn]:
        """Return the parameters of all rows of a step: SamplingColumns in host memory.

        Args:
            positions: index in its request of the token that each row will sample.
        """
        return (
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            self._seed[slots].view(np.int32).reshape(-1, 2),
            positions,
        )

    def rehearsal(self, num_rows: int) -> Sequence[HostColumn]:
        """Return parameters of dummy rows with every filter enabled, for warmup."""
        nothing = np.zeros(num_rows, np.int32)
        return (
            np.ones(num_rows, np.float32),
            np.full(num_rows, 40, np.int32),
            np.full(num_rows, 0.9, np.float32),
            np.full(num_rows, 0.01, np.float32),
            np.zeros((num_rows, 2), np.int32),
            nothing,
        )


_NUM_COLUMNS = len(fields(SamplingColumns))
# Bits of a slot: its tokens are random, one of its features waits, one waits in steps with drafts,
# its prompt needs logprobs, it is pooled. Then one bit per feature.
_SAMPLED, _WAITING, _FOLLOWING, _PROMPT, _POOLED, _FIRST = 1, 2, 4, 8, 16, 32


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The tokens of a step and all other outputs of sampling, on the device.

    Attributes:
        tokens: int32 [samples of the step], as `sample` returns them.
        logprobs, prompt: columns of RowLogprobRequest, of samples and of prompts.
        pooled: vectors of the rows that generate no token.
    """

    tokens: Tensor
    logprobs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt: Mapping[str, Tensor] = field(default_factory=dict)
    pooled: Pooled = ()


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """The sampling work of one step.

    Attributes:
        sampler: SamplingColumns in host memory. Empty: every row is greedy.
        works: in the order in which they change the logits.
        late: bits of features that must know more tokens first, see `build_late`. 0: none.
        prompt: logprobs of prompt tokens.
        pooling: rows that generate no token.
    """

    sampler: Sequence[HostColumn] = ()
    works: tuple[FeatureInput, ...] = ()
    late: int = 0
    prompt: PromptWork | None = None
    pooling: PoolingWork | None = None

    @property
    def places(self) -> list[HostColumn]:
        """Additional tokens whose hidden states are needed, the ones of `prompt` first."""
        return [work.places.numpy() for work in (self.prompt, self.pooling) if work is not None]

    @property
    def heads(self) -> HeadInputs:
        """Inputs of the model's head."""
        if self.prompt is None and self.pooling is None:
            return SAMPLES
        num_prompt = 0 if self.prompt is None else len(self.prompt.places)
        if self.pooling is None:
            return HeadInputs(num_prompt=num_prompt)
        scored = torch.from_numpy(self.pooling.scored)
        return HeadInputs(not self.pooling.only, num_prompt, scored)

    def columns(self) -> Sequence[HostColumn]:
        """Return everything to upload: the columns of `prompt` and `pooling`, `sampler`, and the
        columns of `works`."""
        before: list[Tensor] = [] if self.prompt is None else [self.prompt.targets]
        if self.pooling is not None:
            before += self.pooling.tensors()
        after = [tensor for work in self.works for tensor in work.tensors()]
        return (*_host(before), *self.sampler, *_host(after))

    def parameters(self) -> Sequence[HostColumn] | None:
        """Return `sampler`. None: the choice depends on more than sampling parameters."""
        if self.works or self.late or self.prompt is not None or self.pooling is not None:
            return None
        return self.sampler

    def draws(
        self, sent: Sequence[Tensor], early: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that draws drafts from logits of samples, given their places.

        A draft is drawn with the same noise as the token that will be sampled at its index. Two
        similar distributions then mostly give the same token.

        Args:
            sent, early: see `_choose`.
        """
        columns = self._columns(sent, early)
        return lambda logits, places: sample(logits, columns and columns.at(places))

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        """Choose the tokens of a step. On the forward stream.

        Args:
            sent: `columns()`, on the device.
        """
        logits = states.logits()
        logprobs: dict[str, Tensor] = {}
        prompt: Mapping[str, Tensor] = {}
        if states.inputs.chosen:
            tokens, logprobs = self._choose(next(logits), sent, states.early)
            if (places := logprobs.pop(HIDDEN_OF, None)) is not None:
                logprobs["hidden"] = states.samples[places]
            if (places := logprobs.pop(EXPERTS_OF, None)) is not None:
                logprobs["experts"] = states.experts(places)
        else:
            tokens = nothing_sampled(states.samples)
        if self.prompt is not None:
            prompt, sent = self.prompt.run(logits, sent[0], states), sent[1:]
        pooled = () if self.pooling is None else self.pooling.run(states, logits, sent)
        return SampledTokens(tokens, logprobs, prompt, pooled)

    def _columns(self, sent: Sequence[Tensor], early: Tensor | None) -> SamplingColumns | None:
        """Return `sampler` on the device. None: every row is greedy."""
        if not self.sampler:
            return None
        first = self._first_column
        columns = SamplingColumns(*sent[first : first + _NUM_COLUMNS])
        if early is None:
            return columns
        return replace(columns, positions=columns.positions - early)

    @property
    def _first_column(self) -> int:
        of_prompt = 0 if self.prompt is None else 1
        return of_prompt + (0 if self.pooling is None else len(self.pooling.tensors()))

    def _choose(
        self, logits: Tensor, sent: Sequence[Tensor], early: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows' tokens, int32 [n], as `sample` returns them, and the features' outputs.
        On the forward stream.

        Args:
            logits: [n, vocabulary], may be overwritten. The rows' own logits come first, then the
                logits before drafts.
            sent: `columns()`, on the device.
            early: see HiddenStates.
        """
        columns = self._columns(sent, early)
        if not self.works:
            return sample(logits, columns), {}
        taken = self._first_column + len(self.sampler)
        logits = logits.float()
        parts = []
        for work in self.works:
            part = sent[taken : taken + len(work.tensors())]
            taken += len(part)
            parts.append(part)
            work.before(part, logits)
        tokens = sample(logits, columns)
        logprobs: dict[str, Tensor] = {}
        for work, part in zip(self.works, parts, strict=True):
            logprobs |= work.after(part, tokens)
        return tokens, logprobs


def _host(tensors: Sequence[Tensor]) -> list[HostColumn]:
    return [tensor.numpy() for tensor in tensors]


NOTHING_ASKED = SamplingInputs()


class SamplingFeatures:
    """The features of one engine. Engine thread only.

    Args:
        features: in the order in which they change the logits. If one waits in a step, all later
            ones wait, too.
    """

    def __init__(
        self, table: SlotTable, sampling: SamplerFeature, features: Sequence[SamplingFeature]
    ) -> None:
        self._table = table
        self._sampling = sampling
        self._prompts = PromptLogprobs(table)
        self._pooled = PoolingFeature(table)
        self._features = tuple(
            (np.uint32(_FIRST << place), feature) for place, feature in enumerate(features)
        )
        self._wanted = np.zeros(table.num_slots, np.uint32)  # one bit per feature
        self._waits = np.zeros(table.num_slots, np.uint32)  # the features that wait
        # The features that wait in steps with drafts.
        self._follows = np.zeros(table.num_slots, np.uint32)
        table.add_listener(self._acquire)

    def build(self, batch: ScheduleBatch) -> SamplingInputs:
        """Return the sampling work of a step when it is launched. Unused features cost nothing,
        because all bits are read at once."""
        slots = batch.slots.astype(np.intp)  # numpy indexes five times faster with np.intp
        wanted = self._wanted[slots]
        if not np.count_nonzero(wanted):
            return NOTHING_ASKED
        any_wanted = int(np.bitwise_or.reduce(wanted))
        columns = self._columns(batch, slots) if any_wanted & _SAMPLED else ()
        if any_wanted == _SAMPLED:
            return SamplingInputs(columns)
        wanted = self._of_those_that_sample(batch, wanted)
        late = self._late(batch, wanted, any_wanted)
        prompt = self._prompts.build(batch) if any_wanted & _PROMPT else None
        pooling = None
        if any_wanted & _POOLED:
            pooling = self._pooled.build(batch, 0 if prompt is None else len(prompt.places))
        works = self._works(wanted, ~late, _samples(batch))
        return SamplingInputs(columns, works, late, prompt, pooling)

    def _columns(self, batch: ScheduleBatch, slots: NDArray[np.intp]) -> Sequence[HostColumn]:
        rows, positions = _positions(batch)
        return self._sampling.build(slots[rows], positions)

    def build_late(self, batch: ScheduleBatch, late: int) -> tuple[FeatureInput, ...]:
        """Return the remaining work of a step, once all tokens of its rows are known.

        Args:
            late: `late` of the SamplingInputs that `build` returned.
        """
        wanted = self._of_those_that_sample(batch, self._wanted[batch.slots])
        samples = _samples(batch)
        known = self._table.known[samples.slots] + samples.drafts
        exact = replace(samples, positions=np.minimum(samples.positions, known))
        return self._works(wanted, late, exact)

    def rehearsals(
        self, num_rows: int, num_tokens: int, spec: ModelSpec
    ) -> Sequence[SamplingInputs]:
        """Return work on dummy rows for warmup.

        Together, the results launch every kernel and need at least as much memory as any result of
        `build`.

        Args:
            num_tokens: tokens of a prompt in the step. 0: there is no prompt.
        """
        pooling = self._pooled.rehearsal(num_rows, num_tokens, spec)
        pooled = [SamplingInputs(pooling=pooling)] if num_tokens else []
        if not spec.generates:
            return pooled
        columns = self._sampling.rehearsal(num_rows)
        works = tuple(feature.rehearsal(num_rows) for _, feature in self._features)
        prompt = self._prompts.rehearsal(num_tokens) if num_tokens else None
        return [
            SamplingInputs(columns, works, prompt=prompt),
            SamplingInputs(columns),
            SamplingInputs(works=works),
            NOTHING_ASKED,
            *pooled,
        ]

    def _works(
        self, wanted: NDArray[np.uint32], which: int, samples: Samples
    ) -> tuple[FeatureInput, ...]:
        """Return the work of the features with bits in `which`. `wanted`: bits of each row."""
        wanted = wanted[samples.rows]
        works = []
        for bit, feature in self._features:
            if int(bit) & which and len(places := (wanted & bit).nonzero()[0]):
                works.append(feature.build(samples.at(places)))
        return tuple(works)

    def _of_those_that_sample(
        self, batch: ScheduleBatch, wanted: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        if batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY):
            return wanted
        return np.where(batch.samples, wanted, np.uint32(0))

    def _late(self, batch: ScheduleBatch, wanted: NDArray[np.uint32], any_wanted: int) -> int:
        """Return the bits of the features whose work is built after the previous step: the first
        one that must wait, and all later ones."""
        has_drafts = batch.mode is ForwardMode.VERIFY or batch.early is not None
        if not any_wanted & (_FOLLOWING if has_drafts else _WAITING):
            return 0
        waits = self._follows if has_drafts else self._waits
        unknown = (wanted != 0) & (self._table.known[batch.slots] < batch.ends)
        bits = int(np.bitwise_or.reduce(waits[batch.slots[unknown]], initial=0))
        return -(bits & -bits)

    def _acquire(self, slot: int, request: Request) -> None:
        """Assign a slot to the request in each feature that it, or the slot's previous request,
        uses."""
        given, previous = request.sampling.non_default, int(self._wanted[slot])
        wanted = _SAMPLED if self._sampling.acquire(slot, request) else 0
        waits = follows = 0
        for bit, feature in self._features:
            if given.isdisjoint(feature.parameters) and not previous & int(bit):
                continue
            part = feature.acquire(slot, request)
            wanted |= int(bit) if part else 0
            waits |= int(bit) if part is FeatureState.WAITS else 0
            follows |= int(bit) if part >= FeatureState.TAKES else 0
        if "prompt_logprobs" in given or previous & _PROMPT:
            wanted |= _PROMPT if self._prompts.acquire(slot, request) else 0
        if request.pooling is not None or previous & _POOLED:
            wanted = _POOLED if self._pooled.acquire(slot, request) else wanted
        self._wanted[slot] = wanted | (_WAITING if waits else 0) | (_FOLLOWING if follows else 0)
        self._waits[slot], self._follows[slot] = waits, follows


def _positions(batch: ScheduleBatch) -> tuple[NDArray[np.intp] | slice, Ints]:
    """Return the row of each sample of a step, and the index of its token in the request."""
    if batch.mode is not ForwardMode.VERIFY:
        return slice(None), batch.ends
    rows, indices = batch.before_last()
    own = np.arange(len(batch.slots))
    return np.concatenate((own, rows)), np.concatenate((batch.ends, indices + 1))


def _samples(batch: ScheduleBatch) -> Samples:
    """Return the samples of a step. Their `rows` are rows of the step."""
    which, positions = _positions(batch)
    rows = np.arange(len(batch.slots))[which]
    drafts = np.zeros_like(positions)
    if batch.mode is ForwardMode.VERIFY:
        drafts = positions - batch.starts[rows] - 1
    return Samples(rows, batch.slots.astype(np.intp)[rows], positions, drafts)


def every_feature(
    table: SlotTable,
    vocabulary_size: int,
    eos_token_ids: Sequence[int],
    device: torch.device,
) -> SamplingFeatures:
    num_slots = table.num_slots
    return SamplingFeatures(
        table,
        SamplerFeature(num_slots),
        (
            SampledLogprobs(num_slots),
            LogitBias(num_slots, eos_token_ids),
            Penalties(table, vocabulary_size, device),
            AllowedTokens(num_slots, vocabulary_size),
            BadWordsFilter(table),
            GrammarMatcher(table, vocabulary_size),
            ThinkingBudget(table),
        ),
    )
