"""Loading: from a configuration to a model in memory, or to the part of it that a rank has."""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

from common.config import (
    EngineConfig,
    HiddenStatesConfig,
    ParallelConfig,
    RoutedExpertsConfig,
)
from common.errors import ConfigError
from common.logs import kv
from common.model_directory import model_directory
from common.requests.namespace import WeightsId
from engine import batch_invariance
from engine.adapters.adapters import AdapterBank, bank_of
from engine.batch.limits import RequestLimits, StateLimit
from engine.kv_cache.layout import KVLayout
from engine.models import (
    LoadableModel,
    LoadTarget,
    Model,
    constants,
    content,
    open_checkpoint,
    stored_of,
    tokenizer_hash,
)
from engine.models.blocks.operations import use_operations
from engine.models.checkpoint import Checkpoint
from engine.models.linear import rounding_of
from engine.models.precision import Precision, choose_precision
from engine.models.refill import relocated
from engine.processor import matrix_features, threads_at_hand
from engine.ranks import WHOLE, Share
from engine.ranks.expert_exchange import ExpertExchange
from engine.ranks.processes import Followers
from engine.runner.cpu import use_cpu
from engine.runner.gpu import choose_early_launch, use_gpu
from engine.sizing import (
    NCCL_BYTES,
    EngineShape,
    free_bytes,
    part_of,
    releasable_memory,
    resolve_device,
    whole_layout,
)
from kernels import device as devices
from kernels.cuda.driver import CudaError
from kernels.cuda.virtual_memory import Region

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A checkpoint to be loaded, in a process that is set up for its device."""

    directory: Path
    loadable: LoadableModel
    device: torch.device
    precision: Precision


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory.

    Attributes:
        constants: the model's part of the fingerprint.
        weights_id: id of the files in `directory`, computed while the model is loaded.
        bank: device memory of LoRA adapters.
        followers: processes with the other parts. None: this process has the whole model.
        region: memory of the weights if it can be released. None for host memory, for example.
    """

    directory: Path
    loadable: LoadableModel
    model: Model
    constants: Mapping[str, str]
    tokenizer_hash: str
    weights_id: "Future[WeightsId]"
    bank: AdapterBank
    followers: Followers | None = None
    share: Share = WHOLE
    region: Region | None = None

    def limits(self, shape: EngineShape, config: EngineConfig) -> RequestLimits:
        spec, routed = self.model.spec, self.model.routed
        return RequestLimits(
            context_length=shape.context_length,
            vocabulary_size=spec.vocabulary_size,
            tables=shape.tables,
            num_pages=shape.num_pages,
            generates=spec.generates,
            num_labels=spec.num_labels,
            image_token_side=spec.image_token_side,
            image_tokens_per_side=spec.image_tokens_per_side,
            video_frames=spec.video_frames,
            whole_images=spec.whole_images,
            eos_token_ids=spec.eos_token_ids,
            hidden_states=_state_limit("hidden_states", 4 * spec.hidden_size, config.hidden_states),
            embedding_size=spec.hidden_size if config.input_embeddings.enabled else 0,
            routed_experts=_state_limit(
                "routed_experts", routed.token_bytes if routed else 0, config.routed_experts
            ),
        )

    def fingerprint(self, shape: EngineShape) -> dict[str, str]:
        """Return the fingerprint without the weights. See Engine.fingerprint."""
        return {**self.constants, **layout_fields(shape.whole)}


def load(
    config: EngineConfig,
    follower_program: str = "",
    relay: Sequence[str] = (),
    exchange: ExpertExchange | None = None,
) -> LoadedModel:
    """Load the model, and set up this process for its device. For a node with several ranks, start
    the followers, and wait until they have loaded their parts.

    Args:
        follower_program, relay: see Followers.
        exchange: exchange with the nodes that share the experts of the model.
    Raises:
        ConfigError: the model is not supported, or its weights are too large.
    """
    opened = open_model(config)
    if config.batch_invariant:
        batch_invariance.check(config, opened.device, opened.precision.dtype, opened.loadable)
    weights_id = named_weights(opened)
    check_features(config, opened.loadable.backend)
    if exchange is not None:
        check_group(config, opened.device)
    if config.parallel.num_ranks == 1:
        loaded = _loaded(config, opened, weights_id, None, Share(exchange=exchange))
        keep_invariance(config, loaded.model, loaded.share)
        return loaded
    parallel = with_collectives(config, opened.device)
    with_parallel = config.model_copy(update={"parallel": parallel})
    followers = Followers(with_parallel, follower_program, relay)
    try:
        loaded = _loaded(config, opened, weights_id, followers, followers.share)
        others = [each.fingerprint for each in followers.loaded()]
        if parallel.hosts > 1:
            _check_files(fingerprint_of(config, opened, weights_id.result()), others, parallel)
        keep_invariance(config, loaded.model, loaded.share)
        return loaded
    except BaseException:
        followers.close()
        raise


