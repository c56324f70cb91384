"""Drives a ModelRunner like a scheduler, one step at a time, with or without overlap."""

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from common.config import LoraConfig
from common.requests.images import Image
from common.requests.namespace import NO_ADAPTER
from common.requests.sampling import SamplingParams
from engine.adapters.adapters import (
    AdapterManager,
    adapter_directory,
    bank_of,
    load_all,
    no_adapters,
)
from engine.adapters.library import AdapterCache
from engine.backend import TorchBackend
from engine.batch.batch import ForwardMode, Ints, PageCopies, ScheduleBatch
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV
from engine.models import Model
from engine.ranks import WHOLE, Share
from engine.runner.runner import LaunchedStep, make_runner
from engine.runner.stream import made_on
from engine.sampling.choice_graphs import Recorder
from engine.sampling.composition import every_feature
from engine.sizing import EngineShape, part_of
from tests.support.models.checkpoints import VOCABULARY_SIZE
from tests.support.specs import make_request

GREEDY = SamplingParams(max_tokens=10_000, seed=0, temperature=0.0)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens of the test checkpoints' vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY_SIZE, (length,), generator=generator).tolist()


class Steps:
    """A runner over a pool of NaN, with its slots and pages.

    With overlap, the result of a step is read after the next one is launched, so that decode rows
    are launched before the CPU knows their input.
    """

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 16,
        num_slots: int = 4,
        context_length: int = 256,
        overlap: bool = True,
        recorder: Recorder | None = None,
        kept_in: torch.dtype | None = None,
        lora: LoraConfig | None = None,
        share: Share = WHOLE,
    ) -> None:
        whole = KVLayout.of(model.spec.layers, page_size, model.dtype, kept_in, model.spec.draft)
        layout = part_of(whole, share)
        num_pages = num_slots * layout.tables.pages_to_compute(context_length)
        shape = EngineShape(
            tables=layout.tables,
            context_length=context_length,
            num_pages=num_pages,
            host_pages=num_pages,
            device=model.device,
            dtype=model.dtype,
            layout=layout,
            whole=whole,
            prefill_tokens=context_length,
        )
        backend = TorchBackend.open(shape)
        self.pool, self.host_pool, self.stream = backend.pool, backend.host_pool, backend.stream
        made_on(self.stream, lambda: self.pool.tensor.fill_(0xFF))  # NaN
        self.table = SlotTable(
            num_slots, context_length, page_size, layout.windows, layout.state_pages, page_size - 1
        )
        self.features = every_feature(
            self.table, model.spec.vocabulary_size, model.spec.eos_token_ids, model.device
        )
        self.adapters = (
            no_adapters(self.table) if lora is None else _adapters(lora, model, self.table)
        )
        beside = self.table, self.features, self.adapters
        self.runner = make_runner(model, self.pool, self.host_pool, *beside, self.stream, recorder)
        self._backend = backend
        self.overlap = overlap
        self.in_flight: LaunchedStep | None = None
        self._free = random.Random(0).sample(range(num_pages), num_pages)
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}

    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_prompt: int | None = None,
        adapter: str = "",
        images: Sequence[Image] = (),
    ) -> int:
        """Give a request a slot and pages for its whole context. Returns the slot.

        Args:
            adapter: name of a loaded adapter, or "".
        """
        request = make_request(
            tokens,
            key=next(self._numbers),
            num_generated=0 if num_prompt is None else len(tokens) - num_prompt,
            sampling=sampling,
            adapter=self.adapters.library.names()[adapter] if adapter else NO_ADAPTER,
            images=tuple(images),
        )
        self.adapters.hold(request)
        assert self.adapters.take_slot(request)
        slot = self.table.acquire(request)
        assert slot is not None
        shape = self.table.page_table[slot].shape
        state_pages = self.table.tables.state_pages
        pages = [self._free.pop(0) for _ in range(math.prod(shape) + state_pages)]
        tables = np.array(pages[state_pages:], np.int32).reshape(shape)
        self.table.set_pages(slot, PageHolding(tables, np.array(pages[:state_pages], np.int32)))
        self._requests[slot] = request
        return slot

    def remove(self, slot: int) -> list[int]:
        """End the request and return its tokens. Its pages are reused without clearing."""
        tokens: list[int] = self.table.tokens_of(slot).tolist()
        self._free[:0] = self.table.pages_of(slot).tolist()
        self.table.release(self._requests[slot])
        self.adapters.release(self._requests[slot].key)
        return tokens

    def launch(
        self,
        rows: Sequence[tuple[int, int, int]],
        *,
        samples: Sequence[bool] | None = None,
        swap_out: PageCopies | None = None,
        swap_in: PageCopies | None = None,
        verify: bool = False,
    ) -> None:
        """Launch one step over (slot, start, end) rows, and read the result of the previous step.

        Args:
            verify: the tokens of a row after its first one are drafts, from the token table. If
                no row has any, it is a decode step.
        """
        slots, starts, ends = np.array(rows, np.int32).T
        early = np.maximum(starts - self.table.known[slots], 0)
        mode = ForwardMode.MIXED if samples is not None else _mode(starts, ends)
        batch = ScheduleBatch(
            step=next(self._numbers),
            mode=ForwardMode.VERIFY if verify and (ends - starts > 1).any() else mode,
            slots=slots.copy(),
            starts=starts.copy(),
            ends=ends.copy(),
            samples=np.ones(len(rows), np.bool_) if samples is None else np.array(samples),
            swap_out=swap_out,
            swap_in=swap_in,
            early=early if early.any() else None,
        )
        self.table.hold(batch.slots, batch.step)
        launched = self.runner.launch(batch)
        self.table.length[batch.slots[batch.samples]] += ends - starts if verify else 1
        before, self.in_flight = self.in_flight, launched
        if before is not None:
            self._finish(before)
        launched.sample()
        if not self.overlap:
            self.settle()

    def prefill(self, slot: int, *, chunk: int = 10_000, start: int = 0) -> None:
        """Compute all tokens of the slot from `start` on, in chunks. The last chunk samples."""
        end = int(self.table.known[slot])
        for begin in range(start, end, chunk):
            until = min(begin + chunk, end)
            self.launch([(slot, begin, until)], samples=[until == end])

    def decode(self, *slots: int) -> None:
        """Decode one more token for each slot."""
        lengths = [int(self.table.length[slot]) for slot in slots]
        self.launch(
            [(slot, length - 1, length) for slot, length in zip(slots, lengths, strict=True)]
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        sampling: Sequence[SamplingParams] = (),
        *,
        chunk: int = 10_000,
        adapters: Sequence[str] = (),
    ) -> list[list[int]]:
        """Prefill all requests, then decode them together. Return their new tokens.

        Args:
            sampling, adapters: by request. Empty: greedy, and no adapter.
        """
        slots = [
            self.add(prompt, own, adapter=adapter)
            for prompt, own, adapter in zip(
                prompts,
                sampling or [GREEDY] * len(prompts),
                adapters or [""] * len(prompts),
                strict=True,
            )
        ]
        for slot in slots:
            self.prefill(slot, chunk=chunk)
        for _ in range(num_tokens - 1):
            self.decode(*slots)
        self.settle()
        return [
            self.remove(slot)[len(prompt) :] for slot, prompt in zip(slots, prompts, strict=True)
        ]

    def capture_all(self) -> None:
        """Capture graphs of all shapes."""
        for shape in self.runner.graph_shapes:
            self.runner.capture(shape)

    def settle(self) -> None:
        """Read the result of the step in flight."""
        if self.in_flight is not None:
            launched, self.in_flight = self.in_flight, None
            self._finish(launched)

    def close(self) -> None:
        self.stream.close()
        self._backend.copier.close()

    def _finish(self, launched: LaunchedStep) -> None:
        result, batch = launched.result(), launched.batch
        tokens = result.tokens
        if result.runs is not None:
            self.table.length[batch.slots] -= batch.ends - batch.starts - result.runs.counts
            for row, slot in enumerate(batch.slots):
                run = result.runs.tokens[row, : result.runs.counts[row]]
                known = int(self.table.known[slot])
                self.table.tokens[slot, known : known + len(run)] = run
                self.table.known[slot] += len(run)
            self.table.drop_step(batch.step)
            return
        slots = batch.slots[batch.samples]
        self.table.tokens[slots, self.table.known[slots]] = tokens[batch.samples]
        self.table.known[slots] += 1
        self.table.drop_step(batch.step)


