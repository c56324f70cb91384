"""CUDA graphs without a GPU.

`RepeatRecorder` executes the work again in each replay. `TapeRecorder` records the operations and
kernels of a forward with all their arguments, and replays them on the same memory.

Like a graph, a tape runs no Python code of the model, and repeats the launches with the numbers
that the host had at the capture. So everything that depends on a step's data must be in memory.
Kernels run in Triton's interpreter.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kernels import device

_UNFILLED = ("empty", "new_empty", "empty_like", "empty_strided")


class Repeated:
    """A graph on a CPU: executes the work again, and copies its output to the same memory."""

    def __init__(
        self, work: Callable[[], Tensor], output: Tensor, replays: list[tuple[int, str]]
    ) -> None:
        self._work, self._output, self._replays = work, output, replays

    def replay(self) -> None:
        self._replays.append((len(self._output), threading.current_thread().name))
        self._output.copy_(self._work())


class RepeatRecorder:
    """Records graphs that execute their work again.

    Attributes:
        replays: number of output rows and thread of each replay.
        choices: the same for graphs that choose tokens.
    """

    def __init__(self) -> None:
        self.replays: list[tuple[int, str]] = []
        self.choices: list[tuple[int, str]] = []

    def __call__(
        self, work: Callable[[], Tensor], *, apart: bool = False
    ) -> tuple[Repeated, Tensor]:
        output = work().clone()
        return Repeated(work, output, self.choices if apart else self.replays), output


class Tape(TorchDispatchMode):
    """A captured sequence of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self._entries: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        with self:  # in inference mode composite operations arrive whole
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        result = func(*args, **kwargs)
        if func._schema.name.removeprefix("aten::") in _UNFILLED:
            return result
        given = {_storage(leaf) for leaf in _tensors((args, kwargs))}
        made = [_storage(leaf) not in given for leaf in _tensors(result)]

        def again() -> None:
            results = zip(_tensors(result), _tensors(func(*args, **kwargs)), made, strict=True)
            for before, now, is_new in results:
                if is_new:
                    before.copy_(now)

        if any(made) or func._schema.is_mutable:
            self._entries.append(again)
        return result

    def launch(self, launch: Callable[[], object]) -> None:
        """Launch a kernel, and record it."""
        with torch.utils._python_dispatch._disable_current_modes():
            launch()
        self._entries.append(launch)

    def replay(self) -> None:
        self.num_replays += 1
        for again in self._entries:
            again()


class TapeRecorder:
    """Records tapes.

    Attributes:
        tapes: tapes of all captures, except those that choose tokens.
        choices: tapes that choose tokens.
    """

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.choices: list[Tape] = []
        self._local = threading.local()

    def __call__(self, work: Callable[[], Tensor], *, apart: bool = False) -> tuple[Tape, Tensor]:
        tape = self.new_tape(apart=apart)
        self._local.tape = tape
        try:
            with tape:
                output = work()
        finally:
            self._local.tape = None
        (self.choices if apart else self.tapes).append(tape)
        return tape, output

    def new_tape(self, *, apart: bool) -> Tape:
        return Tape()

    @contextmanager
    def interpreting(self) -> Iterator[None]:
        """Use the Triton kernels of operations inside, which this recorder sees."""
        run = InterpretedFunction.run

        def noted(function: Any, *args: Any, **kwargs: Any) -> None:
            tape = getattr(self._local, "tape", None)
            if tape is None:
                run(function, *args, **kwargs)
            else:
                tape.launch(lambda: run(function, *args, **kwargs))

        with (
            mock.patch.object(device, "uses_triton", return_value=True),
            mock.patch.object(device, "num_multiprocessors", return_value=1),  # few Triton programs
            mock.patch.object(InterpretedFunction, "run", noted),
        ):
            yield


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
