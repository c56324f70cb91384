"""How a request's tokens are chosen: one immutable record from the router to the sampler."""

from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from protos.sampling_pb2 import Sampling

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 16
MAX_TOKEN_ID = 2**31 - 1  # nodes keep them as int32

# Of the 32 bits that carry numbers to the nodes.
_LARGEST = (2 - 2**-23) * 2.0**127
_ABOVE_0 = 2.0**-149
# Far beyond any use, and far from where a float32 logit overflows: that would be an end with an
# error, when it has been computed, and look like a fault of the model.
_STRONGEST = 2.0**20
# name, lowest and highest value, as errors say it
_RANGES = (
    ("max_tokens", 1, _LARGEST, "at least 1"),
    ("temperature", 0.0, _LARGEST, "at least 0"),
    ("top_p", _ABOVE_0, 1.0, "in (0, 1]"),
    ("min_p", 0.0, 1.0, "in [0, 1]"),
    ("repetition_penalty", 1 / _STRONGEST, _STRONGEST, "from 1e-6 to 1e6"),
    ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Checked sampling parameters. Stop strings are the router's and are not part of it.

    A token is a function of (logits, seed, token index): the same on every node.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def from_proto(proto: Sampling, *, max_tokens: int, seed: int) -> SamplingParams:
    """Checks every field of `proto` and fills what is unset.

    Args:
        max_tokens: used where the proto leaves it unset.
        seed: used where the proto leaves it unset.
    Raises:
        InvalidRequest: with a sentence that names the field.
    """
    params = unchecked(proto, max_tokens=max_tokens, seed=seed)
    check(params)
    check_stop(proto.stop)
    return params


def unchecked(proto: Sampling, *, max_tokens: int, seed: int) -> SamplingParams:
    """As `from_proto`, for whoever calls `check` later.

    Raises:
        InvalidRequest: a list is longer than is worth reading.
    """
    check_counts(proto.stop_token_ids, proto.stop)
    return SamplingParams(
        max_tokens=proto.max_tokens if proto.HasField("max_tokens") else max_tokens,
        seed=proto.seed if proto.HasField("seed") else seed,
        temperature=proto.temperature if proto.HasField("temperature") else 1.0,
        top_p=proto.top_p if proto.HasField("top_p") else 1.0,
        top_k=proto.top_k if proto.HasField("top_k") else -1,
        min_p=proto.min_p,
        stop_token_ids=tuple(proto.stop_token_ids),
        ignore_eos=proto.ignore_eos,
        frequency_penalty=proto.frequency_penalty,
        presence_penalty=proto.presence_penalty,
        repetition_penalty=(
            proto.repetition_penalty if proto.HasField("repetition_penalty") else 1.0
        ),
    )


def to_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of the wire form, for a message that has it as a part: given as a message, it
    would be copied there."""
    return msgspec.structs.asdict(params)


def to_proto(params: SamplingParams) -> Sampling:
    """The wire form; `from_proto` gives the same record back."""
    return Sampling(**to_fields(params))


def check(params: SamplingParams) -> None:
    """Raises InvalidRequest with a sentence that names the field."""
    for name, lowest, highest, rule in _RANGES:
        value = getattr(params, name)
        if not lowest <= value <= highest:  # nor is NaN
            raise InvalidRequest(f"sampling.{name} must be {rule}, got {value}")
    if params.top_k < 1 and params.top_k != -1:
        raise InvalidRequest(f"sampling.top_k must be -1 or at least 1, got {params.top_k}")
    check_counts(params.stop_token_ids, ())
    for token in params.stop_token_ids:
        if not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequest(
                f"sampling.stop_token_ids must be in [0, {MAX_TOKEN_ID}], got {token}"
            )


def check_counts(stop_token_ids: Sequence[int], stop: Sequence[str]) -> None:
    """Raises InvalidRequest as `check` does, and looks at no item."""
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"sampling.stop_token_ids has {len(stop_token_ids)} ids, {MAX_STOP_TOKEN_IDS} allowed"
        )
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"sampling.stop has {len(stop)} strings, {MAX_STOP_STRINGS} allowed")


def check_stop(stop: Sequence[str]) -> None:
    """Raises InvalidRequest as `check` does."""
    check_counts((), stop)
    if not all(stop):
        raise InvalidRequest("sampling.stop has an empty string")
