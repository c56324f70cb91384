"""Selects the backends of a configuration, and starts the producers that this machine supports.
Used by engine processes.
"""

import logging
from collections.abc import Mapping

from common.config import TransferConfig
from common.errors import ConfigError, TransferError
from common.logs import kv
from kvtransfer.backends.base import PagePool, PageProducer, TransferBackend
from kvtransfer.backends.nixl.backend import NixlBackend
from kvtransfer.backends.nixl.paths import PATHS
from kvtransfer.backends.rdma_proof import active_ports
from kvtransfer.backends.tcp.backend import TcpBackend, memory_of

log = logging.getLogger(__name__)

_WITHIN_A_HOST = tuple(kind for kind in PATHS if kind.name != "rdma")


def backends(config: TransferConfig, *, tls: bool) -> dict[str, TransferBackend]:
    """Return the configured backends by name, in order of preference.

    Args:
        tls: whether the node's pair streams are encrypted.
    """
    encrypted = tls if config.encrypt == "auto" else config.encrypt == "on"
    known: tuple[TransferBackend, ...] = (
        NixlBackend(_WITHIN_A_HOST if config.encrypt == "on" else PATHS),
        TcpBackend(config.listen_host, data_port=config.listen_port, encrypted=encrypted),
    )
    return {backend.name: backend for backend in known if config.backend in ("auto", backend.name)}


def serve(
    backends: Mapping[str, TransferBackend], pool: PagePool, instance: int
) -> dict[str, PageProducer]:
    """Serve `pool` over every backend that this machine supports, in the same order.

    Raises:
        ConfigError: the machine supports none of the configured backends.
    """
    producers: dict[str, PageProducer] = {}
    reasons = []
    for name, backend in backends.items():
        try:
            producers[name] = backend.serve(pool, instance)
        except TransferError as error:
            log.warning("data path unavailable %s", kv(path=name, reason=error))
            reasons.append(f"{name}: {error}")
    if backends and not producers:
        raise ConfigError(
            f"transfer.backend: no data path can be served here: {'; '.join(reasons)}"
        )
    log.info("data paths ready %s", kv(device=pool.device, over=", ".join(producers)))
    return producers


def rehearse(backends: Mapping[str, TransferBackend], pool: PagePool) -> None:
    """Compile the kernels that would otherwise delay the first reads into `pool`. Serving the pool
    compiles them too.

    Raises:
        ConfigError: the device has no memory left for the copies.
    """
    if pool.device == "cpu" or "tcp" not in backends:
        return
    try:
        memory_of(pool)
    except TransferError as error:
        raise ConfigError(f"transfer.backend: tcp cannot read into the pool: {error}") from None


def why_pinned(backends: Mapping[str, TransferBackend], pool: PagePool) -> str:
    """Return why the system cannot reclaim the pool's memory while it is served, or ""."""
    if pool.device != "cpu":
        return "GPU memory is released only with --engine.memory-saver"
    if "nixl" not in backends:
        return ""
    try:
        ports = active_ports()
    except TransferError:
        return ""
    return f"it is registered with RDMA ports ({', '.join(ports)})"
