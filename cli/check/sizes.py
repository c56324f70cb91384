"""The model of a node and the memory sizes of its ranks, without loading the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from cli.operating.command import size
from common.config import EngineConfig
from common.copy_map import NodeShape
from common.errors import ConfigError
from common.model_directory import model_directory
from engine.kv_cache.layout import KVLayout
from engine.load import OpenedModel, check_group, with_collectives
from engine.models import LoadTarget, open_checkpoint
from engine.models.checkpoint import Checkpoint
from engine.models.precision import choose_precision
from engine.processor import matrix_features
from engine.ranks import Share
from engine.ranks.expert_exchange import ExpertExchange
from engine.ranks.expert_placement import ExpertPlacement
from engine.sizing import part_of, resolve_device, whole_layout

_SETTING = "engine.parallel"


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Memory sizes of one rank.

    Attributes:
        weight_bytes: its part of the weights.
        page_bytes: its part of a page.
        state_pages: pages of the recurrent state of a request. 0: its layers have none.
        token_bytes: its part of a token's KV, in all layers.
    """

    weight_bytes: int
    page_bytes: int
    state_pages: int
    token_bytes: int

    def __str__(self) -> str:
        state = f", a state of {self.state_pages} pages" if self.state_pages else ""
        return (
            f"{size(self.weight_bytes)} of weights, pages of {self.page_bytes} bytes, "
            f"{self.token_bytes} bytes a token{state}"
        )


def opened(config: EngineConfig) -> OpenedModel:
    """Read the configuration of a model. Does not set up the device.

    Raises:
        ConfigError: the model or the device is not supported.
    """
    device = resolve_device(config.device)
    directory = model_directory(config.model, weights=True)
    loadable = open_checkpoint(directory, config.model_backend, config.speculative)
    precision = choose_precision(config.dtype, device, Checkpoint(directory), matrix_features())
    return OpenedModel(directory, loadable, device, precision)


def layout_of(config: EngineConfig, model: OpenedModel) -> KVLayout:
    """Return the layout of pages with all heads."""
    return whole_layout(config, model.loadable.spec, model.precision.dtype, model.device)


def rank_sizes(config: EngineConfig, model: OpenedModel) -> Sequence[RankSizes]:
    """Return the sizes by rank.

    Raises:
        ConfigError: the model cannot be divided equally by this number of ranks, or the ranks do
            not support a configured feature.
    """
    parallel, whole = config.parallel, layout_of(config, model)
    node = NodeShape(parallel.tp, parallel.pp)
    num_ranks, experts = parallel.num_ranks, parallel.experts == "ep"
    try:
        if num_ranks > 1:
            with_collectives(config, model.device)
        placement = ExpertPlacement.of(parallel)
        shares = [
            Share.unconnected(rank, node, whole_experts=experts, placement=placement)
            for rank in range(num_ranks)
        ]
        if parallel.dp > 1:
            check_group(config, model.device)
            shares = [Share(exchange=ExpertExchange(parallel.dp_rank, parallel.dp))]
        return [_sizes(config, model, whole, share) for share in shares]
    except ConfigError as error:
        if num_ranks == 1 or str(error).startswith(_SETTING):
            raise
        stages = f", pp {node.pp}" if node.pp > 1 else ""
        raise ConfigError(f"{_SETTING}.tp {node.tp}{stages}: {error}") from error


def _sizes(config: EngineConfig, model: OpenedModel, whole: KVLayout, share: Share) -> RankSizes:
    layout = part_of(whole, share)
    target = LoadTarget(model.device, model.precision.dtype, config.quantize, share)
    weight_bytes = model.loadable.weight_bytes(target)
    return RankSizes(weight_bytes, layout.page_bytes, layout.state_pages, layout.token_bytes)


def sentence(sizes: Sequence[RankSizes]) -> str:
    """Return the sizes as text. Adjacent ranks of equal size are combined."""
    if len(sizes) == 1:
        return f"one rank: {sizes[0]}"
    parts, first = [], 0
    for rank in range(1, len(sizes) + 1):
        if rank < len(sizes) and sizes[rank] == sizes[first]:
            continue
        several = f"ranks {first} to {rank - 1}, each" if rank - first > 1 else f"rank {first}"
        parts.append(f"{several}: {sizes[first]}")
        first = rank
    return "; ".join(parts)
