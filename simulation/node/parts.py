"""The parts of a simulated engine: the real core with witnesses, and rejected features."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.config import EngineConfig
from common.errors import (
    AdapterNotLoaded,
    EngineFault,
    FailedPrecondition,
    InvalidRequest,
)
from common.requests.images import Image
from common.requests.namespace import UNNAMED, AdapterId
from common.requests.pooling import PoolingParams
from common.requests.sampling import GuidedDecoding, SamplingParams
from engine.batch.holding import PageHolding
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.core import CoreShape, EngineCore
from engine.grammar.matching import CompiledGuide, Match
from engine.scheduler.scheduler import Scheduler
from engine.speculative import HeadDrafter, Speculator
from node.control.commands import CommandSteps, ControlledRole, Pauses
from node.messages import Command, ContinueGeneration, PauseGeneration
from simulation.cost import StepCost
from simulation.device.runner import SimCopier, SimRunner
from simulation.device.sim_device import SimDevice
from simulation.node.options import cost_of
from simulation.node.pools import SharedPool, pool_directory

_CHUNK_TOKENS = 2048  # default chunk of simulated nodes
_NOT_SIMULATED = "is not supported by simulated nodes"


class SimLimits(RequestLimits):
    """Request limits that reject the features that are not simulated."""

    def check_sampling(self, sampling: SamplingParams, images: Sequence[Image] = ()) -> None:
        asked = {
            "logprobs": sampling.logprobs >= 0,
            "prompt_logprobs": sampling.prompt_logprobs >= 0,
            "guide": sampling.guide is not None,
            "hidden_states": sampling.hidden_states,
        }
        for field, is_asked in asked.items():
            if is_asked:
                raise InvalidRequest(f"sampling.{field} {_NOT_SIMULATED}")
        super().check_sampling(sampling, images)

    def check_pooling(self, pooling: PoolingParams) -> None:
        raise InvalidRequest(f"pooling {_NOT_SIMULATED}")


class NoAdapters:
    """The adapters of simulated nodes: there are none."""

    num_changes = 0

    def hold(self, request: Request) -> None:
        if request.spec.adapter:
            raise AdapterNotLoaded(f"a LoRA adapter {_NOT_SIMULATED}")

    def take_slot(self, request: Request) -> bool:
        return True

    def release(self, key: int) -> None:
        """Do nothing: no request holds an adapter."""

    def names(self) -> Mapping[str, AdapterId]:
        return {}

    def load(self, name: str, path: str) -> Future[tuple[AdapterId, bool]]:
        raise FailedPrecondition(f"loading a LoRA adapter {_NOT_SIMULATED}")

    def unload(self, name: str) -> bool:
        return False

    def poll(self) -> None:
        """Do nothing: no adapter is being loaded."""


class NoGrammars:
    """The grammars of simulated nodes. SimLimits rejects requests with one."""

    def compiled(self, guide: GuidedDecoding) -> Future[CompiledGuide]:
        raise InvalidRequest(f"sampling.guide {_NOT_SIMULATED}")

    def match(self, compiled: CompiledGuide, request: Request) -> Match:
        raise EngineFault("a grammar was compiled by a simulated node")


class SimOperations:
    """Operators' commands that simulated nodes support: pauses."""

    def __init__(self) -> None:
        self.weights_in_use = UNNAMED
        self.gauges: dict[str, float] = {}
        self._pauses = Pauses(self.gauges)

    def steps(self, command: Command, role: ControlledRole) -> CommandSteps:
        match command:
            case PauseGeneration(mode):
                yield from self._pauses.pause(mode, role)
            case ContinueGeneration():
                yield from self._pauses.resume(role)
            case _:
                raise FailedPrecondition(f"{type(command).__name__} {_NOT_SIMULATED}")


@dataclass(frozen=True, slots=True, eq=False)
class SimParts:
    """The parts of a simulated engine that stay when its role changes. See RoleEngine.

    Attributes:
        fingerprint: equal for nodes that may pair.
    """

    core: EngineCore
    cost: StepCost
    runner: SimRunner
    copier: SimCopier
    pool: SharedPool
    pool_directory: Path
    fingerprint: Mapping[str, str]
    adapters: NoAdapters
    guides: NoGrammars

    @classmethod
    def of(cls, config: EngineConfig) -> "SimParts":
        """Make the parts of a node with this configuration.

        Raises:
            ConfigError: the model or the GPU is unknown, or the model does not fit.
        """
        cost = cost_of(config)
        page_size = config.cache.page_size
        page_bytes = cost.kv.page_bytes(page_size)
        num_pages = config.cache.num_pages or cost.num_pages(page_size)
        swap_pages = num_pages if config.cache.swap_pages < 0 else config.cache.swap_pages
        tier_pages = config.offload.cpu_bytes // page_bytes if config.cache.prefix_cache else 0
        tables = cost.kv.tables(page_size)
        context = min(config.context_length or cost.context_length, cost.context_length)
        chunk = _chunk_tokens(config)
        shape = CoreShape(tables, context, num_pages, swap_pages, tier_pages, chunk)
        limits = SimLimits(context, cost.vocabulary, tables, num_pages)
        directory = pool_directory(config.sim.pool_dir)
        pool, host_pool = (
            SharedPool(directory, num_pages),
            np.zeros(shape.num_host_pages, np.uint64),
        )
        copier = SimCopier(pool.pages, host_pool, cost, page_bytes)
        core = EngineCore.make(config, shape, limits, copier, speculator=_speculator(config))
        device = SimDevice(core.table, pool.pages, host_pool, config.sim.draft_acceptance)
        fingerprint = {
            "architecture": "simulated",
            "config": Path(config.model).name,
            "page_size": str(page_size),
            "weights": UNNAMED.hex(),
        }
        return cls(
            core=core,
            cost=cost,
            runner=SimRunner(device, cost, page_bytes),
            copier=copier,
            pool=pool,
            pool_directory=directory,
            fingerprint=fingerprint,
            adapters=NoAdapters(),
            guides=NoGrammars(),
        )

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of the simulated model."""
        return self.cost.kv.page_bytes(self.core.shape.tables.page_size)

    def scheduler(
        self, config: EngineConfig, on_admit: Callable[[Request, PageHolding], None]
    ) -> Scheduler:
        return Scheduler(config.scheduler, self.core, on_admit)

    def close(self) -> None:
        self.copier.close()
        if self.core.tiers is not None:
            self.core.tiers.close()
        self.pool.close()


def _speculator(config: EngineConfig) -> Speculator | None:
    """Return the speculator. The device drafts, because simulated text does not repeat."""
    speculator = Speculator.of(config.speculative, config.scheduler.num_slots)
    return None if speculator is None else replace(speculator, drafter=HeadDrafter())


def _chunk_tokens(config: EngineConfig) -> int | None:
    steps = config.scheduler
    if steps.chunked_prefill_tokens < 0:
        return None
    size = config.cache.page_size
    wanted = steps.chunked_prefill_tokens or steps.auto_chunk_tokens or _CHUNK_TOKENS
    return max(size, wanted // size * size)
