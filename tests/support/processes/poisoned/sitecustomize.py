"""Makes engines of processes with this folder on PYTHONPATH fail, for tests.

A request whose first token is POISON raises in a forward: in its first one if the second token is
0, else when it decodes and has as many tokens as the second token says. Behind such a forward
another one never ends, so that no process may wait for work in flight.

With STEP_S in the environment, each forward takes that many seconds longer. With STUCK_DIRECTORY, a
forward does not end while that directory has a file named by the engine's pid: the engine thread is
stuck while the engine's other threads run.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

POISON = 250
DEADLY = "a forward that no kernel survives"


RUNNER = "engine.runner.runner"


class _Poisoner(importlib.abc.MetaPathFinder):
    """Changes the runner when it is imported. Imports nothing itself."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != RUNNER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _poison(module.StepBuilder, module.Forwards)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _poison(builder: Any, forwards: Any) -> None:
    build, swap = builder.build, forwards._swap
    deadly: list[Any] = []

    def poisoned_build(self: Any, batch: Any, graph_of: Any = None) -> Any:
        poison, at = self._table.tokens[batch.slots, :2].T
        decodes = batch.ends - batch.starts == 1
        step, sampling = build(self, batch, graph_of)
        if ((poison == POISON) & (batch.ends >= at) & (decodes | (at == 0))).any():
            deadly.append(step)
        return step, sampling

    def poisoned_swap(self: Any, step: Any) -> None:
        """Run before every forward, on its stream."""
        if step in deadly:
            self._stream.submit(threading.Event().wait)
            raise RuntimeError(DEADLY)
        time.sleep(float(os.environ.get("STEP_S", "0")))
        stuck = Path(os.environ.get("STUCK_DIRECTORY", "/nonexistent"), str(os.getpid()))
        while stuck.exists():
            time.sleep(0.05)
        swap(self, step)

    builder.build, forwards._swap = poisoned_build, poisoned_swap


if __name__ == "sitecustomize":  # not if a test imports the constants
    if (runner := sys.modules.get(RUNNER)) is not None:  # in a fork server
        _poison(runner.StepBuilder, runner.Forwards)
    else:
        sys.meta_path.insert(0, _Poisoner())
