"""The command line of `baton up`, checked before any process starts."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from api.text import model_files
from cli import client, demo
from cli.local import plan
from cli.up.first_answer import Key, baton
from cli.up.screen import Screen
from common import settings
from common.config import ConfigRecord, DecodeConfig, PrefillConfig, RouterConfig
from common.copy_map import NodeShape
from common.errors import ConfigError
from common.identity.program import identity_of
from common.identity.secret import VARIABLE, new_secret, operator_keys
from common.model_directory import model_directory

PROGRAM = "baton up"
DEMO_NAME = "baton-demo"
_ROUTER_FLAGS = "--router-flags"


def parser() -> settings.ConfigArgumentParser:
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description="Start a router and nodes on this machine, wait until all are ready, and serve "
        "until Ctrl-C. A process that ends later is restarted.",
        epilog="Other flags are passed to every node, such as --engine.cache.page-size 32. "
        "`baton serve prefill --help-all` lists them.",
    )
    settings.add_options(
        parser,
        ("--model", str, None, None, "directory or hub id of a model (demo model)"),
        ("--draft-model", str, None, None, "directory or hub id of a draft model (none)"),
        ("--prefill", int, 1, "N", "number of prefill nodes, or of their groups (1)"),
        (
            "--decode",
            int,
            1,
            "N",
            "number of decode nodes, or of their groups. 0: only embeddings and scores (1)",
        ),
        ("--prefill-tp", int, 1, "N", "tensor-parallel ranks of each prefill node (1)"),
        ("--decode-tp", int, 1, "N", "tensor-parallel ranks of each decode node (1)"),
        ("--prefill-pp", int, 1, "N", "stages of each prefill node, 1 or 2 (1)"),
        ("--prefill-dp", int, 1, "N", "nodes of each prefill group, which share experts (1)"),
        ("--decode-dp", int, 1, "N", "nodes of each decode group, which share experts (1)"),
        ("--host", str, plan.HOST, None, "address of all processes (%(default)s)"),
        ("--port", _port, plan.ROUTER_PORT, None, "gRPC port of the router (%(default)s)"),
        ("--http-port", _port, plan.HTTP_PORT, "PORT", "HTTP port of the router (%(default)s)"),
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of nodes. auto: CUDA devices if there are any (%(default)s)",
    )
    _add_process_options(parser)
    client.add_credential_flags(parser, secret=False)
    return parser


def _add_process_options(parser: settings.ConfigArgumentParser) -> None:
    more = parser.add_advanced_group("processes", "Ports, files and lifetimes.")
    settings.add_options(
        more,
        *(
            (f"--{role}-port", _port, port, "PORT", f"port of the first {role} node ({port})")
            for role, port in (("prefill", plan.PREFILL_PORT), ("decode", plan.DECODE_PORT))
        ),
        (
            "--metrics-port",
            _port,
            None,
            "PORT",
            "metrics port of the router. Nodes use the next ports (none)",
        ),
        (
            _ROUTER_FLAGS,
            shlex.split,
            [],
            "FLAGS",
            "flags of the router: '--policy least_tokens --processes 2'",
        ),
        (
            "--var",
            Path,
            Path("var"),
            "DIR",
            "directory of logs (DIR/log) and of the new secret (var)",
        ),
        (
            "--secret-file",
            Path,
            None,
            "FILE",
            f"file with the cluster secret of all processes (the variable {VARIABLE}, or a new "
            "secret in DIR/secret)",
        ),
        ("--start-timeout", float, 900.0, "S", "seconds until all processes are ready (900)"),
    )
    more.add_argument(
        "--exit-on-failure",
        action="store_true",
        help="end all processes when one ends (it is restarted)",
    )
    timeout = "seconds for each process to end (60)"
    more.add_argument("--stop-timeout", type=float, default=60.0, metavar="S", help=timeout)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the flags left over for the nodes."""
    reads = parser()
    options, node_flags = reads.parse_known_args(_with_router_flags(arguments))
    reads.reject_unknown_flags(node_flags, PrefillConfig, DecodeConfig)
    sizes = "prefill_tp", "decode_tp", "prefill_pp", "prefill_dp", "decode_dp"
    for size in sizes:
        if getattr(options, size) < 1:
            settings.wrong(PROGRAM, f"--{size.replace('_', '-')} must be 1 or more")
    if min(options.prefill, options.decode) < 0 or not options.prefill + options.decode:
        settings.wrong(PROGRAM, "--prefill and --decode must be 0 or more, and one of them 1")
    if options.draft_model:
        drafter = f"--engine.speculative.draft-model={options.draft_model}"
        node_flags = ["--engine.speculative.method=draft_model", drafter, *node_flags]
    return options, node_flags


