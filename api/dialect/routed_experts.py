"""Routed experts of one response, in SGLang's format."""

from array import array
from base64 import b64encode
from typing import TypeAlias

import msgspec

from api.requests.answer import OutputChunk

# Base64 of int32 [prompt and generated tokens but the last, layers, experts per token].
RoutedExperts: TypeAlias = str | msgspec.UnsetType


class CollectedExperts:
    """The experts of the tokens of a response so far, after those of its prompt."""

    def __init__(self) -> None:
        self._ids = array("h")

    def add(self, piece: OutputChunk) -> None:
        self._ids.frombytes(piece.prompt_routed_experts)
        self._ids.frombytes(piece.routed_experts)

    @property
    def encoded(self) -> RoutedExperts:
        """The experts for JSON. Unset if they were not requested."""
        return b64encode(array("i", self._ids)).decode() if self._ids else msgspec.UNSET
