"""Vision models of tests, and the tokens that transformers generates after prompts with images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.requests.images import Image
from tests.pair.rig import Asked, Loaded, Node, PairRig, Size
from tests.support.models.vision import (
    Clip,
    greedy_vision_tokens,
    make_vision_checkpoint,
    reference_vision_model,
    with_images,
)

NUM_TOKENS = 8
ROOM = Size(num_pages=400)
Parts = Sequence[str | Image | Clip]  # of a prompt


class VisionModel:
    """A model in memory. Remembers its responses."""

    def __init__(self, directory: Path, model_type: str = "qwen2_5_vl") -> None:
        self.type = model_type
        self.directory = make_vision_checkpoint(directory, model_type=model_type)
        self.loaded = Loaded.from_directory(self.directory)
        self.reference = reference_vision_model(self.directory)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, parts: Parts, num_tokens: int = NUM_TOKENS) -> list[int]:
        token_ids, images = with_images(*parts)
        key = (*token_ids, num_tokens)
        if key not in self._known:
            self._known[key] = greedy_vision_tokens(self.reference, token_ids, images, num_tokens)
        return self._known[key]


def rig_of(model: VisionModel, **options: Any) -> PairRig:
    options = {"prefill": [ROOM], "decode": [ROOM], **options}
    return PairRig(model.loaded, own_models=True, **options)


def ask(rig: PairRig, parts: Parts, num_tokens: int = NUM_TOKENS, **options: Any) -> Asked:
    token_ids, images = with_images(*parts)
    return rig.ask(token_ids, num_tokens, images=images, **options)


def serve(rig: PairRig, parts: Parts, num_tokens: int = NUM_TOKENS, **options: Any) -> Asked:
    asked = ask(rig, parts, num_tokens, **options)
    rig.run()
    return asked


def seen(node: Node) -> tuple[int, int]:
    """Return how many images a node has encoded, and how many it has found in its cache."""
    counts = node.engine.model.seeing.counts
    return counts.encoded, counts.found


def encoded(node: Node) -> int:
    return seen(node)[0]
