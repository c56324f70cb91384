"""Checks that all accesses of a GPU's streams to the same memory are ordered, without running them.

Device tensors are torch's meta tensors, which have shapes and no bytes. Each operation and each
kernel is recorded with the bytes that it accesses, and with a vector clock of the current stream:
everything that precedes it, by stream and on the host. Streams are ordered only by events and
waits, and the host only by waiting. Two accesses to the same bytes, at least one of them a write,
are a problem if neither precedes the other.

Host memory counts too, if a copy runs on a stream. Kernels are assumed to write all their
arguments. The checker does not know pages: kernels on different pages of one pool access the same
bytes here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kernels import device

GPU = torch.device("meta")
_HOST = "the host"
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_UNFILLED = ("empty", "new_empty", "empty_like", "empty_strided")

Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [start, end) of a storage, accessed by `who` at its own time `at`."""

    start: int
    end: int
    writes: bool
    who: str
    at: int
    what: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An enqueued operation, as far as a captured graph would depend on it."""

    name: str
    arguments: tuple[object, ...]  # tensors by place, shape and strides, numbers by value
    touched: tuple[tuple[Tensor, bool], ...] = field(compare=False)  # and whether it is written


class FakeStream:
    """torch.cuda.Stream."""

    def __init__(self, order: "StreamOrder", device: object = None, priority: int = 0) -> None:
        self._order = order
        self.name = order.name_stream()

    def wait_stream(self, other: "FakeStream") -> None:
        self._order.learn(self.name, self._order.clocks[other.name])

    def wait_event(self, event: "FakeEvent") -> None:
        self._order.learn(self.name, event.clock)

    def synchronize(self) -> None:
        self._order.synchronised(self._order.clocks[self.name])


class FakeEvent:
    """torch.cuda.Event."""

    def __init__(self, order: "StreamOrder", blocking: bool = False) -> None:
        self._order = order
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        name = (stream or self._order.current).name
        self.clock = dict(self._order.clocks[name])

    def synchronize(self) -> None:
        self._order.synchronised(self.clock)


class StreamOrder(TorchDispatchMode):
    """All work of one engine inside `with`. For one thread.

    problems: accesses without an order, a line each.

    hazards: operations that a captured graph, or a forward that must not wait, cannot contain: a
    wait of the host, an upload, an allocation of pinned memory. Cleared by the caller.

    operations: all enqueued operations. Cleared by the caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.problems: list[str] = []
        self.hazards: list[str] = []
        self.operations: list[Operation] = []
        self._num_streams = 0
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        # storages, which must not be freed, or another one would get the address
        self._alive: dict[int, object] = {}
        self._captured: list[Operation] | None = None  # of the running capture
        self.current = FakeStream(self)

    def name_stream(self) -> str:
        self._num_streams += 1
        return f"stream {self._num_streams - 1}" if self._num_streams > 1 else "the default stream"

    def learn(self, who: str, clock: Clock) -> None:
        mine = self.clocks[who]
        for other, at in clock.items():
            mine[other] = max(mine.get(other, 0), at)

    def synchronised(self, clock: Clock) -> None:
        """Record that the host has waited for that time."""
        self.hazards.append("the host waits")
        self.learn(_HOST, clock)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """torch.cuda.stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record(
        self, work: Callable[[], Tensor], *, apart: bool = False
    ) -> tuple["FakeGraph", Tensor]:
        """A Recorder of graphs."""
        work()
        self._captured = captured = []
        try:
            output = work()
        finally:
            self._captured = None
        return FakeGraph(self, captured), output

    def enqueue(self, operation: Operation) -> None:
        """Enqueue on the current stream."""
        self.operations.append(operation)
        if self._captured is not None:
            self._captured.append(operation)
            return
        self.learn(self.current.name, self.clocks[_HOST])
        self._touch(self.current.name, operation.name, operation.touched)

    def host_touches(self, tensor: Tensor, what: str) -> None:
        """Record that the host reads or writes it now."""
        self._touch(_HOST, what, ((tensor, True),))

    def launch(self, function: Any, *arguments: Any, grid: Any, **options: Any) -> None:
        """InterpretedFunction.run."""
        given = [*arguments, *options.values()]
        tensors = tuple((value, True) for value in given if isinstance(value, Tensor))
        described = tuple(_described(value) for value in (*given, grid))
        self.enqueue(Operation(function.fn.__name__, described, tensors))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with self:
            if (parts := function.decompose(*args, **kwargs)) is not NotImplemented:
                return parts
        name = function._schema.name.removeprefix("aten::")
        if kwargs.pop("pin_memory", False):
            self.hazards.append(f"{name} of pinned memory")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = self._run(function, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        touched = _touched(function, args, given, made)
        if any(tensor.device == GPU for tensor in (*given, *made)):
            if touched:
                described = tuple(_described(leaf) for leaf in tree_leaves((args, kwargs)))
                self.enqueue(Operation(name, described, touched))
                self._note_copy(function, args, kwargs, given, made)
        else:
            self._touch(_HOST, name, touched)
        return result

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Handle a copy out of a meta tensor, which gives zeros."""
        source = args[1] if function is _COPIES[0] else args[0] if function is _COPIES[1] else None
        if source is not None and source.device == GPU:
            if function is _COPIES[0] and args[0].device != GPU:
                return args[0].zero_()
            target = kwargs.get("device", GPU)
            if function is _COPIES[1] and torch.device(target) != GPU:
                dtype = kwargs.get("dtype") or source.dtype
                return torch.zeros(source.shape, dtype=dtype)
        return function(*args, **kwargs)

    def _note_copy(
        self, function: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        devices = {tensor.device for tensor in (*given, *made) if tensor.ndim}
        if function not in _COPIES or len(devices) == 1:
            return
        self.hazards.append("a copy between host and device")
        waits = not (kwargs.get("non_blocking") or (function is _COPIES[0] and args[2:] == (True,)))
        if waits:
            self.synchronised(self.clocks[self.current.name])

    def _touch(self, who: str, what: str, touched: Iterable[tuple[Tensor, bool]]) -> None:
        clock = self.clocks[who]
        clock[who] = clock.get(who, 0) + 1
        for tensor, writes in touched:
            if tensor.numel():
                self._touch_one(who, what, tensor, writes)

    def _touch_one(self, who: str, what: str, tensor: Tensor, writes: bool) -> None:
        storage = tensor.untyped_storage()
        self._alive.setdefault(storage._cdata, storage)
        start = tensor.storage_offset() * tensor.itemsize
        spans = zip(tensor.shape, tensor.stride(), strict=True)
        end = start + (sum((size - 1) * stride for size, stride in spans) + 1) * tensor.itemsize
        clock = self.clocks[who]
        mine = Access(start, end, writes, who, clock[who], what)
        kept = []
        for other in self._accesses[storage._cdata]:
            overlaps = other.start < end and start < other.end
            if overlaps and (writes or other.writes) and clock.get(other.who, 0) < other.at:
                verb = "written" if other.writes else "read"
                self.problems.append(
                    f"{what} on {who}: {tuple(tensor.shape)} was {verb} by {other.what} on "
                    f"{other.who}, and nothing says that this has been done"
                )
            # An access after this one is also after everything that precedes this one.
            stands_for = writes or (who == other.who and not other.writes)
            if not (stands_for and start <= other.start and other.end <= end):
                kept.append(other)
        self._accesses[storage._cdata] = [*kept, mine]


class FakeGraph:
    """A captured sequence of operations that can be enqueued again."""

    def __init__(self, order: StreamOrder, operations: list[Operation]) -> None:
        self._order = order
        self._operations = operations

    def replay(self) -> None:
        for operation in self._operations:
            self._order.enqueue(operation)


@contextmanager
def followed() -> Iterator[StreamOrder]:
    """Follow torch.cuda's streams and events inside, and record kernels instead of running them."""
    order = StreamOrder()
    numpy, tensor_of = Tensor.numpy, torch.tensor

    def made(data: Any, **kwargs: Any) -> Tensor:
        # torch copies the numbers itself, without a visible operation.
        if torch.device(kwargs.get("device") or "cpu") == GPU:
            order.hazards.append("a tensor on the device made of numbers")
        return tensor_of(data, **kwargs)

    def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        order.host_touches(tensor, "numpy")
        return numpy(tensor, *args, **kwargs)

    def current(device: object = None) -> FakeStream:
        return order.current

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        order.launch(function, *args, grid=grid, **options)

    with (
        mock.patch.object(torch.cuda, "Stream", partial(FakeStream, order)),
        mock.patch.object(torch.cuda, "Event", partial(FakeEvent, order)),
        mock.patch.object(torch.cuda, "stream", order.on),
        mock.patch.object(torch.cuda, "current_stream", current),
        mock.patch.object(device, "uses_triton", return_value=True),
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.object(Tensor, "numpy", seen),
        mock.patch.object(torch, "tensor", made),
        order,
    ):
        yield order


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
    return value if isinstance(value, int | float | tuple) else str(value)


def _touched(
    function: Any, args: Any, given: list[Tensor], made: list[Tensor]
) -> tuple[tuple[Tensor, bool], ...]:
    """Return the tensors that the function reads and writes. Views and pure allocations touch
    none."""
    schema = function._schema
    written = {
        id(value)
        for argument, value in zip(schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(value)
    }
    aliases = {tensor.untyped_storage()._cdata for tensor in given}
    fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in aliases]
    if not fresh and not written:
        return ()
    if schema.name.removeprefix("aten::") in _UNFILLED:
        return ()
    return (
        *((tensor, id(tensor) in written) for tensor in given),
        *((tensor, True) for tensor in fresh),
    )
