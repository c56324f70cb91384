"""Part compile: compiles the kernels of the other parts, in many processes at the same time.

Every process calls its share of the operations once, on little data. All later processes find
Triton's output on disk. Measures nothing.
"""

import importlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from tools.bench.gpu.process import Row, note
from tools.bench.gpu.setting import Setting, Work

PARTS = ("attention", "bits", "decode", "kernels", "layout", "tuning")  # each has `compile_calls`
PROCESSES = 14


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
    while inlets:  # a process closes its end when it is done
        for inlet in cast("list[Connection[Any, Any]]", wait(inlets)):
            try:
                yield note("while compiling", inlet.recv())
            except EOFError:
                inlets.remove(inlet)
    seconds = time.perf_counter() - started
    counts = {"calls": len(calls), "processes": processes}
    yield {"table": "compiled", **counts, "seconds": seconds}


def _work(setting: Setting, calls: Sequence[Work], outlet: "Connection[Any, Any]") -> None:
    for call in calls:
        try:
            call()
            setting.finish()
        except Exception as error:  # noqa: BLE001  the caller that needs it will see it again
            outlet.send(f"{type(error).__name__}: {error}")
