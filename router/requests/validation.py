"""Turns what is wanted into a checked job, or says which field is wrong.

Knows the model's limits; knows nothing of nodes.
"""

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from common.errors import InvalidRequest
from common.requests import sampling
from common.requests.namespace import SHARED, Namespace
from common.requests.sampling import SamplingParams
from router.requests import namespaces
from router.requests.prompts import Prompts
from router.requests.wanted import Wanted
from router.text.limits import Limits, check_vocabulary

MAX_STOP_CHARACTERS = 1024
MAX_LABEL_CHARACTERS = 256
MAX_SESSION_ID_CHARACTERS = 512


class Job(msgspec.Struct, frozen=True):
    """A request in tokens, ready for a decode node."""

    request_id: str
    token_ids: Sequence[int]  # the prompt, then tokens already generated
    sampling: SamplingParams
    stop: Sequence[str]
    num_generated: int = 0  # of token_ids
    engine_deaths: int = 0  # of nodes that had it, see common/requests/trial.py
    session_id: str = ""
    namespace: Namespace = SHARED  # of prefix caches


async def parse(
    wanted: Wanted, request_id: str, prompts: Prompts, limits: Limits, owner: str = ""
) -> Job:
    """Checks prompt and sampling.

    Raises:
        InvalidRequest: with a sentence that names the field.
    """
    # Checked before the prompt is encoded: a wrong number costs no tokenizer time.
    params = wanted.sampling
    sampling.check(params)
    if wanted.stop:
        check_stop(wanted.stop)
    check_session_id(wanted.session_id)
    namespace = namespaces.decide(wanted, owner)
    check_vocabulary(params.stop_token_ids, limits, "sampling.stop_token_ids")
    token_ids = await prompts.checked(wanted.prompt)
    context_left = limits.context_length - len(token_ids)
    if params.max_tokens > context_left:
        params = replace(params, max_tokens=context_left)
    return Job(
        request_id=request_id,
        token_ids=token_ids,
        sampling=params,
        stop=wanted.stop,
        session_id=wanted.session_id,
        namespace=namespace,
    )


def check_stop(stops: Sequence[str]) -> None:
    """Raises InvalidRequest for stop strings that would cost too much to look for."""
    sampling.check_stop(stops)
    for number, stop in enumerate(stops):
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"sampling.stop[{number}] has {len(stop)} characters, {MAX_STOP_CHARACTERS} allowed"
            )


def check_label(label: str) -> None:
    """Raises InvalidRequest for a client's name of a request that logs could not carry."""
    if len(label) > MAX_LABEL_CHARACTERS:
        raise InvalidRequest(
            f"request_id has {len(label)} characters, {MAX_LABEL_CHARACTERS} allowed"
        )


def check_session_id(session_id: str) -> None:
    """Raises InvalidRequest for a name that is too long to remember."""
    if len(session_id) > MAX_SESSION_ID_CHARACTERS:
        raise InvalidRequest(
            f"session_id has {len(session_id)} characters, {MAX_SESSION_ID_CHARACTERS} allowed"
        )


def budget_s(timeout_s: float | None, longest_s: float) -> float:
    """The request's total budget: its timeout_s, `longest_s` where unset or longer.

    Raises:
        InvalidRequest: timeout_s is not a positive number of seconds.
    """
    if timeout_s is None:
        return longest_s
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise InvalidRequest(f"timeout_s must be a positive number, got {timeout_s}")
    return min(timeout_s, longest_s)
