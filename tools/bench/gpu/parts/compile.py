"""Part compile: compiles the kernels of the other parts, in many processes at the same time.

Every process calls its share of the operations once, on little data. All later processes find
Triton's output on disk. Measures nothing.
"""

import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from tools.bench.gpu.frame import Row, Tables, note
from tools.bench.gpu.setting import Setting

TABLES: Tables = {
    "compiled": {"calls": "{calls}", "processes": "{processes}", "seconds": "{seconds:.1f}"}
}

PARTS = ("attention", "bits", "decode", "kernels", "layout", "tuning")  # each has `compile_calls`
PROCESSES = 14

Call = Callable[[], object]


def measure(setting: Setting) -> Iterator[Row]:
    started = time.perf_counter()
    setting.launch_kernels()
    modules = [importlib.import_module(f"tools.bench.gpu.parts.{part}") for part in PARTS]
    calls = [call for module in modules for call in module.compile_calls(setting)]
    calls, processes = setting.sized((calls, PROCESSES), (calls[:2], 2))
    # Not a pool: the calls cannot be pickled, and need not be with forked processes.
    fork = multiprocessing.get_context("fork")
    inlets: list[Connection[Any, Any]] = []
    for place in range(processes):
        inlet, outlet = fork.Pipe(duplex=False)
        fork.Process(target=_work, args=(setting, calls[place::processes], outlet)).start()
        outlet.close()
        inlets.append(inlet)
    yield from _failures(inlets)
    yield {
        "table": "compiled",
        "calls": len(calls),
        "processes": processes,
        "seconds": time.perf_counter() - started,
    }


def _failures(inlets: "list[Connection[Any, Any]]") -> Iterator[Row]:
    """Yield failures as the processes report them, until the last process has ended."""
    while inlets:
        for inlet in cast("list[Connection[Any, Any]]", wait(inlets)):
            try:
                yield note("while compiling", inlet.recv())
            except EOFError:
                inlets.remove(inlet)


def _work(setting: Setting, calls: Sequence[Call], outlet: "Connection[Any, Any]") -> None:
    for call in calls:
        try:
            call()
            setting.finish()
        except Exception as error:  # noqa: BLE001  the caller that needs it will see it again
            outlet.send(f"{type(error).__name__}: {error}"[:500])
