"""The parts from which a role is assembled: those of an engine, and those that every role has.

Engines of a real device (engine/build.py) and simulated ones provide them.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from common.config import NODE_CONFIGS, EngineConfig
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.core import EngineCore
from engine.loop.loop import EngineRole
from engine.loop.watchdog import StalledEngine
from engine.scheduler.scheduler import Scheduler
from kvtransfer.ports import TransferPort
from node.control.engine_control import EngineControl, FrontendChannel
from node.queues import Grammars, RequestAdapters
from node.sharing.prefixes import PrefixSharing


class RoleEngine(Protocol):
    """The parts of an engine that roles use."""

    @property
    def core(self) -> EngineCore: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def adapters(self) -> RequestAdapters: ...

    @property
    def guides(self) -> Grammars: ...

    def scheduler(
        self, config: EngineConfig, on_admit: Callable[[Request, PageHolding], None]
    ) -> Scheduler: ...


class RoleRuntime(Protocol):
    """The parts that do not depend on the role."""

    @property
    def instance(self) -> int: ...

    @property
    def channel(self) -> FrontendChannel: ...

    @property
    def control(self) -> EngineControl: ...

    @property
    def sharing(self) -> PrefixSharing: ...

    @property
    def port(self) -> TransferPort: ...


class DrivenRole(EngineRole, StalledEngine, Protocol):
    """A role as used by the event loop, the stall report and a group of nodes."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def busy(self) -> bool: ...


class RoleModule(Protocol):
    """The module `engine` of a role's package."""

    def wants(self, config: EngineConfig) -> EngineConfig:
        """Return the engine configuration that the role uses."""
        ...

    def check(self, engine: RoleEngine) -> None:
        """Raise ConfigError if the engine cannot have the role."""
        ...

    def make_role(self, engine: RoleEngine, runtime: RoleRuntime, config: Any) -> DrivenRole:
        """Assemble the role from an engine and the role-independent parts."""
        ...


def load_roles() -> Mapping[str, RoleModule]:
    """Import both roles by name, because their packages depend on this one."""
    return {name: cast(RoleModule, import_module(f"{name}_node.engine")) for name in NODE_CONFIGS}
