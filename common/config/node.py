"""Prefill and decode nodes."""

import socket
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from common.config.engine import EngineConfig
from common.config.front import ServerConfig
from common.config.record import ConfigRecord, Port, Positive, Seconds

_ALL_ADDRESSES = ("0.0.0.0", "::")
_DEFAULT_DATA_HOST = "127.0.0.1"


class TransferConfig(ConfigRecord):
    """Pairing and hand-offs."""

    path: Literal["auto", "nixl", "tcp"] = Field(
        "auto", description="data path; auto: nixl where a one-sided path is proved, else tcp"
    )
    data_host: str = Field(
        _DEFAULT_DATA_HOST, description="address that the tcp backend binds and tells"
    )
    data_port: Port = Field(
        0, description="port there; 0: any free one, which no firewall can name"
    )
    encrypt: Literal["auto", "on", "off"] = Field(
        "auto",
        description="TLS for pages over tcp; auto: where front.tls has a certificate; on: always,"
        " and no rdma, which has none",
    )
    heartbeat_s: Seconds = Field(1.0, description="between two beats of a stream of a pair")
    missed_beats: Positive = Field(5, description="beats missed until a stream is ended")
    progress_s: Seconds = Field(10.0, description="longest wait for a chunk, from admission on")
    released_s: Seconds = Field(2.0, description="longest wait for the answer to Done")
    read_s: Seconds = Field(5.0, description="longest read, before its bytes are counted")
    min_gib_per_s: float = Field(0.0, ge=0, description="a link slower than this is refused")
    check_every: int = Field(
        64,
        ge=0,
        description="of a prefill node: one page in so many is compared by its checksum once it has"
        " been read; 0: none",
    )
    canary_tokens: int = Field(
        8,
        ge=0,
        le=64,
        description="of a decode node: so many tokens after a short prompt must be the same with "
        "the KV of a prefill node and with its own, when they are paired; 0: nothing is tried",
    )


class SharingConfig(ConfigRecord):
    """Prefix sharing: nodes fetch prefixes that another node has cached."""

    enabled: bool = Field(
        True,
        description="lend other nodes what the prefix cache has, and read what they have where that"
        " is cheaper than to compute it",
    )
    margin: float = Field(
        0.7,
        gt=0,
        allow_inf_nan=False,
        description="share of what computing a prefix would take, that reading it may take",
    )
    fetch_s: Seconds = Field(
        1.0,
        description="longest time for reading a prefix, before three times what it should take is"
        " counted; then it is computed",
    )


class NodeConfig(ConfigRecord):
    """One prefill or decode node."""

    front: ServerConfig
    engine: EngineConfig
    transfer: TransferConfig = TransferConfig()
    sharing: SharingConfig = SharingConfig()
    silence_s: Seconds = Field(
        3.0, description="without a beat of the engine, one a second, until it is unhealthy"
    )

    @property
    def announced_host(self) -> str:
        """Host by which peers know this node, in logs and reports.

        For a node that listens on all addresses, this is the host of its data path. If none is
        configured, it is the name of this machine.
        """
        if self.front.host not in _ALL_ADDRESSES:
            return self.front.host
        data_host = self.transfer.data_host
        return socket.gethostname() if data_host == _DEFAULT_DATA_HOST else data_host


class PrefillConfig(NodeConfig):
    front: ServerConfig = ServerConfig(port=50100)


class DecodeConfig(NodeConfig):
    front: ServerConfig = ServerConfig(port=50200)
    mode: Literal["disaggregated", "colocated"] = Field(
        "disaggregated", description="colocated: prefill here, no prefill nodes"
    )
    local_prefill_tokens: int = Field(
        0, ge=0, description="prompts with at most so many uncached tokens are prefilled here"
    )
    retries: int = Field(2, ge=0, description="further prefill nodes tried before prefilling here")
    pair_again_s: float = Field(
        3.0,
        ge=0,
        allow_inf_nan=False,
        description="longest wait for prefill nodes whose pairs have just ended, before prefilling "
        "here; 0: none",
    )
    local_fallback: bool = Field(
        False, description="where no decode node has a prefill node, take requests all the same"
    )
    max_granted_pages: Positive | None = Field(
        None, description="pages in hand-offs granted but not ready; default: half the pool"
    )

    @field_validator("mode")
    @classmethod
    def _can_call(cls, mode: str, info: ValidationInfo) -> str:
        front = info.data.get("front")
        if mode == "disaggregated" and front and front.tls.cert and front.tls.ca is None:
            raise ValueError("with --tls-cert it needs --tls-ca too, to check prefill nodes")
        return mode
