"""Nodes of all roles, and rank hosts."""

import re
import socket
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.config.engine import EngineConfig
from common.config.record import ConfigRecord, Port, Positive, Seconds
from common.config.server import NAME_WITHOUT_CA, ProcessConfig, ServerConfig, TlsConfig

_ALL_ADDRESSES = ("0.0.0.0", "::")
_DEFAULT_DATA_HOST = "127.0.0.1"


class TransferConfig(ConfigRecord):
    """Pairing and hand-offs."""

    backend: Literal["auto", "nixl", "tcp"] = Field(
        "auto", description="Transfer backend. auto: nixl if it works on this host, otherwise tcp"
    )
    listen_host: str = Field(
        _DEFAULT_DATA_HOST,
        description="Address that the tcp backend listens on and announces to peers",
    )
    listen_port: Port = Field(
        0,
        description="Port of the tcp backend. Rank n uses this port + n. 0: any free port, which "
        "is unsuitable for firewall rules",
    )
    encrypt: Literal["auto", "on", "off"] = Field(
        "auto",
        description="TLS for pages over tcp. auto: if server.tls has a certificate. on: always, "
        "and rdma is disabled because it cannot be encrypted",
    )
    heartbeat_s: Seconds = Field(1.0, description="Seconds between two heartbeats of a pair")
    max_missed_heartbeats: Positive = Field(
        5, description="Missed heartbeats before a pair's stream is closed"
    )
    chunk_timeout_s: Seconds = Field(
        10.0, description="Seconds to wait for the next chunk of a hand-off, from its admission on"
    )
    release_timeout_s: Seconds = Field(2.0, description="Seconds to wait for the reply to Done")
    read_timeout_s: Seconds = Field(
        5.0,
        description="Seconds that a read may take, in addition to the expected time for its bytes",
    )
    min_link_gib_per_s: float = Field(
        0.0, ge=0, description="Minimum speed of a link in GiB/s. Slower links are rejected"
    )
    checksum_interval: int = Field(
        64,
        ge=0,
        description="Pages per checksum comparison: a prefill node compares one page of this many "
        "after it was read. 0: none",
    )
    canary_tokens: int = Field(
        8,
        ge=0,
        le=64,
        description="Tokens that a decode node generates at pairing with the prefill node's KV "
        "and with its own. They must be equal. 0: no canary check",
    )


class PrefixSharingConfig(ConfigRecord):
    """Prefix sharing: nodes fetch prefixes that another node has cached."""

    enabled: bool = Field(
        True,
        description="Cross-node prefix cache: export cached prefixes to other nodes, and fetch "
        "theirs if that costs less than computing them",
    )
    max_cost_ratio: float = Field(
        0.7,
        gt=0,
        allow_inf_nan=False,
        description="Maximum expected fetch time, as a fraction of the time to compute the prefix",
    )
    fetch_timeout_s: Seconds = Field(
        1.0,
        description="Seconds that a fetch may take, in addition to three times the expected time. "
        "Then the prefix is computed",
    )


_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\*|[0-9]{1,5})|ipc://.+")


