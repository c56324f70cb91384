"""Construction of the parts of a router that know its nodes, and its readiness."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from api.program.base import RouterBase
from common import rpc
from common.logs import kv
from router.cluster.cache_watch import CacheWatch
from router.cluster.cluster import NOT_READY, SHUTTING_DOWN, Cluster
from router.cluster.cluster_state import ClusterState, NodeReport
from router.cluster.discovery import Discovery
from router.cluster.engine_pulse import LivenessLimits
from router.cluster.membership import Membership
from router.cluster.pooling_nodes import NO_PREFILL_NODE, PoolingNodes
from router.policy import HEED_PREFIXES, make_policy
from router.policy.hints import PrefixHints
from router.policy.load import NodeLoad
from router.policy.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterNodes:
    """The parts of a router that know its nodes.

    Attributes:
        changed: set when `ready` may have changed.
        generates: False: there are no decode nodes, and the router serves only embeddings and
            scores.
    """

    base: RouterBase
    cluster: Cluster
    state: ClusterState
    pooling: PoolingNodes
    membership: Membership
    changed: asyncio.Event
    generates: bool

    @property
    def ready(self) -> bool:
        """True if a request could be placed."""
        return self.cluster.ready if self.generates else self.pooling.ready

    def why_not_ready(self) -> str | None:
        """Return why new requests are rejected, or None if one could be placed now."""
        if self.base.admission.leaving:
            return SHUTTING_DOWN
        return None if self.ready else self._unready

    async def report_readiness(self, health: rpc.Health) -> None:
        """Report every change to the log, the metrics and `health`, until cancelled."""
        was_ready = False
        while True:
            await self.changed.wait()
            self.changed.clear()
            ready = self.ready
            if ready and not was_ready:
                log.info("ready")
            elif was_ready and not ready:
                log.warning("not ready %s", kv(reason=self._unready))
            was_ready = ready
            self.base.metrics.ready(ready)
            await health.tell(ready)

    @property
    def _unready(self) -> str:
        return NOT_READY if self.generates else NO_PREFILL_NODE


async def make_nodes(base: RouterBase) -> RouterNodes:
    """Make these parts.

    Raises:
        ConfigError: an entry of --prefill or --decode is invalid.
    """
    config, metrics = base.config, base.metrics
    discovery = Discovery(config.prefill, config.decode)
    await discovery.start()
    changed = asyncio.Event()
    load, prefixes = NodeLoad(), PrefixIndex()

    def reported(reports: Sequence[NodeReport]) -> None:
        metrics.nodes(Counter((report.role, report.state) for report in reports))
        cluster.described(reports)

    state = ClusterState(
        tokenizer_hash=base.model.tokenizer.hash,
        on_change=lambda: cluster.refresh(),
        on_reports=reported,
        on_role=lambda address, role: membership.has_role(address, role),
        on_stream_lost=metrics.stream_lost,
    )
    policy = make_policy(config.policy, load, prefixes)
    cluster = Cluster(state, policy, load, PrefixHints(prefixes), on_change=changed.set)
    pooling = PoolingNodes(
        base.make_channel, state.fit, state.paused, policy, load, cluster.backlogs
    )
    membership = Membership(
        discovery,
        state,
        cluster,
        base.make_channel,
        CacheWatch(prefixes) if config.policy in HEED_PREFIXES else None,
        pooling,
        budget_s=config.request_timeout_s,
        patience=LivenessLimits(config.suspect_after_s, config.dead_after_s),
    )
    return RouterNodes(base, cluster, state, pooling, membership, changed, bool(config.decode))
