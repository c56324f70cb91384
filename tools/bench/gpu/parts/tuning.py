"""Part tuning: the attention kernels with other launch parameters than the shipped ones.

Overrides the parameters in the tables of the kernels' modules, one choice after another. Each
choice is checked before it is timed. The best choice per shape is the value for the tables.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from unittest import mock

from kernels.attention import extend as extend_attention
from kernels.attention import split_plan
from kernels.attention.extend import AttentionTile
from kernels.attention.split_plan import SplitTile
from tools.bench.gpu.operations.paged import DRY, LARGE, Paged, Rows, pages_of
from tools.bench.gpu.process import TRIED, Row, note
from tools.bench.gpu.setting import Setting, Work


@dataclass(frozen=True, slots=True)
class SplitLaunch:
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

    def chosen(self) -> AbstractContextManager[object]:
        tile = AttentionTile(self.rows, self.block, self.warps, self.stages, self.slack)
        return mock.patch.object(extend_attention, "_tile", return_value=tile)


AttentionLaunch = SplitLaunch | ExtendLaunch

# Blocks, warps, stages. The first of each is near the shipped one.
SPLIT_TILES = ((64, 4, 3), (64, 4, 2), (64, 4, 4), (64, 8, 3), (64, 2, 3), (128, 4, 2),
               (128, 8, 2), (128, 8, 3), (32, 4, 4), (32, 2, 4))  # fmt: skip
# Rows, blocks, warps, stages, and slack.
EXTEND_TILES = ((128, 64, 8, 3), (128, 64, 8, 3, 0), (128, 64, 8, 2), (128, 64, 4, 3),
                (128, 64, 4, 2), (128, 128, 8, 2), (128, 128, 8, 2, 0), (128, 128, 8, 3),
                (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 32, 4, 4),
                (256, 64, 8, 2))  # fmt: skip
SPLITS = tuple(
    SplitLaunch(*tile, programs) for tile, programs in product(SPLIT_TILES, (2, 1, 3, 4))
)
EXTENDS = tuple(ExtendLaunch(*tile) for tile in EXTEND_TILES)
DRY_SPLITS = (SplitLaunch(32, 4, 3, 1), SplitLaunch(16, 4, 3, 2))
DRY_EXTENDS = (ExtendLaunch(16, 16, 4, 2),)


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    splits, extends = setting.sized((SPLITS, EXTENDS), (DRY_SPLITS, DRY_EXTENDS))
    for batch, context in setting.sized(((64, 8192), (1, 8192), (16, 1024), (1, 1024)), ((2, 40),)):
        rows = Rows.batch(batch, context)
        yield from _best(setting, "decode", f"{batch} x {context}", rows, splits)
    for prefix, new in setting.sized(((0, 8192), (8192, 2048)), ((9, 5),)):
        rows = Rows.extend(prefix, new)
        yield from _best(setting, "extend", f"{new} after {prefix}", rows, extends)


def compile_calls(setting: Setting) -> Iterator[Work]:
    """Yield calls that need the same kernels as `measure`."""
    splits, extends = setting.sized((SPLITS, EXTENDS), (DRY_SPLITS, DRY_EXTENDS))
    once = {(split.block, split.warps, split.stages): split for split in splits}
    for split in once.values():
        yield partial(_call_once, setting, split, Rows.batch(1, 64))
    for extend in extends:
        yield partial(_call_once, setting, extend, Rows.extend(64, 1024))


def _call_once(setting: Setting, launch: AttentionLaunch, rows: Rows) -> None:
    data = pages_of(setting, rows, setting.sized(LARGE, DRY))
    with launch.chosen():
        data.attention(data.plan())


def _best(
    setting: Setting, kernel: str, shape: str, rows: Rows, launches: Sequence[AttentionLaunch]
) -> Iterator[Row]:
    """Yield a row per launch, for the record only, and one about the best of them."""
    data = pages_of(setting, rows, setting.sized(LARGE, DRY))
    ceiling = "read" if kernel == "decode" else "matmul"
    shipped_s = _seconds(setting, data, ceiling)
    labels = {"kernel": kernel, "shape": shape}
    seconds: dict[AttentionLaunch, float] = {}
    for launch in launches:
        try:
            with launch.chosen():
                seconds[launch] = _seconds(setting, data, ceiling)
        except Exception as error:  # noqa: BLE001  too much shared memory, mostly: try the next
            yield note(f"{kernel} {shape} {launch}", f"{type(error).__name__}: {error}")
            continue
        yield {"table": TRIED, **labels, **asdict(launch), "us": seconds[launch] * 1e6}
    if not seconds:
        return
    best = min(seconds, key=lambda launch: seconds[launch])
    yield {
        "table": "best",
        **labels,
        "tried": len(seconds),
        "best": asdict(best),
        "us": seconds[best] * 1e6,
        "share": setting.share(data.floor(ceiling), seconds[best]),
        "ceiling_kind": ceiling,
        "shipped_us": shipped_s * 1e6,
        "gain": shipped_s / seconds[best] - 1.0,
    }


def _seconds(setting: Setting, data: Paged, ceiling: str) -> float:
    """Time the attention. Raises ArithmeticError if its output is wrong."""
    timing, _ = data.op("attention", "", ceiling).timed(setting)
    return timing.p50
