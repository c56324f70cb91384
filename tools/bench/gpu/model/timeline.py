"""Device timeline of a few steps, kernel by kernel, from torch's profiler.

Unlike events around steps, it separates time without a kernel from time within one. A profiled step
is slightly slower, so only the shares are meaningful.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.bench.gpu.frame import Row, Tables
from tools.bench.gpu.model.engine import DecodeEngine
from tools.bench.gpu.setting import Setting

TABLES: Tables = {
    "timeline": {
        "model": "{model}",
        "batch": "{batch}",
        "overlap": "{overlap}",
        "us a step": "{us:.0f}",
        "in kernels": "{in_kernels:.1%}",
        "GPU idle (gaps over 5 us)": "{idle:.2%}",
        "kernels a step": "{kernels:.0f}",
    },
    "where a step goes": {
        "model": "{model}",
        "batch": "{batch}",
        "kernel": "{kernel}",
        "times a step": "{times:.1f}",
        "us a step": "{us:.1f}",
        "share": "{share:.1%}",
    },
}

STEPS = 10
LONGEST_GAP_US = 5.0  # between two kernels of one graph. Longer gaps count as idle
TOP = 12
_NAME = 70  # characters


def measure(setting: Setting, engine: DecodeEngine, labels: dict[str, Any]) -> Iterator[Row]:
    """Yield one row for all steps, then the kernels with the longest time.

    Args:
        labels: fields of every row. One is `overlap`.
    """
    setting.finish()
    activity = ProfilerActivity.CPU if setting.dry else ProfilerActivity.CUDA
    where = DeviceType.CPU if setting.dry else DeviceType.CUDA
    with profile(activities=[activity]) as profiler:
        engine.run(STEPS)
        setting.finish()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == where
    )
    if not events:
        raise RuntimeError("the profiler saw nothing")
    whole = max(end for _, end, _ in events) - events[0][0]
    busy, idle, until = 0.0, 0.0, events[0][0]
    for start, end, _ in events:
        gap = start - until
        idle += gap if gap > LONGEST_GAP_US else 0.0
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    yield {
        "table": "timeline",
        **labels,
        "us": whole / STEPS,
        "in_kernels": busy / whole,
        "idle": idle / whole,
        "kernels": len(events) / STEPS,
    }
    if not labels["overlap"]:  # otherwise the kernels are the same, only further apart
        return
    spent: dict[str, list[float]] = defaultdict(list)
    for start, end, name in events:
        spent[name].append(end - start)
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:TOP]:
        yield {
            "table": "where a step goes",
            **labels,
            "kernel": name if len(name) <= _NAME else name[:_NAME] + "...",
            "times": len(times) / STEPS,
            "us": sum(times) / STEPS,
            "share": sum(times) / whole,
        }
