"""Times kernels against their floors.

An `Op` is one operation on one shape: the call, the exact result, and the floor. The floor is the
least work of any implementation: bytes or FLOPs. At the ceiling of the machine, which the same run
measures, this work takes a certain time. The `share` of a row is that time divided by the measured
one. `measure_ops` first compares the result with the exact one, and does not time wrong operations.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.backends.package import Unavailable
from tools.bench.gpu.process import Row, guarded, note
from tools.bench.gpu.setting import Floor, Setting, Timing, Work, nothing

Compared: TypeAlias = Iterable[tuple[Tensor, Tensor]]  # found and exact numbers


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation on one shape, with its data.

    Attributes:
        compare: given the result of `call`, returns pairs of found and exact numbers.
        tolerance: largest `error` of a pair.
        peers: other implementations on the same data, timed and not checked.
        prepare: runs before each call, outside its time.
        cold: flush the cache before each run.
    """

    name: str
    shape: str
    call: Callable[[], Any]
    floor: Floor
    compare: Callable[[Any], Compared]
    tolerance: float = 0.0
    peers: Mapping[str, Work] = field(default_factory=dict)
    prepare: Work = nothing
    cold: bool = True

    def timed(self, setting: Setting) -> tuple[Timing, float]:
        """Return the time of a call, and the error. Raises ArithmeticError if it is too large."""
        self.prepare()
        error = worst(*(difference(found, exact) for found, exact in self.compare(self.call())))
        if not error <= self.tolerance:  # also true for NaN
            raise ArithmeticError(f"wrong by {error:.2g}, at most {self.tolerance:g}")
        return self._time(setting, self.call), error

    def peer_us(self, setting: Setting, peer: Work) -> float | None:
        """Time a peer. None if it cannot run here."""
        try:
            self.prepare()
            peer()
            return self._time(setting, peer).p50 * 1e6
        except (RuntimeError, TypeError, ValueError):
            return None

    def _time(self, setting: Setting, work: Work) -> Timing:
        return setting.clock.time(work, prepare=self.prepare, cold=self.cold)


Make: TypeAlias = Callable[[], Op]  # makes an operation with its data


def measure_ops(setting: Setting, makes: Iterable[Make], table: str) -> Iterator[Row]:
    """Yield a row per operation, and a note for each that fails. Data is freed after its row."""
    for make in makes:
        yield from guarded(f"an operation of {table}", _rows(setting, make, table))


def measure_package(
    setting: Setting, makes: Callable[[Setting], Iterable[Make]], name: str
) -> Iterator[Row]:
    """Measure the operations of an optional package. Yield a note if it is missing."""
    try:
        opened = makes(setting)
    except Unavailable as error:
        yield note(name, str(error))
    else:
        yield from measure_ops(setting, opened, name)


def calls(makes: Iterable[Make]) -> Iterator[Work]:
    """Yield calls that make each operation and run it once, which compiles its kernels."""
    return (partial(_call_once, make) for make in makes)


def _call_once(make: Make) -> None:
    make().call()


def _rows(setting: Setting, make: Make, table: str) -> Iterator[Row]:
    op = make()
    yield from guarded(f"{op.name} {op.shape}", _row(setting, op, table))


def _row(setting: Setting, op: Op, table: str) -> Iterator[Row]:
    timing, error = op.timed(setting)
    yield {
        "table": table,
        "op": op.name,
        "shape": op.shape,
        "us": timing.p50 * 1e6,
        "us_p20": timing.p20 * 1e6,
        "us_p80": timing.p80 * 1e6,
        "runs": timing.runs,
        **op.floor.rate(timing.p50),
        "share": setting.share(op.floor, timing.p50),
        "ceiling_kind": op.floor.ceiling,
        "error": error,
        "peers_us": {name: op.peer_us(setting, peer) for name, peer in op.peers.items()},
    }


def difference(found: Tensor, exact: Tensor) -> float:
    """Return norm(found - exact) / norm(exact) in float64, or the share of unequal integers.

    NaN if any input is.
    """
    if not exact.is_floating_point():
        return int(torch.count_nonzero(found != exact)) / found.numel()
    exact = exact.double()
    norm = torch.linalg.vector_norm
    return float(norm(found.double() - exact) / norm(exact))


def worst(*errors: float) -> float:
    """Return the largest error, or NaN if one is NaN."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def roundings(dtype: torch.dtype, count: int) -> float:
    """Return the relative error bound of `count` successive roundings to `dtype`."""
    return count * torch.finfo(dtype).eps / 2 + 1e-6
