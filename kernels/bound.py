"""Bound launchers: launches of compiled Triton kernels without Triton's own lookup.

In each launch Triton binds the arguments, specialises them, and builds a text key. That is most of
a launch's CPU time. A bound kernel has a dictionary of compiled kernels instead. Its key has
everything on which Triton's specialisation depends: the device, constants, options, dtypes, which
pointers and integers are multiples of 16, and which integers are 1. It therefore finds the kernel
that Triton would find, or leaves the launch to Triton.

Triton settings changed after a kernel's first launch have no effect on it, except launch hooks.
Kernels of the interpreter are not bound.
"""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface


def bound(kernel: Any) -> Any:
    """Decorate a kernel that the host launches, above `triton.jit`, with bound launchers."""
    return BoundKernel(kernel) if isinstance(kernel, JITFunction) else kernel


_Layout: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]


class _Compiled(NamedTuple):
    """A compiled kernel with the arguments of its launcher."""

    run: Callable[..., None]
    function: object
    metadata: object


class BoundKernel(KernelInterface[Any]):  # type: ignore[misc]
    """A Triton kernel, launched in the same way: `kernel[grid](*args, **kwargs)`.

    Attributes:
        kernel: the kernel decorated by `triton.jit`.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        update_wrapper(self, kernel.fn)
        self.kernel = kernel
        self._names = tuple(parameter.name for parameter in kernel.params)
        self._constant = tuple(parameter.is_constexpr for parameter in kernel.params)
        self._unaligned = tuple(parameter.do_not_specialize for parameter in kernel.params)
        self._layouts: dict[tuple[int, tuple[str, ...]], _Layout] = {}
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def run(self, *args: Any, grid: Sequence[int], warmup: bool, **kwargs: Any) -> Any:
        """Launch the kernel on the current stream.

        Args:
            grid: one to three numbers.
            warmup: compile the kernel without a launch.
            kwargs: further parameters of the kernel, and options of the launch.
        """
        if warmup:
            return self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
        named, options = self._layout(len(args), tuple(kwargs))
        values = *args, *[kwargs[name] for name in named]
        active, hooks = driver.active, knobs.runtime
        device = active.get_current_device()
        key = (device, options, *[kwargs[name] for name in options], *self._specialisation(values))
        found = self._compiled.get(key)
        listened = _has_calls(hooks.launch_enter_hook) or _has_calls(hooks.launch_exit_hook)
        if found is None or listened:
            made = self.kernel.run(*args, grid=grid, warmup=False, **kwargs)
            if all(hasattr(made, name) for name in ("run", "function", "packed_metadata")):
                self._compiled[key] = _Compiled(made.run, made.function, made.packed_metadata)
            return made
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        found.run(x, y, z, stream, found.function, found.metadata, None, None, None, *values)
        return None

    def _layout(self, num_args: int, given: tuple[str, ...]) -> _Layout:
        """Return the names of the parameters after the positional ones, and of the options."""
        layout = self._layouts.get((num_args, given))
        if layout is None:
            named = self._names[num_args:]
            layout = named, tuple(name for name in given if name not in named)
            self._layouts[num_args, given] = layout
        return layout

    def _specialisation(self, values: Sequence[Any]) -> list[object]:
        """Return everything on which the compiled code depends. A part has one or two entries. Its
        first entry and the parameter determine how many."""
        parts: list[object] = []
        add = parts.append
        for value, constant, unaligned in zip(values, self._constant, self._unaligned, strict=True):
            kind = type(value)
            if constant:
                add(value)
            elif isinstance(value, Tensor):
                add(value.dtype)
                if not unaligned:
                    add(value.data_ptr() % 16 == 0)
            elif kind is int:
                if value == 1:
                    add(1)
                else:
                    add(_width(value))
                    add(value % 16 == 0)
            elif kind is float:
                add(kind)
            else:
                add(kind)
                add(value)
        return parts


def _width(value: int) -> str:
    """Return the type by which Triton passes an integer."""
    if -(1 << 31) <= value < 1 << 31:
        return "i32"
    return "i64" if value < 1 << 63 else "u64"


def _has_calls(hook: Any) -> bool:
    """Return whether a profiler listens to launches."""
    return hook is not None and bool(getattr(hook, "calls", True))
