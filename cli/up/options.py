"""The command line of `baton up`, checked before any process starts."""

import argparse
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from api.text import model_files
from cli import client, demo
from cli.local import plan
from cli.up.first_answer import Key, baton
from cli.up.screen import Screen
from common import settings
from common.config import (
    MAX_MODELS,
    ConfigRecord,
    DecodeConfig,
    EncodeConfig,
    NodeConfig,
    PrefillConfig,
    RouterConfig,
)
from common.copy_map import NodeShape
from common.errors import ConfigError
from common.identity.program import identity_of
from common.identity.secret import VARIABLE, new_secret, operator_keys
from common.model_directory import model_directory
from simulation.node.options import check_config
from simulation.node.tokenizer import has_model_files, write_model_files

PROGRAM = "baton up"
DEMO_NAME = "baton-demo"
_port = client.ranged(int, 1, 65535)
_ROUTER_FLAGS = "--router-flags"
_PORTS = {"prefill": plan.PREFILL_PORT, "decode": plan.DECODE_PORT, "encode": plan.ENCODE_PORT}
_SIZES = "prefill_tp", "decode_tp", "prefill_pp", "prefill_dp", "decode_dp"
# Flag, type, name of the value, and help.
_OF_EACH_MODEL: Sequence[tuple[str, type, str, str]] = (
    ("--served-model-name", str, "NAME", "name of the model for clients (the value of --model)"),
    ("--prefill", int, "N", "number of prefill nodes, or of their groups (1)"),
    (
        "--decode",
        int,
        "N",
        "number of decode nodes, or of their groups. 0: only embeddings and scores (1)",
    ),
    ("--encode", int, "N", "number of encode nodes, for images (0)"),
    ("--prefill-tp", int, "N", "tensor-parallel ranks of each prefill node (1)"),
    ("--decode-tp", int, "N", "tensor-parallel ranks of each decode node (1)"),
    ("--prefill-pp", int, "N", "stages of each prefill node, 1 or 2 (1)"),
    ("--prefill-dp", int, "N", "nodes of each prefill group, which share experts (1)"),
    ("--decode-dp", int, "N", "nodes of each decode group, which share experts (1)"),
)
_SIMULATED = "sim:"
T = TypeVar("T")


