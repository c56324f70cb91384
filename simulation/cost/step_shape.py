"""The shape of a step, which determines its duration."""

import msgspec


class StepShape(msgspec.Struct, frozen=True):
    """The rows of one forward pass.

    Attributes:
        new_tokens: tokens that the step computes, by row. 1 in a decode row.
        contexts: KV tokens of the row after the step, by row.
    """

    new_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
