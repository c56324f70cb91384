"""Detection of a checkpoint's heads: one for tokens, one for classes, or none.

The configuration names the class that saved the checkpoint. Embedding checkpoints may contain the
decoder alone, despite that class. Their tensor names then have no prefix.
"""

from collections.abc import Collection
from dataclasses import replace

from engine.models.decoder import DecoderSpec
from engine.models.fields import Fields

CLASSIFIER = "ForSequenceClassification"
_USUAL_LABELS = 2  # default that transformers omits from configurations


def with_heads(decoder: DecoderSpec, config: Fields) -> DecoderSpec:
    """Return the decoder with the heads that its configuration declares."""
    saved_by = config.texts("architectures") if "architectures" in config else ()
    if any(name.endswith(CLASSIFIER) for name in saved_by):
        labels = config.nested("id2label").size or config.integer("num_labels", _USUAL_LABELS)
        return replace(decoder, model=replace(decoder.model, generates=False, num_labels=labels))
    if any(name.endswith("Model") for name in saved_by):
        tied = decoder.tied_embeddings
        return replace(decoder, model=replace(decoder.model, generates=tied))
    return decoder


def as_stored(decoder: DecoderSpec, names: Collection[str]) -> DecoderSpec:
    """Return the decoder adapted to the names of the stored tensors: the decoder alone, or with its
    heads."""
    if "embed_tokens.weight" not in names or "model.embed_tokens.weight" in names:
        return decoder
    generates = decoder.model.generates and (decoder.tied_embeddings or "lm_head.weight" in names)
    return replace(decoder, prefix="", model=replace(decoder.model, generates=generates))
