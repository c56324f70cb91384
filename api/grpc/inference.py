"""The methods of the `Router` gRPC service for clients, and their messages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any, TypeAlias

from msgspec.structs import replace

from api.auth.client import Client
from api.auth.guard import ApiKeyGuard
from api.dialect.problems import ApiError
from api.dialect.tools import ToolOffer, guided, optional, response_parser
from api.generation import DeadlineScope, new_request_id
from api.grpc.parsing import from_input, from_prompt, from_request, one_with_each
from api.idempotency import IdempotencyCache
from api.parsers.model_format import NONE
from api.parsers.source import StreamParser
from api.pooling.vectors import PoolingService
from api.requests.answer import FinalChunk, OutputChunk, TokenReport
from api.requests.generate_params import ChatPrompt, PoolingCaller, check_context, check_vocabulary
from api.requests.served_model import ServedModel
from common.errors import InvalidRequest, Overloaded
from common.requests.sampling import SamplingParams
from common.tracing.context import HEADER
from protos import router_pb2
from protos.router_pb2 import GenerateResponse, ModelVersion, ToolCallPart, Usage
from protos.sampling_pb2 import Logprobs


def response_to(request_id: str, piece: OutputChunk | FinalChunk) -> GenerateResponse:
    more = _end(piece) if isinstance(piece, FinalChunk) else {}
    if (states := piece.states) is not None:
        more |= {
            "prompt_hidden_states": b"".join(states.prompt_hidden_states),
            "hidden_states": b"".join(states.hidden_states),
            "prompt_routed_experts": states.prompt_routed_experts,
            "routed_experts": states.routed_experts,
        }
    reports = () if piece.prompt is None else piece.prompt.tokens
    prompt = [report for report in reports if report.logprob is not None]
    return GenerateResponse(
        request_id=request_id,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=_logprobs(piece.tokens),
        prompt_logprobs=_logprobs(prompt),
        **more,
    )


def _end(piece: FinalChunk) -> dict[str, Any]:
    usage, predicted, reason = piece.usage, piece.usage.predicted, piece.stop_reason
    return {
        "stop_string": reason if isinstance(reason, str) else None,
        "stop_token_id": reason if isinstance(reason, int) else None,
        "finish_reason": piece.finish_reason,
        "usage": Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            accepted_prediction_tokens=predicted.accepted if predicted else None,
            rejected_prediction_tokens=predicted.rejected if predicted else None,
        ),
        "versions": [
            ModelVersion(
                first_token=span.first_token,
                weights=span.version.weights,
                system_fingerprint=span.version.system_fingerprint,
            )
            for span in piece.versions
        ],
        "seed": piece.seed,
    }


def _logprobs(tokens: Sequence[TokenReport]) -> Logprobs | None:
    if not tokens:
        return None
    return Logprobs(
        logprob=[token.logprob or 0.0 for token in tokens],
        num_top=len(tokens[0].top),
        top_token=[other.token for token in tokens for other in token.top],
        top_logprob=[other.logprob or 0.0 for token in tokens for other in token.top],
    )


def _fill_in(
    parser: StreamParser, piece: OutputChunk | FinalChunk, response: GenerateResponse
) -> None:
    """Fill in text, reasoning and tool calls of `response`, which already has the piece."""
    parsed = parser.parse(piece.text, piece.marks, last=isinstance(piece, FinalChunk))
    if response.finish_reason == "stop" and parser.has_called:
        response.finish_reason = "tool_calls"
    response.text = parsed.content
    response.reasoning = parsed.reasoning
    response.tool_calls.extend(
        ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
        for part in parsed.calls
    )


Context: TypeAlias = Any  # an rpc.Admitted whose caller is a Client


class InferenceService:
    """Implements the client methods of the service. They raise ServingError."""

    def __init__(
        self,
        guard: ApiKeyGuard,
        idempotency: IdempotencyCache,
        pooling_service: PoolingService,
        model: ServedModel,
        *,
        served_name: str,
        budget_s: float,
    ) -> None:
        self._served_name = served_name
        self._guard = guard
        self._idempotency = idempotency
        self._pooling_service = pooling_service
        self._model = model
        self._budget_s = budget_s

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> None:
        """Stream the response to one prompt. Cancelling the call cancels it on every node."""

        with self._begun(context) as client:
            key, request_id = metadata(context, "idempotency-key"), new_request_id()
            content = partial(request.SerializeToString, deterministic=True)
            retry = self._idempotency.retry(client, key, content, request_id) if key else None
            if retry is not None:
                request_id = retry.request_id
            params = replace(from_request(request), request_id=request_id)
            parser: StreamParser | None = None
            match params.prompt.prompt:
                case ChatPrompt(tools=tools):
                    offer = self._offer(tools)
                    params = replace(
                        params,
                        shown=self._model.model_format.shown[bool(tools)],
                        sampling=self._guided(params.sampling, offer),
                    )
                    parser = response_parser(self._model.model_format, params.prompt, offer)

            async def write(piece: OutputChunk | FinalChunk) -> None:
                response = response_to(request_id, piece)
                if parser is not None:
                    _fill_in(parser, piece, response)
                await context.write(response)

            call = params, client, write, metadata(context, HEADER)
            if retry is None:
                await self._idempotency.dispatcher.generate(*call)
            else:
                await self._idempotency.generate(*call, retry=retry)

    async def Embed(
        self, request: router_pb2.EmbedRequest, context: Context
    ) -> router_pb2.EmbedResponse:
        with self._pooling(request, context) as caller:
            inputs = [from_input(each) for each in request.inputs]
            pooled = await self._pooling_service.embed(inputs, caller, request.dimensions)
        usage = router_pb2.Usage(prompt_tokens=sum(pooled.num_tokens))
        return router_pb2.EmbedResponse(
            request_id=caller.request_id, vectors=pooled.vectors, usage=usage
        )

    async def Score(
        self, request: router_pb2.ScoreRequest, context: Context
    ) -> router_pb2.ScoreResponse:
        with self._pooling(request, context) as caller:
            pairs = one_with_each(request.queries, request.documents)
            scored = await self._pooling_service.score(pairs, caller, request.instruct)
        usage = router_pb2.Usage(prompt_tokens=scored.num_tokens)
        return router_pb2.ScoreResponse(
            request_id=caller.request_id, scores=scored.scores, usage=usage
        )

    async def ScoreTokens(
        self, request: router_pb2.ScoreTokensRequest, context: Context
    ) -> router_pb2.ScoreTokensResponse:
        with self._pooling(request, context) as caller:
            scored = await self._pooling_service.label_scores(
                [from_input(each) for each in request.prompts],
                request.label_token_ids,
                caller,
                softmax=request.apply_softmax,
            )
        scores = [router_pb2.TokenScores(scores=each) for each in scored.scores]
        usage = router_pb2.Usage(prompt_tokens=scored.num_tokens)
        return router_pb2.ScoreTokensResponse(
            request_id=caller.request_id, scores=scores, usage=usage
        )

    async def Tokenize(
        self, request: router_pb2.TokenizeRequest, context: Context
    ) -> router_pb2.TokenizeResponse:
        with self._begun(context) as client, DeadlineScope(self._budget_s):
            token_ids = await self._model.prompts.encode(from_prompt(request), client)
        return router_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: router_pb2.DetokenizeRequest, context: Context
    ) -> router_pb2.DetokenizeResponse:
        with self._begun(context), DeadlineScope(self._budget_s):
            check_context(request.token_ids, self._model.limits, "token_ids")
            token_ids = list(request.token_ids)
            check_vocabulary(token_ids, self._model.limits, "token_ids")
            text = await self._model.tokenizer.decode_any(token_ids)
        return router_pb2.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: router_pb2.GetModelRequest, context: Context
    ) -> router_pb2.GetModelResponse:
        files = self._model.files
        return router_pb2.GetModelResponse(
            name=self._served_name,
            context_length=files.context_length,
            vocabulary_size=files.vocabulary_size,
            eos_token_ids=files.eos_token_ids,
            has_chat_template=files.chat_template is not None,
        )

    def _offer(self, tools: Sequence[Any]) -> ToolOffer:
        """Return the offer of these tools. Raise InvalidRequest if their call format is unknown."""
        if tools and self._model.model_format.tools == NONE:
            raise InvalidRequest("messages.tools: the tool call format of this model is unknown")
        return optional(tools)

    def _guided(self, sampling: SamplingParams, offer: ToolOffer) -> SamplingParams:
        """Return the sampling with the grammar that tools need, as over HTTP."""
        try:
            return guided([sampling], offer, self._model.model_format, "sampling.guide")[0]
        except ApiError as refusal:
            if refusal.param == "tools":
                raise InvalidRequest(f"messages.{refusal}") from None
            raise InvalidRequest(
                "sampling.guide: cannot be combined with this model's tool calls: send one of them"
            ) from None

    @contextmanager
    def _pooling(self, request: Any, context: Context) -> Iterator[PoolingCaller]:
        """Yield the caller of a pooling request, and count the request."""
        with self._begun(context) as client:
            yield PoolingCaller(
                client,
                label=request.request_id,
                request_id=new_request_id(),
                traceparent=metadata(context, HEADER),
                cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
                timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
            )

    @contextmanager
    def _begun(self, context: Context) -> Iterator[Client]:
        """Yield the client of a request and count the request.

        Sets retry-after in the response if the router is overloaded.
        """
        try:
            self._guard.begin(context.caller)
            yield context.caller
        except Overloaded as error:
            context.set_trailing_metadata((("retry-after", str(ceil(error.retry_after_s))),))
            raise


def metadata(context: Context, name: str) -> str:
    """Return the call's metadata of that name, or ""."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return ""