def parser() -> settings.ConfigArgumentParser:
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description="Start a router and nodes on this machine, wait until all are ready, and serve "
        "until Ctrl-C. A process that ends later is restarted. With several --model, one router "
        "serves them all. Then options of a model are given once for all models, or once for each "
        "in the order of --model.",
        epilog="Other flags are passed to every node, such as --engine.cache.page-size 32. "
        "`baton serve prefill --help-all` lists them.",
    )
    for flag, kind, metavar, text in (
        ("--model", str, None, "directory or hub id of a model. Can be repeated (demo model)"),
        *_OF_EACH_MODEL,
    ):
        parser.add_argument(flag, type=kind, action="append", metavar=metavar, help=text)
    settings.add_options(
        parser,
        ("--draft-model", str, None, None, "directory or hub id of a draft model (none)"),
        ("--host", str, plan.HOST, None, "address of all processes (%(default)s)"),
        ("--port", _port, plan.ROUTER_PORT, None, "gRPC port of the router (%(default)s)"),
        ("--http-port", _port, plan.HTTP_PORT, "PORT", "HTTP port of the router (%(default)s)"),
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="auto",
        metavar="{auto,cpu,cuda,sim:GPU}",
        help="device of nodes. auto: CUDA devices if there are any. sim:h100: simulated "
        "nodes, see docs/simulation.md (%(default)s)",
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
            for role, port in _PORTS.items()
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
    reads.reject_unknown_flags(node_flags, PrefillConfig, DecodeConfig, EncodeConfig)
    options.models = _models(options)
    if options.draft_model:
        if len(options.models) > 1:
            settings.wrong(PROGRAM, "--draft-model needs a single --model")
        drafter = f"--engine.speculative.draft-model={options.draft_model}"
        node_flags = ["--engine.speculative.method=draft_model", drafter, *node_flags]
    return options, node_flags


def _models(options: argparse.Namespace) -> tuple[plan.RequestedModel, ...]:
    """Return the requested models. Exits if an option is invalid."""
    models = options.model or [str(demo.DIRECTORY)]
    if len(models) > MAX_MODELS:
        settings.wrong(PROGRAM, f"{len(models)} times --model: at most {MAX_MODELS} are allowed")
    simulated = options.device.startswith(_SIMULATED)
    if simulated:
        if not options.model:
            settings.wrong(PROGRAM, f"--device {options.device} needs --model, such as llama-3-8b")
        if 0 in (options.decode or ()):
            settings.wrong(PROGRAM, "--decode 0 is for embeddings, which are not simulated")
    given = vars(options)
    counts = {
        name: _of_each(name, given[name] or [1], len(models))
        for name in ("prefill", "decode", *_SIZES)
    }
    counts["encode"] = _of_each("encode", options.encode or [0], len(models))
    default_names = [DEMO_NAME] if not options.model else [""]
    if simulated:
        default_names = [f"simulated/{Path(model).name}" for model in models]
    names = _of_each("served_model_name", options.served_model_name or default_names, len(models))
    for name in _SIZES:
        if min(counts[name]) < 1:
            settings.wrong(PROGRAM, f"--{name.replace('_', '-')} must be 1 or more")
    if any(
        min(pair) < 0 or not sum(pair)
        for pair in zip(counts["prefill"], counts["decode"], strict=True)
    ):
        settings.wrong(PROGRAM, "--prefill and --decode must be 0 or more, and one of them 1")
    for encode, prefill in zip(counts["encode"], counts["prefill"], strict=True):
        if encode < 0 or (encode and (simulated or not prefill)):
            settings.wrong(PROGRAM, "--encode needs prefill nodes, which are not simulated")
    requested = tuple(
        plan.RequestedModel(
            model,
            plan.RequestedNodes(
                of["prefill"], NodeShape(of["prefill_tp"], of["prefill_pp"]), of["prefill_dp"]
            ),
            plan.RequestedNodes(of["decode"], NodeShape(of["decode_tp"]), of["decode_dp"]),
            name,
            _files_of(options, model) if simulated else "",
            plan.RequestedNodes(of["encode"]),
        )
        for number, (model, name) in enumerate(zip(models, names, strict=True))
        for of in [{each: values[number] for each, values in counts.items()}]
    )
    for name, count in Counter(each.name for each in requested).items():
        if count > 1:
            settings.wrong(PROGRAM, f"{count} models are called {name!r}: set --served-model-name")
    return requested


def _files_of(options: argparse.Namespace, model: str) -> str:
    """Return the directory of a simulated model's files, which the router reads."""
    if has_model_files(model):
        return model
    return str(options.var.absolute() / "simulated" / Path(model).name)


def _of_each(name: str, given: Sequence[T], num_models: int) -> Sequence[T]:
    """Return the value of an option for each model. Exits if there are too few or too many."""
    if len(given) == 1:
        return [*given] * num_models
    if len(given) != num_models:
        flag = name.replace("_", "-")
        sentence = (
            f"--{flag}: {len(given)} values for {num_models} models: give one, or one for each"
        )
        settings.wrong(PROGRAM, sentence)
    return given


def _with_router_flags(arguments: Sequence[str]) -> list[str]:
    """Join the option for router flags with its value.

    argparse would read a separate word that begins with dashes as another option.
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
    """Return the system to start. Downloads the model, and writes a secret if the file is missing.

    Exits if a process would reject its flags.

    Raises:
        ConfigError: the model or the secret is not available.
    """
    for model in options.models:
        _check_flags(options, model, node_flags)
    if options.device.startswith(_SIMULATED):
        screen.say("simulated nodes: all times are those of a model, not measurements")
        for model in options.models:
            if not has_model_files(model.model):
                write_model_files(model.model, Path(model.router_model))
    else:
        for name in options.model or ():
            _have_model(name, screen)
    if options.draft_model:
        model_directory(options.draft_model, weights=True)
    wished = plan.RequestedSystem(
        models=options.models,
        host=options.host,
        port=options.port,
        http_port=options.http_port,
        prefill_port=options.prefill_port,
        decode_port=options.decode_port,
        encode_port=options.encode_port,
        metrics_port=options.metrics_port,
        device=options.device,
        groups=options.var.absolute() / "groups",
        node_flags=tuple(node_flags),
        router_flags=tuple(options.router_flags),
        tls=client.tls_config(options),
        secret_file=options.secret_file or _new_secret_file(options.var),
    )
    if wished.tls.ca and not wished.tls.cert:
        raise ConfigError("--tls-ca, --tls-cert and --tls-key must be given together")
    return wished


def key(options: argparse.Namespace, secret_file: Path | None) -> Key:
    """Return the key to send with the sample request.

    Uses the given API key, or else the operator's key derived from the secret, which routers accept
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


def _device(text: str) -> str:
    if text not in ("auto", "cpu", "cuda") and not text.startswith(_SIMULATED):
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda or sim:GPU, got {text!r}")
    return text


def _check_flags(
    options: argparse.Namespace, model: plan.RequestedModel, node_flags: list[str]
) -> None:
    """Exit if a process to be started for a model would reject its flags."""
    colocated = [] if model.prefill.total else ["--mode=colocated"]
    roles: Sequence[tuple[type[ConfigRecord], plan.RequestedNodes, list[str]]] = (
        (PrefillConfig, model.prefill, []),
        (DecodeConfig, model.decode, colocated),
        (EncodeConfig, model.encode, []),
    )
    records: list[tuple[type[ConfigRecord], list[str]]] = [(RouterConfig, options.router_flags)]
    for record, nodes, own in roles:
        if nodes.total:
            flags = plan.rank_flags(nodes.ranks) + plan.group_flags(nodes.dp, 0, options.var)
            records.append((record, [f"--device={options.device}", *flags, *own, *node_flags]))
    for record, flags in records:
        config = settings.read(record, PROGRAM, [f"--model={model.model}", *flags])
        if isinstance(config, NodeConfig) and config.engine.simulated_gpu:
            check_config(config)


def _have_model(model: str, screen: Screen) -> None:
    """Download a model if it is not on this machine yet.

    Raises:
        ConfigError: it is neither a directory nor available from the hub, or is not a checkpoint.
    """
    if not Path(model).is_dir():
        screen.say(f"downloading {model} unless it is cached")
    directory = model_directory(model, weights=True)
    model_files.load(str(directory))
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model: there are no weights (*.safetensors) in {directory}")


def _new_secret_file(var: Path) -> Path | None:
    """Write a new secret to a file that only this user can read. None if the environment has one.

    Raises:
        ConfigError: the file cannot be written.
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
