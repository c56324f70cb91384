"""Findings of `baton check` about one process. Imports the libraries of a node."""

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cli.check.sizes import rank_sizes, sentence
from cli.local.plan import refuse_busy_port
from cli.operating.command import size
from common import tls
from common.config import (
    EncodeConfig,
    EngineConfig,
    NodeConfig,
    ParallelConfig,
    RouterConfig,
    ServerConfig,
    SpeculativeConfig,
    TlsConfig,
    TransferConfig,
)
from common.errors import ConfigError
from common.identity import program
from common.identity.guard import Role
from common.identity.program import identity_of
from common.model_directory import model_directory
from common.process.network import own_address
from common.rpc.channels import join_address
from encode_node.engine_main import PlannedEncoder
from engine.load import OpenedModel, usable_bytes
from engine.models import open_checkpoint
from engine.models.checkpoint import Checkpoint
from engine.models.linear import rounding_of, stays_stored
from engine.models.precision import choose_precision
from engine.models.spec import NOT_QUANTISED, ModelSpec
from engine.processor import matrix_features, threads_at_hand, usable_cores
from engine.ranks import Share
from engine.ranks.meeting import NETWORK
from engine.runner.cpu import use_cpu
from engine.sizing import resolve_device, resolve_shape
from kernels.cpu.compiler import COMPILERS, cache_directory, compiler, prebuilt

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
SOON = timedelta(days=14)  # warning time for a certificate that is not renewed
STYLES = {"ok": "green", "note": "yellow", "fails": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    verdict: str  # "ok" | "note": runs, but may surprise | "fails"
    remark: str


def fail(findings: Iterable[Finding]) -> bool:
    """Return whether any of the findings prevents a process from running."""
    return any(finding.verdict == "fails" for finding in findings)


def of(config: RouterConfig | NodeConfig) -> Iterator[Finding]:
    """Check model, KV transfer, server and callers of a process, in the order of its start."""
    if isinstance(config, RouterConfig):
        yield from _router(config)
        return
    # An encode node loads only the image encoder.
    yield from _encoder(config) if isinstance(config, EncodeConfig) else _model(config.engine)
    yield from _transfer(config.transfer)
    yield from _front(config.server)
    yield _callers("node", config.server, mutual=config.server.tls.mutual)


def _router(config: RouterConfig) -> Iterator[Finding]:
    """Check the configuration of a router, which needs neither weights nor devices."""
    for each in config.each_model:
        try:
            directory = model_directory(each.model, weights=False)
        except ConfigError as error:
            yield Finding("model", "fails", str(error))
        else:
            yield Finding("model", "ok", str(directory))
            yield _text(directory)
        yield Finding("nodes", *_named(each))
    yield from _front(config.server)
    yield _port("HTTP port", config.server.host, config.http_port, "--http-port")
    mutual = config.server.tls.mutual or config.tls_to_nodes.mutual
    yield _callers("router", config.server, mutual=mutual)
    if config.tls_to_nodes.ca is not None:
        yield from _tls("TLS to nodes", config.tls_to_nodes, "--node-tls")
    elif config.server.tls.cert is not None:
        yield Finding("TLS to nodes", "note", "off: for clients alone, without --node-tls.ca")


def _model(config: EngineConfig) -> Iterator[Finding]:
    try:
        directory = model_directory(config.model, weights=True)
        loadable = open_checkpoint(directory, config.model_backend, config.speculative)
        spec = loadable.spec
        checkpoint = Checkpoint(directory)
        loadable.stored()
        yield Finding("model", "ok", f"{spec.architecture}, {len(spec.layers)} layers: {directory}")
        yield Finding("computed", "ok", loadable.computed)
        yield from _drafter(config.speculative, spec)
        places = range(config.parallel.ranks_per_host)
        devices = [resolve_device(config.device, place) for place in places]
        device = devices[0]
        yield Finding("device", "ok", _device(devices, config))
        if device.type == "cpu":
            yield _operations(config)
            if spec.stored != NOT_QUANTISED:  # the format of its matrices depends on them
                use_cpu(torch.get_num_threads(), config.cpu_kernels)
        precision = choose_precision(config.dtype, device, checkpoint, matrix_features())
        yield Finding("dtype", "ok", f"{precision}: {precision.because}")
        yield _weights(spec, device, config)
        sizes = rank_sizes(config, OpenedModel(directory, loadable, device, precision))
        if len(sizes) > 1:
            yield Finding("ranks", "ok", sentence(sizes))
        if config.parallel.trusted_network is not None:
            yield _hosts(config.parallel, config.parallel.trusted_network)
        # Weights first: the KV pool gets the remaining memory.
        free = min(usable_bytes(each, config) for each in devices)
        weights = max(each.weight_bytes for each in sizes)
        shape = resolve_shape(
            config,
            spec,
            dtype=precision.dtype,
            free=free - weights,
            share=Share(0, len(sizes)),
        )
    except ConfigError as error:
        yield Finding("model and device", "fails", str(error))
        return
    pool = shape.num_pages * shape.layout.page_bytes
    fits = shape.layout.tables.max_tokens(shape.num_pages)
    each = "" if len(sizes) == 1 else "each rank: "
    remark = (
        f"{each}{size(weights)} of weights and {size(pool)} of KV in {size(free)}: "
        f"{shape.num_pages} pages, {fits} tokens"
    )
    yield Finding("memory", "ok" if free > weights + pool else "fails", remark)
    enough = fits > shape.context_length
    remark = f"{shape.context_length} tokens" + ("" if enough else f", but the pool holds {fits}")
    yield Finding("context", "ok" if enough else "note", remark)
    yield _text(directory)


def _encoder(config: EncodeConfig) -> Iterator[Finding]:
    try:
        plan = PlannedEncoder.of(config)
        stored = len(plan.vision.stored())
    except ConfigError as error:
        yield Finding("image encoder", "fails", str(error))
        return
    opened = plan.opened
    architecture = opened.loadable.spec.architecture
    yield Finding("image encoder", "ok", f"of {architecture}, {stored} tensors: {opened.directory}")
    yield Finding("device", "ok", _device([opened.device], config.engine))
    yield Finding("dtype", "ok", f"{opened.precision}: {opened.precision.because}")
    pool = plan.num_pages * plan.layout.page_bytes
    remark = (
        f"{size(plan.weight_bytes)} of weights and cached embeddings, and {size(pool)} of pages in "
        f"{size(plan.usable_bytes)}: {plan.num_pages} pages"
    )
    yield Finding("memory", "ok", remark)


def _drafter(config: SpeculativeConfig, spec: ModelSpec) -> Iterator[Finding]:
    """Report the source of draft tokens, if speculation is enabled."""
    whose = {
        "ngram": "earlier occurrences of the same tokens",
        "mtp": "a layer of the checkpoint",
        "eagle": f"an EAGLE head: {config.draft_model}",
        "draft_model": f"a draft model: {config.draft_model}",
    }
    if config.method in whose:
        kept = "" if spec.draft is None else f", whose KV has {spec.draft.words}"
        drafts = f"at most {config.num_speculative_tokens}, from {whose[config.method]}{kept}"
        yield Finding("drafts", "ok", drafts)


def _weights(spec: ModelSpec, device: torch.device, config: EngineConfig) -> Finding:
    """Report the format of the stored weights, and their conversion when they are loaded."""
    rounding = rounding_of(device, config.quantize, spec.format)
    if rounding == "none":
        kept = spec.stored == NOT_QUANTISED or stays_stored(device, spec.format)
        rounding = "as stored" if kept else "converted to floats when loaded"
    return Finding("weights", "ok", f"{spec.stored}, {rounding}")


def _operations(config: EngineConfig) -> Finding:
    if config.cpu_kernels == "off":
        return Finding("compiled operations", "note", "off, as configured: torch's own are slower")
    if (built := prebuilt()) is not None:
        return Finding("compiled operations", "ok", f"prebuilt, {built}")
    if (program := compiler()) is None:
        remark = f"none, which makes steps slower: no C++ compiler ({', '.join(COMPILERS)} or $CXX)"
        return Finding("compiled operations", "note", remark)
    return Finding("compiled operations", "ok", f"by {program}, kept in {cache_directory()}")


def _text(directory: Path) -> Finding:
    if not (directory / "tokenizer.json").is_file():
        return Finding("tokenizer", "note", "no tokenizer.json: no router can serve this model")
    return Finding("tokenizer", "ok", "tokenizer.json")


def _hosts(config: ParallelConfig, network: str) -> Finding:
    host = own_address(network, NETWORK).host
    each = f"{config.ranks_per_host} rank{'s' if config.ranks_per_host > 1 else ''}"
    where = join_address(host, config.listen_port)
    return Finding("hosts", "ok", f"{config.hosts} with {each} each. Rank hosts join at {where}")


def _device(devices: Sequence[torch.device], config: EngineConfig) -> str:
    if devices[0].type == "cuda":
        return ", ".join(f"{each}: {torch.cuda.get_device_name(each)}" for each in devices)
    features = ", ".join(matrix_features()) or "no 16-bit or 8-bit matrix instructions"
    num_ranks = config.parallel.ranks_per_host
    threads = config.threads or max(1, threads_at_hand(os.environ) // num_ranks)
    each = "" if num_ranks == 1 else " for each rank"
    return f"cpu with {features}, {usable_cores()} cores, {threads} threads{each}"


def _transfer(config: TransferConfig) -> Iterator[Finding]:
    if config.backend == "tcp":
        yield Finding("KV transfer", "ok", "tcp, as configured")
        return
    missing = "note" if config.backend == "auto" else "fails"
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        yield Finding("KV transfer", missing, "nixl is not installed. tcp works without it")
    elif YAMA.exists() and YAMA.read_text().strip() != "0" and os.geteuid() != 0:
        remark = f"{YAMA} forbids access to the memory of other processes: tcp is used"
        yield Finding("KV transfer", missing, remark)
    else:
        yield Finding("KV transfer", "ok", "nixl. Nodes verify the path when they pair")


def _front(config: ServerConfig) -> Iterator[Finding]:
    for what, port, flag in (
        ("port", config.port, "--port"),
        ("metrics port", config.metrics_port, "--metrics-port"),
        ("health port", config.health_port, "--server.health-port"),
    ):
        if port is not None:
            yield _port(what, config.host, port, flag)
    yield from _tls("TLS", config.tls, "--server.tls")


def _callers(role: Role, server: ServerConfig, *, mutual: bool) -> Finding:
    """Check which callers a process accepts, and how Baton's processes authenticate."""
    try:
        identity = identity_of(role, "baton check", server.secret_file)
        authenticated = identity is not None or mutual
        program.check_exposure(server.host, authenticated=authenticated, insecure=server.insecure)
    except ConfigError as error:
        return Finding("callers", "fails", str(error))
    if identity is not None:
        return Finding("callers", "ok", "processes authenticate by the cluster secret")
    if mutual:
        return Finding("callers", "ok", "processes authenticate by their certificates")
    verdict = "note" if server.insecure else "ok"
    return Finding("callers", verdict, f"authentication is disabled on {server.host}")


def _tls(what: str, config: TlsConfig, setting: str) -> Iterator[Finding]:
    try:
        certificates = tls.certificates(config, setting)
    except ConfigError as error:
        yield Finding(what, "fails", str(error))
        return
    if certificates is None:
        return
    if config.cert is None:
        yield Finding(what, "ok", f"verified by {config.ca}, without its own certificate")
        return
    names, end = tls.names_and_end(certificates.current())
    soon = end - datetime.now(UTC) < SOON
    remark = f"{tls.kind(certificates)}: {', '.join(names) or 'no names'}, until {end:%F}"
    yield Finding(what, "note" if soon else "ok", remark)


def _port(what: str, host: str, port: int, flag: str) -> Finding:
    try:
        refuse_busy_port(host, port, "this process", flag)
    except ConfigError as error:
        return Finding(what, "fails", str(error))
    return Finding(what, "ok", f"{host}:{port} is free")


def _named(config: RouterConfig) -> tuple[str, str]:
    if not config.decode:
        return "fails", "--decode names no node"
    return "ok", f"{len(config.prefill)} prefill, {len(config.decode)} decode"


def print_table(title: str, findings: Sequence[Finding]) -> None:
    styled = (f"[{STYLES[each.verdict]}]{each.verdict}" for each in findings)
    rows = [(each.what, cell, each.remark) for each, cell in zip(findings, styled, strict=True)]
    print_rows(title, ("", "verdict", "remark"), rows)


def print_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table for people."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