def _adapters(config: LoraConfig, model: Model, table: SlotTable) -> AdapterManager:
    library = AdapterCache(config.max_cpu_loras, config.max_cpu_lora_bytes)
    load_all(config, adapter_directory(config, model), library)
    return AdapterManager(library, bank_of(config, model, free=1 << 40), table)


def _mode(starts: Ints, ends: Ints) -> ForwardMode:
    return ForwardMode.DECODE if (ends - starts == 1).all() else ForwardMode.MIXED


@contextlib.contextmanager
def make_all(model: Model, **options: Any) -> Iterator[Callable[..., Steps]]:
    """Yield a function that makes Steps with these options and its own. Close them at the end."""
    with contextlib.ExitStack() as exits:

        def make(**own: Any) -> Steps:
            steps = Steps(**{"model": model, **options, **own})
            exits.callback(steps.close)
            return steps

        yield make


class Scripted:
    """A model whose logits are what a function of its batch says. It keeps no KV."""

    def __init__(self, logits):
        self.spec = SimpleNamespace(
            vocabulary_size=8,
            eos_token_ids=(7,),
            layers=(PagedKV(1, 2),),
            draft=None,
            generates=True,
            num_labels=0,
            axial_images=False,
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._logits = logits

    def forward(self, inputs, pool, future_tokens, adapted=None, late=None):
        return self._logits(inputs, future_tokens)

    def logits(self, hidden):
        return hidden


class Recorder:
    """A model that records its logits."""

    def __init__(self, model):
        self.spec, self.device, self.dtype = model.spec, model.device, model.dtype
        self.drafter = model.drafter
        self.seen = []
        self._model = model

    def forward(self, batch, pool, future_tokens, adapted=None, late=None):
        return self._model.forward(batch, pool, future_tokens, adapted, late)

    def logits(self, hidden):
        logits = self._model.logits(hidden)
        self.seen.append(logits.clone())
        return logits


def logits_after(
    model: Model,
    tokens: Sequence[int],
    ends: Sequence[int] = (),
    *,
    images: Sequence[Image] = (),
    **options: Any,
) -> torch.Tensor:
    """Compute a prompt in chunks. Return the logits after each chunk, [chunks, vocabulary].

    Args:
        ends: ends of the chunks. Empty: one chunk.
        options: arguments of Steps.
    """
    recorder = Recorder(model)
    steps = Steps(recorder, overlap=False, **options)
    slot, ends = steps.add(tokens, images=images), [*ends] or [len(tokens)]
    for start, end in zip([0, *ends], ends, strict=False):
        steps.launch([(slot, start, end)])
    steps.close()
    return torch.cat(recorder.seen)
