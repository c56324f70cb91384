"""Embeddings, scores of text pairs, and next-token probabilities, for all client protocols.

Requests that the checkpoint does not support are rejected by name before any work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Generic, Literal, TypeVar

import msgspec

from api.pooling.pooler import Pooler
from api.requests.generate_params import (
    MAX_PROMPTS,
    PooledPrompt,
    PoolingCaller,
    PoolingRequest,
    PoolingResult,
    TextPairPrompt,
    TextPrompt,
    floats,
)
from api.text.model_files import PoolingFiles, Way
from api.text.tokenizer import RouterTokenizer
from common.errors import ConfigError, InvalidRequest, RequestFailed
from common.requests.pooling import PoolingMode, PoolingParams

# Prompt format with which Qwen3-Reranker was trained.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class YesNoReranker:
    """Prompt format of a reranker that answers yes or no. `labels`: token ids of "yes" and "no"."""

    labels: tuple[int, int]

    def prompt(self, query: str, document: str, task: str | None) -> TextPrompt:
        """Return the prompt for one document.

        Args:
            task: purpose of the documents. None: the model's default.
        """
        content = f"<Instruct>: {task or _TASK}\n<Query>: {query}\n<Document>: {document}"
        return TextPrompt(f"{_BEFORE}{content}{_BEHIND}", add_special_tokens=False)


def qwen3(tokenizer: RouterTokenizer) -> YesNoReranker:
    """Return Qwen3's format. Raise ConfigError if yes or no is not a single token."""
    yes, no = tokenizer.token_of("yes"), tokenizer.token_of("no")
    if yes is None or no is None:
        raise ConfigError("--reranker: qwen3 needs a model with a token for yes and one for no")
    return YesNoReranker((yes, no))


T = TypeVar("T")

MAX_NUMBERS = 1 << 21  # numbers in one response: 8 MiB

_POOLS: dict[Way, PoolingMode] = {
    "last": PoolingMode.LAST,
    "mean": PoolingMode.MEAN,
    "cls": PoolingMode.FIRST,
}


class Scores(msgspec.Struct, Generic[T], frozen=True):
    """Scores of the prompts, in order: a number each, or a number for each label."""

    scores: Sequence[T]
    num_tokens: int  # of all prompts


