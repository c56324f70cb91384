"""Part tuning: the attention kernels with other launch parameters than the shipped ones.

Overrides the parameters in the tables of the kernels' modules, one choice after another. Each
choice is checked before it is timed. The best choice per shape is the value for the tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from unittest import mock

from kernels.attention import extend as extend_attention
from kernels.attention import split_plan
from kernels.attention.extend import AttentionTile
from kernels.attention.split_plan import SplitTile
from tools.bench.gpu.frame import Row, Tables, note
from tools.bench.gpu.operations.paged import TOLERANCE, Paged, Rows
from tools.bench.gpu.parts.attention import DRY, LARGE, make_data
from tools.bench.gpu.setting import Setting

TABLES: Tables = {
    "best": {
        "kernel": "{kernel}",
        "shape": "{shape}",
        "best of": "{tried}",
        "is": "{best_text}",
        "us": "{us:.1f}",
        "share": "{share:.0%}",
        "of": "{ceiling_kind}",
        "as shipped, us": "{shipped_us:.1f}",
        "faster by": "{gain:.1%}",
    }
}


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Launch parameters of decode. programs: per multiprocessor. block: keys of a tile."""

    block: int
    warps: int
    stages: int
    programs: int

    @contextmanager
    def chosen(self) -> Iterator[None]:
        tile = SplitTile(self.block, self.warps, self.stages, split_plan.MAX_REGISTERS[2])
        with (
            mock.patch.object(split_plan, "PROGRAMS_PER_MULTIPROCESSOR", self.programs),
            mock.patch.object(split_plan, "_tile", return_value=tile),
        ):
            yield


@dataclass(frozen=True, slots=True)
class ExtendLaunch:
    """Launch parameters of extend. rows: queries times heads per KV head. block: keys per tile."""

    rows: int
    block: int
    warps: int
    stages: int
    slack: int = 8

    @contextmanager
    def chosen(self) -> Iterator[None]:
        tile = AttentionTile(self.rows, self.block, self.warps, self.stages, self.slack)
        with mock.patch.object(extend_attention, "_tile", return_value=tile):
            yield


Launch = DecodeLaunch | ExtendLaunch

DECODE_TILES = (
    (64, 4, 3),
    (64, 4, 2),
    (64, 4, 4),
    (64, 8, 3),
    (64, 2, 3),
    (128, 4, 2),
    (128, 8, 2),
    (128, 8, 3),
    (32, 4, 4),
    (32, 2, 4),
)
DECODES = tuple(DecodeLaunch(*tile, programs) for tile in DECODE_TILES for programs in (2, 1, 3, 4))
EXTENDS = (
    ExtendLaunch(128, 64, 8, 3),
    ExtendLaunch(128, 64, 8, 3, slack=0),
    ExtendLaunch(128, 64, 8, 2),
    ExtendLaunch(128, 64, 4, 3),
    ExtendLaunch(128, 64, 4, 2),
    ExtendLaunch(128, 128, 8, 2),
    ExtendLaunch(128, 128, 8, 2, slack=0),
    ExtendLaunch(128, 128, 8, 3),
    ExtendLaunch(64, 64, 4, 3),
    ExtendLaunch(64, 64, 4, 2),
    ExtendLaunch(64, 128, 4, 2),
    ExtendLaunch(64, 32, 4, 4),
    ExtendLaunch(256, 64, 8, 2),
)
DRY_DECODES = (DecodeLaunch(32, 4, 3, 1), DecodeLaunch(16, 4, 3, 2))
DRY_EXTENDS = (ExtendLaunch(16, 16, 4, 2),)


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    decodes, extends = _launches(setting)
    for batch, context in setting.sized(((64, 8192), (1, 8192), (16, 1024), (1, 1024)), ((2, 40),)):
        rows = Rows.decode([context] * batch)
        yield from _best(setting, "decode", f"{batch} x {context}", rows, decodes)
    for prefix, new in setting.sized(((0, 8192), (8192, 2048)), ((9, 5),)):
        rows = Rows.extend(prefix, new)
        yield from _best(setting, "extend", f"{new} after {prefix}", rows, extends)


def compile_calls(setting: Setting) -> Iterator[Callable[[], object]]:
    """Yield calls that need the same kernels as `measure`."""
    decodes, extends = _launches(setting)
    once: Mapping[object, DecodeLaunch] = {(d.block, d.warps, d.stages): d for d in decodes}
    for launch in once.values():
        yield partial(_call_once, setting, launch, Rows.decode([64]))
    for extend in extends:
        yield partial(_call_once, setting, extend, Rows.extend(64, 1024))


def _launches(setting: Setting) -> tuple[Sequence[DecodeLaunch], Sequence[ExtendLaunch]]:
    return setting.sized((DECODES, EXTENDS), (DRY_DECODES, DRY_EXTENDS))


def _call_once(setting: Setting, launch: Launch, rows: Rows) -> None:
    data = make_data(setting, rows, setting.sized(LARGE, DRY))
    with launch.chosen():
        data.attention()()


def _best(
    setting: Setting, kernel: str, shape: str, rows: Rows, launches: Sequence[Launch]
) -> Iterator[Row]:
    """Yield a row per launch, for the record only, and one about the best of them."""
    data = make_data(setting, rows, setting.sized(LARGE, DRY))
    ceiling, amount = ("read", data.bytes) if kernel == "decode" else ("matmul", data.flops)
    shipped_s = _seconds(setting, data)
    seconds: dict[Launch, float] = {}
    for launch in launches:
        try:
            with launch.chosen():
                seconds[launch] = _seconds(setting, data)
        except Exception as error:  # noqa: BLE001  too much shared memory, mostly: try the next
            yield note(f"{kernel} {shape} {_text(launch)}", f"{type(error).__name__}: {error}")
            continue
        tried = {"kernel": kernel, "shape": shape, **asdict(launch)}
        yield {"table": "tried", **tried, "us": seconds[launch] * 1e6}
    if not seconds:
        return
    best = min(seconds, key=lambda launch: seconds[launch])
    yield {
        "table": "best",
        "kernel": kernel,
        "shape": shape,
        "tried": len(seconds),
        "best": asdict(best),
        "best_text": _text(best),
        "us": seconds[best] * 1e6,
        "share": setting.share(ceiling, amount, seconds[best]),
        "ceiling_kind": ceiling,
        "shipped_us": shipped_s * 1e6,
        "gain": shipped_s / seconds[best] - 1.0,
    }


def _seconds(setting: Setting, data: Paged) -> float:
    """Time the attention. Raises ArithmeticError if its output is wrong."""
    error = data.error()
    if not error <= TOLERANCE:
        raise ArithmeticError(f"wrong by {error:.2g}")
    work = data.attention()
    work()
    return setting.clock.time(work).p50


def _text(launch: Launch) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(launch).items())