def open_model(config: EngineConfig, rank: int = 0) -> OpenedModel:
    """Read the configuration of the model, and set up this process for the device of its rank.

    Raises:
        ConfigError: the model is not supported.
    """
    device = resolve_device(config.device, config.parallel.place(rank))
    if device.type == "cpu":
        if config.memory_saver:
            raise ConfigError(
                "engine.memory_saver is for GPUs: the memory of a CPU can be released without it"
            )
        num_ranks = config.parallel.ranks_per_host
        threads = config.threads or max(1, threads_at_hand(os.environ) // num_ranks)
        use_cpu(threads, config.cpu_kernels)
    else:
        use_gpu(device)  # in this thread, because it launches kernels
        choose_early_launch(device, wanted=config.early_launch)
        devices.use_batch_invariant(config.batch_invariant)
    directory = model_directory(config.model, weights=True)
    loadable = open_checkpoint(directory, config.model_backend, config.speculative)
    precision = choose_precision(config.dtype, device, Checkpoint(directory), matrix_features())
    use_operations(config, device, precision.dtype, loadable.spec)
    return OpenedModel(directory, loadable, device, precision)


def load_part(
    config: EngineConfig, opened: OpenedModel, share: Share
) -> tuple[Model, AdapterBank, Region | None]:
    """Load a rank's part of the model, and allocate the memory of its adapters. Return both, and
    the region of the weights as in LoadedModel.

    Raises:
        ConfigError: the weights are too large.
    """
    device = opened.device
    target = LoadTarget(device, opened.precision.dtype, config.quantize, share)
    needed = opened.loadable.weight_bytes(target)
    free = usable_bytes(device, config)
    if needed > free:
        raise ConfigError(
            f"{config.model}: the weights take {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} "
            f"GiB of {device} may be used (engine.cache.memory_fraction "
            f"{config.cache.memory_fraction})"
        )
    model = opened.loadable.load(target)
    region = None
    if (memory := releasable_memory(config, device)) is not None:
        try:
            region = relocated(opened.loadable.tensors(model), memory)
        except CudaError as error:
            raise ConfigError(
                f"engine.memory_saver: the weights cannot be moved: {error}"
            ) from error
    return model, bank_of(config.lora, model, usable_bytes(device, config)), region


def keep_invariance(config: EngineConfig, model: Model, share: Share) -> None:
    """Prepare a loaded part for `engine.batch_invariant`, if it is set. All ranks of a node call
    this at the same time. Raise ConfigError as `batch_invariance.keep` does."""
    if config.batch_invariant:
        whole = whole_layout(config, model.spec, model.dtype, model.device)
        batch_invariance.keep(model, part_of(whole, share))


def _loaded(
    config: EngineConfig,
    opened: OpenedModel,
    weights_id: Future[WeightsId],
    followers: Followers | None,
    share: Share,
) -> LoadedModel:
    model, bank, region = load_part(config, opened, share)
    fields = model_fields(config, opened)
    log.info(
        "model loaded %s",
        kv(
            device=str(model.device),
            ranks=share.num_ranks,
            computed=opened.loadable.computed,
            dtype=str(opened.precision),
            reason=opened.precision.because,
            quantize=fields["quantize"],
            stored=model.spec.stored,
            threads=torch.get_num_threads(),
        ),
    )
    return LoadedModel(
        opened.directory,
        opened.loadable,
        model,
        fields,
        tokenizer_hash(opened.directory),
        weights_id,
        bank,
        followers,
        share,
        region,
    )


def model_fields(config: EngineConfig, opened: OpenedModel) -> dict[str, str]:
    """Return the part of the fingerprint that describes how the model is computed."""
    rounding = rounding_of(
        opened.device,
        config.quantize,
        opened.loadable.spec.format,
        ranks=config.parallel.tp,
    )
    # Nodes without batch invariance may use each other's KV, even if their arithmetic differs.
    arithmetic = {}
    if config.batch_invariant:
        arithmetic["arithmetic"] = batch_invariance.arithmetic(
            config.parallel.tp, opened.loadable.backend, opened.device
        )
    fields = {"dtype": str(opened.precision), "quantize": rounding}
    return {**constants(opened.loadable), **fields, **arithmetic}


def fingerprint_of(config: EngineConfig, opened: OpenedModel, weights: WeightsId) -> dict[str, str]:
    """Return the values that must be equal on all hosts of a node, whose files may differ."""
    return {**model_fields(config, opened), "weights": weights.hex()}


def _check_files(
    own: Mapping[str, str], others: Sequence[Mapping[str, str]], config: ParallelConfig
) -> None:
    """Raise ConfigError if another host has another model. `others`: fingerprints of followers, by
    rank from 1 on. Empty ones are not compared."""
    for rank, other in enumerate(others, start=1):
        if differing := [name for name, value in other.items() if value != own[name]]:
            host = rank // config.ranks_per_host
            raise ConfigError(
                f"the model on host {host} differs from that on the first host in: "
                f"{', '.join(differing)}"
            )


def layout_fields(whole: KVLayout) -> dict[str, str]:
    """Return the part of the fingerprint that describes pages with all heads."""
    return {
        "page_size": str(whole.page_size),
        "kv_dtype": str(whole.dtype).removeprefix("torch."),
        "kv_layout": whole.describe(),
        "kv_token_bytes": str(whole.token_bytes),
    }


def with_collectives(config: EngineConfig, device: torch.device) -> ParallelConfig:
    """Return the configuration of several ranks on such devices, with the chosen collectives
    instead of auto. Raise ConfigError if they do not support the devices or a feature."""
    if config.parallel.pp > 1:
        # Drafters with KV other than MTP layers need layers of both stages or token ids.
        drafter = config.speculative.method
        settings = {f"speculative.method: {drafter}": drafter not in ("none", "mtp")}
        _refuse(settings, "engine.parallel.pp 2")
    on_gpus, wanted = device.type == "cuda", config.parallel.collectives
    on_cpus = "gloo" if config.parallel.hosts > 1 else "shm"
    kind = ("nccl" if on_gpus else on_cpus) if wanted == "auto" else wanted
    if on_gpus != (kind == "nccl"):
        only = "GPUs" if kind == "nccl" else "CPUs"
        raise ConfigError(
            f"engine.parallel.collectives: {kind} is for ranks on {only}, and engine.device is "
            f"{device}; auto chooses by the device"
        )
    if on_gpus and not distributed.is_nccl_available():
        raise ConfigError("engine.parallel.collectives: this torch is built without NCCL")
    return config.parallel.model_copy(update={"collectives": kind})


def check_group(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError if a data-parallel group does not support the device or a feature."""
    drafter, collectives = config.speculative, config.parallel.collectives
    settings = {
        f"device: {device}": device.type != "cpu",
        f"parallel.collectives: {collectives}": collectives not in ("auto", "shm"),
        f"speculative.method: {drafter.method}": drafter.has_layers,
        "weights_dir": config.weights_dir is not None,
    }
    _refuse(settings, "engine.parallel.dp")


def check_features(config: EngineConfig, backend: str) -> None:
    """Raise ConfigError if an enabled feature does not support another setting."""
    parallel, scheduler, drafter = config.parallel, config.scheduler, config.speculative
    transformers = {"model_backend: transformers": backend == "transformers"}
    layers = {f"speculative.method: {drafter.method}": drafter.has_layers}
    if scheduler.split_prefill_ms:
        ranks = {
            f"parallel.tp: {parallel.tp}": parallel.tp > 1,
            f"parallel.pp: {parallel.pp}": parallel.pp > 1,
            f"parallel.dp: {parallel.dp}": parallel.dp > 1,
        }
        _refuse(ranks | layers | transformers, "engine.scheduler.split_prefill_ms")
    if config.routed_experts.enabled:
        # Decode steps between two groups of layers would overwrite the experts of the prompt.
        split_ms = scheduler.split_prefill_ms
        split = {f"scheduler.split_prefill_ms: {split_ms:g}": split_ms > 0}
        _refuse(split | transformers, "engine.routed_experts")
    if config.input_embeddings.enabled:
        # A drafter with layers reads the ids of prompt tokens.
        _refuse(layers | transformers, "engine.input_embeddings")


def _refuse(settings: Mapping[str, bool], feature: str) -> None:
    """Raise ConfigError for the first of these settings that is in use. `settings`: name and value
    below `engine`, and whether it is in use."""
    for setting, used in settings.items():
        if used:
            raise ConfigError(f"engine.{setting} is not supported with {feature}")


def _state_limit(
    name: str, token_bytes: int, config: HiddenStatesConfig | RoutedExpertsConfig
) -> StateLimit:
    return StateLimit(name, token_bytes, config.max_request_bytes if config.enabled else 0)


def usable_bytes(device: torch.device, config: EngineConfig) -> int:
    """Return the free memory for a rank. Ranks on a CPU share its memory, and ranks on GPUs need
    some of it for NCCL."""
    free = free_bytes(device, config.cache.memory_fraction)
    if device.type == "cpu":
        return free // config.parallel.ranks_per_host
    return free if config.parallel.num_ranks == 1 else free - NCCL_BYTES


def named_weights(opened: OpenedModel) -> Future[WeightsId]:
    """Compute the id of the weights while they are loaded, so that each file is read from disk
    once."""
    stored = stored_of(opened.loadable, opened.directory)
    worker = ThreadPoolExecutor(1, "weights")
    try:
        return worker.submit(content, stored)
    finally:
        worker.shutdown(wait=False)