def _with_router_flags(arguments: Sequence[str]) -> list[str]:
    """Join the flags for the router to the option before them.

    argparse would read a single word that begins with dashes as an option of its own.
    """
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] == _ROUTER_FLAGS:
            joined[-1] = f"{_ROUTER_FLAGS}={word}"
        else:
            joined.append(word)
    return joined


def wish(
    options: argparse.Namespace, node_flags: list[str], screen: Screen
) -> plan.RequestedSystem:
    """Return the system to start. Fetches the model, and writes a secret if there is none.

    Exits if a process would reject its flags.

    Raises:
        ConfigError: the model or the secret is not available.
    """
    _check_flags(options, node_flags)
    model = _have_model(options.model, screen)
    if options.draft_model:
        model_directory(options.draft_model, weights=True)
    wished = plan.RequestedSystem(
        model=model,
        prefill=options.prefill,
        decode=options.decode,
        host=options.host,
        port=options.port,
        http_port=options.http_port,
        prefill_port=options.prefill_port,
        decode_port=options.decode_port,
        metrics_port=options.metrics_port,
        device=options.device,
        prefill_ranks=NodeShape(options.prefill_tp, options.prefill_pp),
        decode_ranks=NodeShape(options.decode_tp),
        prefill_dp=options.prefill_dp,
        decode_dp=options.decode_dp,
        groups=options.var.absolute() / "groups",
        node_flags=tuple(node_flags),
        router_flags=tuple(options.router_flags),
        tls=client.tls_config(options),
        secret_file=options.secret_file or _new_secret_file(options.var),
        served_model_name="" if options.model else DEMO_NAME,
    )
    if wished.tls.ca and not wished.tls.cert:
        raise ConfigError("--tls-ca, --tls-cert and --tls-key must be given together")
    return wished


def key(options: argparse.Namespace, secret_file: Path | None) -> Key:
    """Return the key to send with the sample request.

    It is the given API key, or else the operators' key of the secret. Routers accept that one
    wherever they require API keys.

    Raises:
        ConfigError: the given key, or the secret, is not usable.
    """
    config = settings.read(RouterConfig, PROGRAM, ["--model=m", *options.router_flags])
    metadata, shell = client.credentials(options), f"${client.KEY_VARIABLE}"
    if options.api_key_file is not None:
        shell = f"$(cat {shlex.quote(str(options.api_key_file))})"
    elif not metadata:
        identity = identity_of("operator", PROGRAM, secret_file)
        assert identity is not None  # `wish` has written a secret if there was none
        key = operator_keys(identity.keyrings.current())[0]
        metadata = (("authorization", f"Bearer {key}"),)
        flag = f" --secret-file {shlex.quote(str(secret_file))}" if secret_file else ""
        shell = f"$({baton()} cluster-secret --operator{flag})"
    return Key(metadata, shell if config.clients.api_keys is not None else "")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"a port is from 1 to 65535, got {text!r}")
    return int(text)


def _check_flags(options: argparse.Namespace, node_flags: list[str]) -> None:
    """Exit if a process that is to be started would reject its flags."""
    colocated = [] if options.prefill else ["--mode=colocated"]
    records: list[tuple[type[ConfigRecord], list[str]]] = [(RouterConfig, options.router_flags)]
    if options.prefill:
        ranks = NodeShape(options.prefill_tp, options.prefill_pp)
        group = plan.group_flags(options.prefill_dp, 0, options.var)
        records.append((PrefillConfig, [*plan.rank_flags(ranks), *group, *node_flags]))
    if options.decode:
        flags = plan.rank_flags(NodeShape(options.decode_tp))
        flags += plan.group_flags(options.decode_dp, 0, options.var)
        records.append((DecodeConfig, [*flags, *colocated, *node_flags]))
    for record, flags in records:
        settings.read(record, PROGRAM, [f"--model={options.model or 'demo'}", *flags])


def _have_model(model: str | None, screen: Screen) -> str:
    """Return the model to serve. Fetches it if it is not on this machine yet.

    Raises:
        ConfigError: it is neither a directory nor available from the hub, or no such checkpoint.
    """
    if model is None:
        return str(demo.DIRECTORY)
    if not Path(model).is_dir():
        screen.say(f"fetching {model}, unless it is here already")
    directory = model_directory(model, weights=True)
    model_files.load(str(directory))
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model: there are no weights (*.safetensors) in {directory}")
    return model


def _new_secret_file(var: Path) -> Path | None:
    """Write a new secret to a file that only this user can read. None if the environment has one.

    Raises:
        ConfigError: it cannot be written.
    """
    if VARIABLE in os.environ:
        return None
    file, new = var / "secret", var / "secret.new"
    try:
        var.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(f"{new_secret()}\n")
        new.replace(file)
    except OSError as error:
        raise ConfigError(f"--var: cannot write {file}: {error.strerror}") from error
    return file
