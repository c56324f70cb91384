"""One operation on one shape: checked against float64, timed, and compared with a ceiling.

An operation that fails its check is reported and not timed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.backends.package import Unavailable
from tools.bench.gpu.clock import Work
from tools.bench.gpu.frame import Row, guarded, note
from tools.bench.gpu.setting import Setting, rate

COLUMNS = {
    "operation": "{op}",
    "shape": "{shape}",
    "us p50": "{us:.1f}",
    "p20": "{us_p20:.1f}",
    "p80": "{us_p80:.1f}",
    "": "{rate:.1f}",
    "unit": "{unit}",
    "share": "{share:.0%}",
    "of": "{ceiling_kind}",
    "error": "{error:.1e}",
    "beside it, us": "{peers_text}",
}


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation. call: runs it once. error: returns its error, at most `tolerance`.

    amount: bytes to move or FLOPs to compute, as `ceiling` counts. peers: other implementations on
    the same data, timed and not checked. prepare: runs before each call, outside its time. more:
    additional fields of the row.
    """

    name: str
    shape: str
    call: Work
    error: Callable[[], float]
    tolerance: float
    ceiling: str  # copy | read | matmul
    amount: float
    peers: Mapping[str, Work] = field(default_factory=dict)
    prepare: Work | None = None
    cold: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)


def measure(setting: Setting, ops: Iterable[Callable[[], Op]], name: str) -> Iterator[Row]:
    """Yield rows of the table `name`, one per operation, and a note for each that is not timed.

    Args:
        ops: functions that each make an operation with its data, which is freed after its row.
    """
    for make in ops:
        yield from guarded(f"an operation of {name}", _made(setting, make, name))


def calls(ops: Iterable[Callable[[], Op]]) -> Iterator[Callable[[], object]]:
    """Yield calls that make each operation and run it once."""
    for make in ops:
        yield partial(_call_once, make)


def _call_once(make: Callable[[], Op]) -> None:
    make().call()


def measure_package(
    setting: Setting, ops: Callable[[Setting], Iterable[Callable[[], Op]]], name: str
) -> Iterator[Row]:
    """Measure the operations of an optional package. Yield a note if it is missing."""
    try:
        opened = ops(setting)
    except Unavailable as error:
        yield note(name, str(error))
    else:
        yield from measure(setting, opened, name)


def _made(setting: Setting, make: Callable[[], Op], name: str) -> Iterator[Row]:
    op = make()
    yield from guarded(f"{op.name} {op.shape}", _timed(setting, op, name))


def _timed(setting: Setting, op: Op, name: str) -> Iterator[Row]:
    error = op.error()
    if not error <= op.tolerance:  # also true for NaN
        yield note(f"{op.name} {op.shape}", f"wrong by {error:.2g}, at most {op.tolerance:g}")
        return
    _do(op.prepare)
    op.call()
    timing = setting.clock.time(op.call, prepare=op.prepare, cold=op.cold)
    peers = {peer: _peer_us(setting, op, work) for peer, work in op.peers.items()}
    yield {
        "table": name,
        "op": op.name,
        "shape": op.shape,
        "us": timing.p50 * 1e6,
        "us_p20": timing.p20 * 1e6,
        "us_p80": timing.p80 * 1e6,
        "runs": timing.runs,
        **rate(op.ceiling, op.amount, timing.p50),
        "share": setting.share(op.ceiling, op.amount, timing.p50),
        "ceiling_kind": op.ceiling,
        "error": error,
        "peers_us": peers,
        "peers_text": ", ".join(f"{peer} {_text(us)}" for peer, us in peers.items()),
        **op.more,
    }


def _peer_us(setting: Setting, op: Op, work: Work) -> float | None:
    """Time a peer. None if it cannot run here."""
    try:
        _do(op.prepare)
        work()
        return setting.clock.time(work, prepare=op.prepare, cold=op.cold).p50 * 1e6
    except (RuntimeError, TypeError, ValueError):
        return None


def _do(work: Work | None) -> None:
    if work is not None:
        work()


def _text(us: float | None) -> str:
    return "cannot" if us is None else f"{us:.1f}"


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return norm(found - exact) / norm(exact), in float64. NaN if any input is."""
    exact = exact.double()
    norm = torch.linalg.vector_norm
    return float(norm(found.double() - exact) / norm(exact))


def unequal_share(found: Tensor, expected: Tensor) -> float:
    """Return the share of unequal elements. NaN is unequal to everything."""
    return int(torch.count_nonzero(found != expected)) / found.numel()


def worst(*errors: float) -> float:
    """Return the largest error, or NaN if one is NaN."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def roundings(dtype: torch.dtype, count: int) -> float:
    """Return the relative error bound of `count` successive roundings to `dtype`."""
    return count * torch.finfo(dtype).eps / 2 + 1e-6
