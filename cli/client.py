"""gRPC calls and credentials of the commands that call running processes."""

import argparse
import asyncio
import contextlib
import math
import os
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.local import plan
from common import tls
from common.config import TlsConfig
from common.errors import ConfigError, InvalidRequest
from common.identity.program import identity_of
from common.identity.secret import VARIABLE, operator_keys, unread
from common.identity.tokens import Identity
from common.rpc import check_address, make_channel, raise_if_cancelled
from common.settings import ConfigArgumentParser
from protos import router_pb2, router_pb2_grpc

KEY_VARIABLE = "BATON_API_KEY"
Metadata = tuple[tuple[str, str], ...]
N = TypeVar("N", int, float)

_MAX_KEY_FILE_BYTES = 4096
DEFAULT_FILE = Path("var/secret")
_POLL_S = 0.2
_ANSWER_S = 5.0
# How gRPC's messages begin if there is no connection.
_NOT_CONNECTED = (
    "failed to connect to all addresses",
    "errors resolving ",
    "DNS resolution failed",
)


class UnfinishedRestart(Exception):
    """The requested operation is incomplete. The message describes the current state."""


def address(text: str) -> str:
    """Parse HOST:PORT, for argparse."""
    try:
        return check_address(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


AddFlags = Callable[[ConfigArgumentParser], Any]


def flag(*names: str, **options: Any) -> AddFlags:
    """Return a function that adds an argument to a parser, with the options of argparse."""
    return lambda parser: parser.add_argument(*names, **options)


add_router_flag = flag(
    "--router",
    type=address,
    default=f"{plan.HOST}:{plan.ROUTER_PORT}",
    metavar="HOST:PORT",
    help="gRPC address of the router (%(default)s)",
)
add_model_flag = flag(
    "--model",
    default="",
    metavar="NAME",
    help="name of the served model. Required if the router has several (the only one)",
)
add_json_flag = flag("--json", action="store_true", help="print JSON")


def ranged(kind: type[N], least: float, most: float = math.inf) -> Callable[[str], N]:
    """Return a parser of numbers from `least` to `most`, for argparse."""
    expected = f"at least {least}" if most == math.inf else f"from {least} to {most}"

    def parse(text: str) -> N:
        with contextlib.suppress(ValueError):
            if least <= (number := kind(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")

    return parse


def positive(text: str) -> float:
    """Parse a positive number, for argparse."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return number


def add_credential_flags(parser: ConfigArgumentParser, *, secret: bool = True) -> None:
    """Add the flags of the API key, of the secret and of TLS, as advanced options.

    There is no flag for the key itself, because every user of the machine can read command lines.

    Args:
        secret: the command also calls nodes, which need the cluster secret.
    """
    group = parser.add_advanced_group(
        "credentials and TLS", "PEM files. Without --tls-ca, connections are not encrypted."
    )
    if secret:
        add_secret_flag(group)
    default = ", or the operator's key of the secret" if secret else ""
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with an API key (the variable {KEY_VARIABLE}{default})",
    )
    for name, purpose in (
        ("ca", "authority that must have signed the certificate of the server"),
        ("cert", "certificate to present, where the server requires one"),
        ("key", "private key of the certificate"),
    ):
        group.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=purpose)
    group.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="name in the certificate of the server (its address)",
    )


def credentials(options: argparse.Namespace) -> Metadata:
    """Return the metadata to send with each call, from the flags of `add_credential_flags`.

    Empty without a key.

    Raises:
        ConfigError: the file cannot be read, or contains no key.
    """
    key, source = os.environ.get(KEY_VARIABLE, ""), f"the variable {KEY_VARIABLE}"
    if options.api_key_file is not None:
        source = str(options.api_key_file)
        try:
            with options.api_key_file.open("rb") as file:
                key = file.read(_MAX_KEY_FILE_BYTES).decode("latin-1").strip()
        except OSError as error:
            raise ConfigError(f"--api-key-file: {unread(options.api_key_file, error)}") from error
    elif not key:
        return ()
    if not (key.isascii() and key.isprintable() and key) or " " in key:
        raise ConfigError(f"{source} holds no API key: expected one word of ASCII characters")
    return (("authorization", f"Bearer {key}"),)


def tls_config(options: argparse.Namespace) -> TlsConfig:
    """Return the TLS configuration from the flags of `add_credential_flags`.

    Raises:
        ConfigError: they contradict each other.
    """
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    if ca is None and (cert or options.tls_server_name):
        raise ConfigError("--tls-ca is required with --tls-cert and --tls-server-name")
    return TlsConfig(cert=cert, key=key, ca=ca, server_name=options.tls_server_name)


def add_secret_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"file with the cluster secret or an operator's key (the variable {VARIABLE}, or "
        f"{DEFAULT_FILE}, which `baton up` writes)",
    )


def identity(options: argparse.Namespace) -> Identity | None:
    """Return the operator's identity from the flag of `add_secret_flag`, or None without a secret.

    Raises:
        ConfigError: the secret is unusable.
    """
    return identity_of("operator", f"operator@{socket.gethostname()}", _secret_file(options))


def _secret_file(options: argparse.Namespace) -> Path | None:
    file: Path | None = options.secret_file
    if file is None and VARIABLE not in os.environ and DEFAULT_FILE.exists():
        return DEFAULT_FILE
    return file


def secret_source(options: argparse.Namespace) -> str:
    """Return the source of the secret of `identity`, for authentication errors."""
    file = _secret_file(options)
    if file is not None:
        flag = "--secret-file" if file is options.secret_file else "`baton up` wrote it here"
        return f"the secret came from {file} ({flag})"
    if VARIABLE in os.environ:
        return f"the secret came from the variable {VARIABLE}"
    return f"no secret was sent: set --secret-file or the variable {VARIABLE}"


def operator_credentials(options: argparse.Namespace) -> tuple[Metadata, str]:
    """Return an operator's metadata for routers, and its source for authentication errors.

    Uses the given API key, or else the operator's key derived from the secret.

    Raises:
        ConfigError: the key or the secret is unusable.
    """
    metadata, operator = credentials(options), identity(options)
    if metadata or operator is None:
        return metadata, key_source(options)
    key = operator_keys(operator.keyrings.current())[0]
    return (("authorization", f"Bearer {key}"),), secret_source(options)


def key_source(options: argparse.Namespace) -> str:
    """Return the source of the key of `credentials`, for authentication errors."""
    if options.api_key_file is not None:
        return f"the API key came from {options.api_key_file} (--api-key-file)"
    if os.environ.get(KEY_VARIABLE):
        return f"the API key came from the variable {KEY_VARIABLE}"
    return f"no API key was sent: set --api-key-file or the variable {KEY_VARIABLE}"


def failure(error: grpc.aio.AioRpcError, address: str, source: str, flag: str = "--router") -> str:
    """Return an error of a call as a sentence.

    Args:
        source: source of the credential, named if the credential was rejected.
    """
    sentence = f"{address}: {error.code().name}: {error.details()}"
    if str(error.details()).startswith(_NOT_CONNECTED):
        # gRPC appends the status of the socket, which is OK if only the handshake failed.
        reason = str(error.details()).removesuffix(": OK").rpartition(": ")[2].strip("[]")
        return unreachable(address, reason, flag)
    unauthenticated = error.code() is grpc.StatusCode.UNAUTHENTICATED
    return f"{sentence} ({source})" if unauthenticated and source else sentence


def unreachable(address: str, reason: str, flag: str) -> str:
    """Return a sentence about a process that accepts no connection, with the fix."""
    start, fix = (
        "start one with `baton up` or `baton serve router`",
        f"name its address with {flag}",
    )
    if not flag:
        start, fix = "start the process", "correct the address"
    sentence = f"no {'router' if flag else 'node'} responds at {address} ({reason})"
    if "refused" in reason:
        return f"{sentence}: {start}, or {fix}"
    return (
        f"{sentence}: {fix}, set --tls-ca if it uses TLS, and --tls-cert and --tls-key if callers "
        "need a certificate"
    )


def certificates(options: argparse.Namespace) -> tls.Certificates | None:
    """Load the certificates that the flags of `add_credential_flags` name. Raises ConfigError."""
    return tls.certificates(tls_config(options), "--tls")


async def until_serving(
    address: str, service: str, certificates: tls.Certificates | None = None
) -> None:
    """Wait until the process at `address` reports `service` as healthy. Has no time limit."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with make_channel(address, certificates) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(request, timeout=_ANSWER_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                raise_if_cancelled()  # otherwise it is not up yet, or does not know the service yet
            await asyncio.sleep(_POLL_S)


async def stream(
    address: str,
    request: router_pb2.GenerateRequest,
    certificates: tls.Certificates | None = None,
    metadata: Metadata = (),
) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
    """Stream the response of the router at `address`. Leaving the iteration cancels the request.

    Raises:
        grpc.aio.AioRpcError: `details()` is the router's error message.
    """
    async with make_channel(address, certificates) as channel:
        stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request, metadata=metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()
