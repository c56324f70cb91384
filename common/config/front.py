"""Addresses that a process listens on, and its credentials."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config.record import ConfigRecord, Port, Seconds

_COLLECTOR = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?")
NAME_WITHOUT_CA = "server_name says nothing without ca"


class TlsConfig(ConfigRecord):
    """TLS with PEM files, which are reloaded when they change.

    Without files, nothing is encrypted.
    """

    cert: Path | None = Field(
        None, description="certificate shown to the other side, and its chain"
    )
    key: Path | None = Field(None, description="its private key")
    ca: Path | None = Field(
        None,
        description="who must have signed the other side's certificate; callers must then show one",
    )
    server_name: str | None = Field(
        None, description="name that the certificates of nodes have; default: the address called"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        return self

    @property
    def mutual(self) -> bool:
        """True if each side shows a certificate and checks the other's."""
        return self.cert is not None and self.ca is not None


class ServerConfig(ConfigRecord):
    """Listening addresses, logs and credentials of a process."""

    host: str = Field("127.0.0.1", description="address listened on; 0.0.0.0: all of this host's")
    port: Port = Field(description="gRPC")
    metrics_port: Port | None = Field(None, description="Prometheus metrics; default: none")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least that is logged, to standard error"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line")
    drain_s: Seconds = Field(45.0, description="longest wait for running requests at SIGTERM")
    health_port: Port | None = Field(
        None, description="gRPC health alone, never with TLS, for probes; default: none"
    )
    tls: TlsConfig = TlsConfig()
    secret_file: Path | None = Field(
        None,
        description="cluster secrets, one a line, read anew when it changes: the first one signs, "
        "all are heard; default: the variable BATON_SECRET, if it is set",
    )
    insecure: bool = Field(
        False,
        description="listen beyond this host although callers need neither secret nor certificate",
    )
    otlp_endpoint: str | None = Field(
        None, description="OpenTelemetry collector for traces, http://HOST:4317; default: none"
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, url: str | None) -> str | None:
        if url is not None and _COLLECTOR.fullmatch(url) is None:
            raise ValueError("must be http://HOST:PORT, or https, of OTLP over gRPC")
        return url

    @field_validator("tls")
    @classmethod
    def _serves(cls, tls: TlsConfig) -> TlsConfig:
        if tls.ca is not None and tls.cert is None:
            raise ValueError("ca is for checking callers over TLS, which takes cert and key")
        if tls.server_name and tls.ca is None:
            raise ValueError(NAME_WITHOUT_CA)
        return tls
