"""A decoder's layers as one stack: run layer by layer, or many in one compiled call.

The kinds of layers determine which, when the stack is created.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import DraftView
from engine.models.blocks.attention import AttentionBlock
from engine.models.blocks.experts import DenseBlock
from engine.models.blocks.layer import KeptStates, Layer, ModelStep
from engine.models.blocks.rotation import Rotation
from engine.models.linear import Linear
from engine.models.linear.panels import CodePanels, Int8Panels, Panels
from kernels.attention.paged import check_kv
from kernels.cpu.layers import (
    CompiledLayer,
    CompiledLayers,
    CompiledPool,
    CompiledStep,
    PanelMatrix,
)

Residual: TypeAlias = Tensor | None
# First layer of a group, and the layer after its last one. None: all layers.
LayerNumbers: TypeAlias = tuple[int, int] | None
PagedLayers: TypeAlias = KVPool | DraftView


def stack_of(layers: tuple[Layer, ...]) -> "Stack":
    """Return the compiled stack if all layers have attention and a dense net with matrices in
    panels. Otherwise return the layer-by-layer one."""
    rotations: list[Rotation] = []
    compiled = [_compiled(layer, rotations) for layer in layers]
    whole = [layer for layer in compiled if layer is not None]
    if not layers or len(whole) < len(layers):
        return LayerByLayer(layers)
    mixers = (layer.mixer for layer in layers if isinstance(layer.mixer, AttentionBlock))
    whole_images = any(mixer.spec.whole_images for mixer in mixers)
    group = layers[0].group
    summed = CompiledLayers(whole, None if group is None else group.all_reduce)
    return InOneCall(summed, rotations, LayerByLayer(layers), whole_images)


class LayerByLayer:
    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self._layers = layers

    def forward(
        self, x: Tensor, residual: Residual, step: ModelStep, pool: PagedLayers, group: LayerNumbers
    ) -> tuple[Tensor, Residual]:
        """Run all layers, or a group of them.

        Args:
            x: [num_tokens, hidden], embeddings, or the output of the layer before the group. The
                stack takes ownership.
            residual: the sum to which x is to be added. None: before the first layer. The stack
                takes ownership.
        Returns:
            The last layer's output, and the residual to which it is to be added.
        """
        for number in range(*(group or (0, len(self._layers)))):
            if number in step.taps:
                step.tapped[number] = x.clone() if residual is None else x + residual
            kept = KeptStates(pool.layers[number], pool.tables[number], pool.cells[number])
            x, residual = self._layers[number].forward(x, residual, step, kept)
            for image in step.features:
                image.add_to(x, number)
        return x, residual


class InOneCall:
    """Layers in one compiled call. `forward` is like that of LayerByLayer.

    Args:
        rotations: sources of angles, to which layers refer by index.
        one_by_one: the same layers, for KV with another dtype than the compute dtype, and for steps
            with image features.
        whole_images: whether `one_by_one` computes all steps with image tokens.
    """

    def __init__(
        self,
        layers: CompiledLayers,
        rotations: Sequence[Rotation],
        one_by_one: LayerByLayer,
        whole_images: bool,
    ) -> None:
        self._layers = layers
        self._one_by_one = one_by_one
        self._rotations = rotations
        self._whole_images = whole_images
        self._pools: WeakKeyDictionary[PagedLayers, CompiledPool] = WeakKeyDictionary()

    def forward(
        self, x: Tensor, residual: Residual, step: ModelStep, pool: PagedLayers, group: LayerNumbers
    ) -> tuple[Tensor, Residual]:
        images = step.features or (self._whole_images and step.batch.seen)
        if images or pool.layers[0].dtype != x.dtype:
            return self._one_by_one.forward(x, residual, step, pool, group)
        batch = step.batch
        compiled = CompiledStep(
            page_ids=batch.page_ids,
            query_starts=batch.query_starts,
            lengths=batch.lengths,
            num_decodes=batch.num_decodes,
            locations=batch.locations,
            page_starts=batch.page_starts,
            angles=[
                step.shared.get(rotation, partial(rotation.angles, batch.positions))
                for rotation in self._rotations
            ],
        )
        group = (0, len(pool.layers)) if group is None else group
        return self._layers.forward(x, residual, compiled, self._compiled_pool(pool), group)

    def _compiled_pool(self, pool: PagedLayers) -> CompiledPool:
        if pool not in self._pools:
            for view in pool.layers:
                check_kv(view)
            self._pools[pool] = CompiledPool(pool.layers, pool.tables)
        return self._pools[pool]


Stack: TypeAlias = LayerByLayer | InOneCall


def _compiled(layer: Layer, rotations: list[Rotation]) -> CompiledLayer | None:
    """Return the compiled layer, or None if the layer has unsupported parts. Appends its rotation
    to `rotations` if missing."""
    mixer, ffn = layer.mixer, layer.ffn
    if not isinstance(mixer, AttentionBlock) or not isinstance(ffn, DenseBlock):
        return None
    spec, pairs = mixer.spec, len(mixer.rotation.inverse_frequencies)
    qkv, output = _matrix(mixer.qkv), _matrix(mixer.output)
    gate_up, down = _matrix(ffn.gate_up), _matrix(ffn.down)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    if spec.output_gate or spec.sinks or 2 * pairs != spec.head_dim:
        return None
    if mixer.rotation not in rotations:
        rotations.append(mixer.rotation)
    return CompiledLayer(
        mixer_norm=layer.mixer_norm,
        mixer_post_norm=layer.mixer_post_norm,
        q_norm=mixer.q_norm,
        k_norm=mixer.k_norm,
        ffn_norm=layer.ffn_norm,
        ffn_post_norm=layer.ffn_post_norm,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        window=spec.window,
        activation=ffn.activation,
        rotation=rotations.index(mixer.rotation),
        scale=spec.scale,
        soft_cap=spec.soft_cap,
    )


def _matrix(linear: Linear) -> PanelMatrix | None:
    if isinstance(linear, Panels | Int8Panels | CodePanels) and linear.in_layers:
        return linear
    return None
