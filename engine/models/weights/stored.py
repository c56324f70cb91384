"""A decoder in the files of a directory: its size, loading, and the replacement of its values."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.models.blocks.placed_experts import PlacedExperts
from engine.models.checkpoint import Checkpoint, OpenFiles, TensorRequest
from engine.models.decoder import Decoder, DecoderSpec
from engine.models.linear import form_of
from engine.models.refill import found, refill
from engine.models.spec import LoadTarget
from engine.models.weights.reader import ReadAhead, TensorReader
from engine.models.weights.survey import survey
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
        anywhere = LoadTarget(torch.device("cpu"), torch.float32)
        return survey(Checkpoint(self.directory), self.spec, anywhere).stored

    def weight_bytes(self, target: LoadTarget) -> int:
        return survey(Checkpoint(self.directory), self.spec, target).num_bytes

    def load(self, target: LoadTarget) -> Decoder:
        """Load a rank's part. Only one matrix at a time is in memory twice."""
        with self._reader(target) as reader:
            return self.spec.build(reader)

    def refill(self, decoder: Decoder) -> None:
        """Replace the weights. See LoadableModel. Only one part at a time is in memory twice."""
        with self._reader(decoder.target) as reader:
            fresh = self.spec.parts(reader)
            for present in decoder.parts:
                refill(present, next(fresh))
                reader.products.clear()  # otherwise all weights would be in memory twice

    def move_experts(self, decoder: Decoder, moves: Mapping[str, LayerSlots]) -> None:
        """Read the experts of other slots of a rank, from the checkpoint of its current weights.
        See LoadableModel."""
        placement = decoder.target.share.placement
        assert placement is not None
        with self._reader(decoder.target, ahead=False) as reader:
            for experts in placed_experts(decoder):
                if (after := moves.get(experts.layer)) is not None:
                    before = placement.slots(experts.layer, experts.shape.count)
                    experts.replace(reader, before, after)
        placement.move(moves)

    @contextmanager
    def _reader(self, target: LoadTarget, *, ahead: bool = True) -> Iterator[TensorReader]:
        """Yield a reader of a rank's part. `ahead`: check all tensors, and read them ahead."""
        checkpoint, form = Checkpoint(self.directory), form_of(target, self.spec.model.format)
        with OpenFiles() as files:
            reads = None
            if ahead:
                # The survey lists tensors in the order in which they are read.
                needs = survey(checkpoint, self.spec, target)
                tensors = {name: checkpoint.tensors[name] for name in needs.stored}
                reads = ReadAhead(tensors, files).reads
            yield TensorReader(target, checkpoint.watched(reads, files), self.spec.stored, form)


def placed_experts(decoder: Decoder) -> Sequence[PlacedExperts]:
    """Return the experts of all layers of a decoder, if they are in slots."""
    return list(found(PlacedExperts, [*decoder.parts]))