class KvEventsConfig(ConfigRecord):
    """KV events in vLLM's schema over ZMQ, for the routers of llm-d and Dynamo."""

    publisher: Literal["null", "zmq"] = Field(
        "null", description="Publisher of KV events. null: none. zmq: needs pyzmq"
    )
    endpoint: str = Field(
        "tcp://127.0.0.1:5557",
        description="ZMQ endpoint of the events: tcp://HOST:PORT or ipc://PATH. A * as host: all "
        "addresses of this host. As port: any free port",
    )
    connect: bool = Field(
        False, description="Connect to the endpoint, where a reader listens, instead of binding it"
    )
    replay_endpoint: str | None = Field(
        None,
        description="ZMQ endpoint at which readers request events that they missed. Default: none",
    )
    buffer_steps: Positive = Field(
        10_000, description="Batches of events kept for the replay endpoint, up to 256 MiB"
    )
    hwm: Positive = Field(
        10_000,
        description="ZMQ high water mark: batches queued for each slow reader. Further batches are "
        "dropped for this reader. A batch has up to 80 KiB",
    )
    topic: str = Field(
        "", description="Topic of the events. llm-d expects kv@POD@MODEL", max_length=256
    )
    insecure: bool = Field(
        False,
        description="Allow endpoints beyond this host. Their readers need no credentials, and get "
        "the token ids of all prompts and responses",
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and _ENDPOINT.fullmatch(endpoint) is None:
            raise ValueError("expected tcp://HOST:PORT or ipc://PATH")
        return endpoint


class NodeConfig(ConfigRecord):
    """One node. Each role has a subclass."""

    server: ServerConfig
    engine: EngineConfig
    transfer: TransferConfig = TransferConfig()
    prefix_sharing: PrefixSharingConfig = PrefixSharingConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    engine_heartbeat_timeout_s: Seconds = Field(
        3.0,
        description="Seconds without a heartbeat of the engine before the node is unhealthy. The "
        "engine sends one per second",
    )

    @property
    def announced_host(self) -> str:
        """Host by which peers know this node, in logs and reports.

        For a node that listens on all addresses, this is the host of its data path. If none is
        configured, it is the name of this machine.
        """
        if self.server.host not in _ALL_ADDRESSES:
            return self.server.host
        data_host = self.transfer.listen_host
        return socket.gethostname() if data_host == _DEFAULT_DATA_HOST else data_host


class PrefillConfig(NodeConfig):
    server: ServerConfig = ServerConfig(port=50100)
    compute_ahead: bool = Field(
        True,
        description="Compute prompts while their decode node has no pages for them, if no other "
        "prompt waits. Their KV waits in the prefix cache",
    )
    encode_timeout_s: Seconds = Field(
        10.0,
        description="Seconds to wait for an encode node's embeddings of an image, before this node "
        "encodes it itself",
    )


class EncodeConfig(NodeConfig):
    """A node that encodes images for prefill nodes."""

    server: ServerConfig = ServerConfig(port=50400)
    embedding_bytes: Positive = Field(
        256 << 20, description="Bytes of the pages in which embeddings are published"
    )


class DecodeConfig(NodeConfig):
    server: ServerConfig = ServerConfig(port=50200)
    mode: Literal["disaggregated", "colocated"] = Field(
        "disaggregated",
        description="Mode. colocated: the decode node also prefills, without prefill nodes",
    )
    local_prefill_max_tokens: int = Field(
        0,
        ge=0,
        description="Maximum uncached tokens of a prompt that the decode node prefills itself",
    )
    handoff_retries: int = Field(
        2,
        ge=0,
        description="Further prefill nodes to try after a failed hand-off, before local prefill",
    )
    reconnect_wait_s: float = Field(
        3.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds to wait for a prefill node whose connection was just lost, before "
        "local prefill. 0: no wait",
    )
    local_fallback: bool = Field(
        False, description="Accept requests if no decode node has a prefill node"
    )
    max_inflight_pages: Positive | None = Field(
        None,
        description="Maximum KV pages of hand-offs that are granted and not finished. Default: "
        "half the pool",
    )

    @model_validator(mode="after")
    def _drafts_in_one_stage(self) -> Self:
        drafter = self.engine.speculative.method
        if self.engine.parallel.pp > 1 and drafter != "none":
            raise ValueError(
                f"engine.speculative.method: {drafter} is not supported with engine.parallel.pp 2 "
                "on decode nodes"
            )
        return self

    @field_validator("mode")
    @classmethod
    def _can_call(cls, mode: str, info: ValidationInfo) -> str:
        server = info.data.get("server")
        if mode == "disaggregated" and server and server.tls.cert and server.tls.ca is None:
            raise ValueError("with --tls-cert it needs --tls-ca, to verify prefill nodes")
        return mode


# Configuration record by role.
NODE_CONFIGS: Mapping[str, type[NodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}


class RankHostServer(ProcessConfig):
    """Logs and credentials of a rank host."""

    insecure: bool = Field(
        False, description="Follow a leader on another host without verifying its identity"
    )

    @field_validator("tls")
    @classmethod
    def _verifies(cls, tls: TlsConfig) -> TlsConfig:
        if tls.cert and tls.ca is None:
            raise ValueError("cert needs ca, to verify the leader")
        if tls.server_name and tls.ca is None:
            raise ValueError(NAME_WITHOUT_CA)
        return tls


class RankHostEngine(ConfigRecord):
    """Engine settings that may differ between the hosts of one node."""

    model: str | None = Field(
        None, description="Directory or hub id of the node's model. Default: as on the first host"
    )
    device: str | None = Field(
        None, description="Device, as on a node. Default: as on the first host"
    )


class RankHostTransfer(ConfigRecord):
    """KV transfer settings for the ranks on this host."""

    listen_host: str | None = Field(
        None,
        description="Address at which the tcp backend of these ranks listens. Default: this host's "
        "address in the node's trusted network",
    )


class RankHostConfig(ConfigRecord):
    """The ranks of a node on a host other than its first one."""

    leader: str = Field(
        description="HOST:PORT of the node's first host, with its engine.parallel.listen_port"
    )
    join_timeout_s: Seconds = Field(1800.0, description="Seconds to wait for the leader at start")
    server: RankHostServer = RankHostServer()
    engine: RankHostEngine = RankHostEngine()
    transfer: RankHostTransfer = RankHostTransfer()

    @field_validator("leader")
    @classmethod
    def _address(cls, leader: str) -> str:
        host, _, port = leader.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("expected HOST:PORT")
        return leader
