"""Addresses that a process listens on, and its credentials."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config.record import ConfigRecord, Port, Seconds

_COLLECTOR = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?")
NAME_WITHOUT_CA = "server_name needs ca"


class TlsConfig(ConfigRecord):
    """TLS with PEM files, which are reloaded when they change.

    Without files, nothing is encrypted.
    """

    cert: Path | None = Field(None, description="File of the certificate and its chain, in PEM")
    key: Path | None = Field(None, description="File of the private key of cert, in PEM")
    ca: Path | None = Field(
        None,
        description="File of the authorities that must have signed the peer's certificate. "
        "Callers must then present one",
    )
    server_name: str | None = Field(
        None,
        description="Host name in the certificates of nodes. Default: the address that is called",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key must be set together")
        return self

    @property
    def mutual(self) -> bool:
        """True if each side shows a certificate and checks the other's."""
        return self.cert is not None and self.ca is not None


class ProcessConfig(ConfigRecord):
    """Logs and credentials of a process."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level of log lines on standard error"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Log format. json: one object per line"
    )
    tls: TlsConfig = TlsConfig()
    secret_file: Path | None = Field(
        None,
        description="File of cluster secrets, one per line, reloaded when it changes. The first "
        "one signs, all are accepted. Default: the variable BATON_SECRET, if set",
    )


class ServerConfig(ProcessConfig):
    """Listening addresses, logs and credentials of a process."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on. 0.0.0.0: all addresses of this host"
    )
    port: Port = Field(description="Port of gRPC")
    metrics_port: Port | None = Field(
        None, description="Port of Prometheus metrics. Default: no metrics server"
    )
    drain_timeout_s: Seconds = Field(
        45.0,
        description="Seconds for which a draining process waits for running requests, for example "
        "after SIGTERM",
    )
    health_port: Port | None = Field(
        None, description="Port of gRPC health without TLS, for probes. Default: none"
    )
    insecure: bool = Field(
        False,
        description="Listen on addresses other than loopback even if callers need no credentials",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector for traces, such as http://HOST:4317. "
        "Default: no export",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, url: str | None) -> str | None:
        if url is not None and _COLLECTOR.fullmatch(url) is None:
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT, of OTLP over gRPC")
        return url

    @field_validator("tls")
    @classmethod
    def _serves(cls, tls: TlsConfig) -> TlsConfig:
        if tls.ca is not None and tls.cert is None:
            raise ValueError("ca needs cert and key: it verifies callers over TLS")
        if tls.server_name and tls.ca is None:
            raise ValueError(NAME_WITHOUT_CA)
        return tls