class PoolingService:
    """Computes embeddings and scores of the served model. For one event loop.

    Args:
        reranker: prompt format of a generative reranker. None: the model is not one.
        way: pooling of embeddings. auto: as the checkpoint says.
        has_nodes: False: the router has no prefill nodes.
    """

    def __init__(
        self,
        pooler: Pooler,
        files: PoolingFiles,
        *,
        way: Literal["auto", "last", "mean", "cls"] = "auto",
        reranker: YesNoReranker | None = None,
        has_nodes: bool = True,
    ) -> None:
        self._pooler = pooler
        self._files = files
        self._way: Way = files.way if way == "auto" else way
        self._reranker = reranker
        self._has_nodes = has_nodes

    async def embed(
        self, prompts: Sequence[PooledPrompt], caller: PoolingCaller, dimensions: int = 0
    ) -> PoolingResult:
        """Return embeddings, by default in the checkpoint's full length.

        Args:
            dimensions: number of leading dimensions to keep. 0: all.

        Raises:
            InvalidRequest: for example, the model does not make embeddings.
        """
        if self._files.classifies:
            raise InvalidRequest("model: it scores pairs of texts and does not compute embeddings")
        if self._files.unsupported:
            raise InvalidRequest(f"model: {self._files.unsupported}")
        known = self._files.dimensions
        if dimensions and known and dimensions not in known:
            raise InvalidRequest(
                f"dimensions is {dimensions}, the model has {', '.join(map(str, known))}"
            )
        request = PoolingRequest(
            prompts=prompts,
            pooling=PoolingParams(_POOLS[self._way]),
            dimensions=dimensions,
            normalize=self._files.normalize,
        )
        pooled = await self._pooled(request, caller)
        num_numbers = sum(map(len, pooled.vectors)) // 4
        if num_numbers > MAX_NUMBERS:
            raise InvalidRequest(
                f"input: its {len(prompts)} embeddings have {num_numbers} numbers, "
                f"{MAX_NUMBERS} allowed"
            )
        return pooled

    async def score(
        self, pairs: Sequence[tuple[str, str]], caller: PoolingCaller, task: str | None = None
    ) -> Scores[float]:
        """Return how well the texts of each pair match.

        The score is the output of a classification head with one class, or a reranker's probability
        of yes. For other models it is the cosine similarity of embeddings, from -1 to 1.

        Args:
            task: purpose of the second texts, for a reranker.

        Raises:
            InvalidRequest: see `embed`. Also, the head has several classes, or the model does not
                support a task.
        """
        if task and self._reranker is None:
            raise InvalidRequest("instruct is not supported by this model: include it in query")
        if self._files.classifies:
            return await self._classified(pairs, caller)
        if self._reranker is not None:
            prompts = [self._reranker.prompt(*pair, task) for pair in pairs]
            labels = self._reranker.labels
            said = await self.label_scores(prompts, labels, caller, softmax=True)
            return Scores([yes for yes, _ in said.scores], said.num_tokens)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        embedded = await self.embed([TextPrompt(text) for text in texts], caller)
        found = dict(zip(texts, map(_unit, embedded.vectors), strict=True))
        scores = [_cosine(found[one], found[other]) for one, other in pairs]
        return Scores(scores, sum(embedded.num_tokens))

    async def label_scores(
        self,
        prompts: Sequence[PooledPrompt],
        tokens: Sequence[int],
        caller: PoolingCaller,
        *,
        softmax: bool = False,
    ) -> Scores[Sequence[float]]:
        """Return the probability of each of these tokens as the next token of each prompt.

        Args:
            softmax: normalise over these tokens instead of the whole vocabulary.
        """
        pooled = await self._pooled(
            PoolingRequest(
                prompts=prompts, pooling=PoolingParams(PoolingMode.TOKENS, tuple(tokens))
            ),
            caller,
        )
        scores = []
        for vector in pooled.vectors:
            likely = [math.exp(each) for each in _floats(vector)[: len(tokens)]]
            total = sum(likely) if softmax else 1.0
            scores.append([each / total if total else 0.0 for each in likely])
        return Scores(scores, sum(pooled.num_tokens))

    async def _classified(
        self, pairs: Sequence[tuple[str, str]], caller: PoolingCaller
    ) -> Scores[float]:
        prompts = [TextPairPrompt(*pair) for pair in pairs]
        request = PoolingRequest(prompts=prompts, pooling=PoolingParams(PoolingMode.LABELS))
        pooled = await self._pooled(request, caller)
        logits = list(map(_floats, pooled.vectors))
        if any(len(each) != 1 for each in logits):
            raise InvalidRequest(f"model: it has {len(logits[0])} classes and returns no score")
        return Scores([_sigmoid(each[0]) for each in logits], sum(pooled.num_tokens))

    async def _pooled(self, request: PoolingRequest, caller: PoolingCaller) -> PoolingResult:
        if not self._has_nodes:
            raise InvalidRequest(
                "model: prefill nodes compute embeddings and scores, and this router has none"
            )
        if not 1 <= len(request.prompts) <= MAX_PROMPTS:
            raise InvalidRequest(
                f"input has {len(request.prompts)} texts, 1 to {MAX_PROMPTS} allowed"
            )
        return await self._pooler.pool(request, caller)


def _floats(vector: bytes) -> Sequence[float]:
    try:
        return floats(vector)
    except ValueError:
        raise RequestFailed("a prefill node sent an invalid vector") from None


def _unit(vector: bytes) -> Sequence[float]:
    found = _floats(vector)
    length = math.sqrt(sum(map(mul, found, found))) or 1.0
    return [each / length for each in found]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of unit vectors, clipped to [-1, 1] against rounding errors."""
    product: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, product))


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -700.0 else 0.0
