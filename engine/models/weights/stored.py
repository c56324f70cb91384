"""A decoder in the files of a directory: its size, loading, and the replacement of its values."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import Quantize
from engine.models.blocks.placed_experts import PlacedExperts
from engine.models.checkpoint import Checkpoint, OpenFiles, TensorRequest
from engine.models.decoder import Decoder, DecoderSpec
from engine.models.linear import Form, form_of
from engine.models.refill import found, refill
from engine.models.weights.reader import ReadAhead, TensorReader
from engine.models.weights.survey import survey
from engine.ranks import WHOLE, Share
from engine.ranks.expert_placement import LayerSlots


@dataclass(frozen=True, slots=True)
class StoredDecoder:
    """A decoder in a directory. Each call opens the checkpoint, whose files may have changed.

    All methods raise ConfigError if there is no checkpoint, or if tensors are missing, unexpected,
    of wrong shapes or dtypes, or cannot be split between the ranks. Also see `form_of`.
    """

    directory: Path
    spec: DecoderSpec

    def stored(self) -> Mapping[str, TensorRequest]:
        form = form_of(torch.device("cpu"), torch.float32, "none")
        return survey(Checkpoint(self.directory), self.spec, form, torch.float32).stored

    def weight_bytes(
        self, device: torch.device, dtype: torch.dtype, quantize: Quantize, share: Share = WHOLE
    ) -> int:
        form = self._form(device, dtype, quantize)
        return survey(Checkpoint(self.directory), self.spec, form, dtype, share).num_bytes

    def load(
        self, device: torch.device, dtype: torch.dtype, quantize: Quantize, share: Share = WHOLE
    ) -> Decoder:
        """Load a rank's part onto `device`. Only one matrix at a time is in memory twice."""
        with self._reader(device, dtype, quantize, share) as reader:
            return self.spec.build(reader)

    def refill(self, decoder: Decoder, quantize: Quantize, share: Share = WHOLE) -> None:
        """Replace the weights. See LoadableModel. Only one part at a time is in memory twice."""
        with self._reader(decoder.device, decoder.dtype, quantize, share) as reader:
            fresh = self.spec.parts(reader)
            for present in decoder.parts:
                refill(present, next(fresh))
                reader.products.clear()  # otherwise all weights would be in memory twice

    def move_experts(
        self, decoder: Decoder, moves: Mapping[str, LayerSlots], quantize: Quantize, share: Share
    ) -> None:
        """Read the experts of other slots of a rank, from the checkpoint of its current weights.
        See LoadableModel."""
        placement = share.placement
        assert placement is not None
        whole = self._reader(decoder.device, decoder.dtype, quantize, share, ahead=False)
        with whole as reader:
            for experts in placed_experts(decoder):
                if (after := moves.get(experts.layer)) is not None:
                    before = placement.slots(experts.layer, experts.shape.count)
                    experts.replace(reader, before, after)
        placement.move(moves)

    @contextmanager
    def _reader(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantize: Quantize,
        share: Share,
        *,
        ahead: bool = True,
    ) -> Iterator[TensorReader]:
        """Yield a reader of a rank's part. `ahead`: check all tensors, and read them ahead."""
        checkpoint, form = Checkpoint(self.directory), self._form(device, dtype, quantize)
        with OpenFiles() as files:
            reads = None
            if ahead:
                # The survey lists tensors in the order in which they are read.
                needs = survey(checkpoint, self.spec, form, dtype, share)
                tensors = {name: checkpoint.tensors[name] for name in needs.stored}
                reads = ReadAhead(tensors, files).reads
            yield TensorReader(
                device=device,
                dtype=dtype,
                share=share,
                checkpoint=checkpoint.watched(reads, files),
                scheme=self.spec.stored,
                form=form,
            )

    def _form(self, device: torch.device, dtype: torch.dtype, quantize: Quantize) -> Form:
        return form_of(device, dtype, quantize, self.spec.model.format)


def placed_experts(decoder: Decoder) -> Sequence[PlacedExperts]:
    """Return the experts of all layers of a decoder, if they are in slots."""
    return list(found(PlacedExperts, [*decoder.parts]))
