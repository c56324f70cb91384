"""The `Router` gRPC service: translates messages for the parts that do the work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any, TypeAlias

from msgspec.structs import replace

from api.admin.cluster_report import ClusterReport
from api.admin.explain import Explainer
from api.admin.moves import MigrationService
from api.admin.plans import Plans
from api.auth.client import Client
from api.auth.guard import ApiKeyGuard
from api.dialect.problems import ApiError
from api.dialect.tools import ToolOffer, guided, listening, optional
from api.grpc.parsing import from_input, from_prompt, from_request, one_with_each
from api.grpc.response_writer import GrpcResponseWriter
from api.parsers.model_format import NONE
from api.pooling.vectors import PoolingCaller, PoolingService
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.deadline import DeadlineScope
from api.requests.generate_params import ChatPrompt
from api.requests.idempotency import IdempotencyCache
from api.requests.limiter import new_request_id
from api.requests.served_model import ServedModel
from api.requests.token_reports import TokenReport
from api.text.limits import check_context, check_vocabulary
from common.errors import InvalidRequest, Overloaded
from common.requests.sampling import SamplingParams
from common.tracing.context import HEADER
from protos import router_pb2, router_pb2_grpc, sampling_pb2
from router.cluster.adapter_calls import AdapterCalls
from router.cluster.engine_calls import EngineCalls
from router.workers.ends import OperatorEnds

Context: TypeAlias = Any  # rpc.Admitted, whose caller is a Client


class InferenceService(router_pb2_grpc.RouterServicer):
    """The gRPC service, for `rpc.add_service` with Callers as guard. Methods raise ServingError."""

    def __init__(
        self,
        guard: ApiKeyGuard,
        answers: IdempotencyCache,
        vectors: PoolingService,
        report: ClusterReport,
        explainer: Explainer,
        adapters: AdapterCalls,
        engines: EngineCalls,
        mover: MigrationService,
        plans: Plans,
        model: ServedModel,
        ends: OperatorEnds,
        *,
        budget_s: float,
    ) -> None:
        """
        Args:
            budget_s: total time limit of a call. A generation request may ask for less.
        """
        self._guard = guard
        self._answers = answers
        self._vectors = vectors
        self._report = report
        self._explainer = explainer
        self._adapters = adapters
        self._engines = engines
        self._mover = mover
        self._plans = plans
        self._model = model
        self._ends = ends
        self._budget_s = budget_s

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> None:
        """Stream the response to one prompt.

        Cancelling the call cancels the request on every node.
        """

        with self._begun(context) as client:
            wanted = from_request(request)
            voice: GrpcResponseWriter | None = None
            match wanted.prompt.prompt:
                case ChatPrompt(tools=tools):
                    offer = self._offer(tools)
                    wanted = replace(
                        wanted,
                        shown=self._model.shown(bool(tools)),
                        sampling=self._guided(wanted.sampling, offer),
                    )
                    voice = GrpcResponseWriter(listening(self._model.speech, wanted.prompt, offer))

            async def write(request_id: str, piece: OutputChunk | FinalChunk) -> None:
                response = _response(request_id, piece)
                if voice is not None:
                    voice.tell(piece, response)
                await context.write(response)

            retry = self._answers.retry(
                client,
                _metadata(context, "idempotency-key"),
                partial(request.SerializeToString, deterministic=True),
                new_request_id(),
            )
            await self._answers.generate(
                wanted, client, write, _metadata(context, HEADER), retry=retry
            )

    async def Embed(
        self, request: router_pb2.EmbedRequest, context: Context
    ) -> router_pb2.EmbedResponse:
        with self._begun(context) as client:
            asker = _asker(request, client, context)
            inputs = [from_input(each) for each in request.inputs]
            pooled = await self._vectors.embed(inputs, asker, request.dimensions)
        return router_pb2.EmbedResponse(
            request_id=asker.request_id,
            vectors=pooled.vectors,
            usage=router_pb2.Usage(prompt_tokens=sum(pooled.num_tokens)),
        )

    async def Score(
        self, request: router_pb2.ScoreRequest, context: Context
    ) -> router_pb2.ScoreResponse:
        with self._begun(context) as client:
            asker = _asker(request, client, context)
            pairs = one_with_each(request.queries, request.documents)
            scored = await self._vectors.score(pairs, asker, request.instruct)
        return router_pb2.ScoreResponse(
            request_id=asker.request_id,
            scores=scored.scores,
            usage=router_pb2.Usage(prompt_tokens=scored.num_tokens),
        )

    async def ScoreTokens(
        self, request: router_pb2.ScoreTokensRequest, context: Context
    ) -> router_pb2.ScoreTokensResponse:
        with self._begun(context) as client:
            asker = _asker(request, client, context)
            scored = await self._vectors.label_scores(
                [from_input(each) for each in request.prompts],
                request.label_token_ids,
                asker,
                softmax=request.apply_softmax,
            )
        return router_pb2.ScoreTokensResponse(
            request_id=asker.request_id,
            scores=[router_pb2.TokenScores(scores=each) for each in scored.scores],
            usage=router_pb2.Usage(prompt_tokens=scored.num_tokens),
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
            name=files.name,
            context_length=files.context_length,
            vocabulary_size=files.vocabulary_size,
            eos_token_ids=files.eos_token_ids,
            has_chat_template=files.chat_template is not None,
        )

    async def GetCluster(
        self, request: router_pb2.GetClusterRequest, context: Context
    ) -> router_pb2.GetClusterResponse:
        return await self._report.make()

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        """Return the history of a request. NOT_FOUND if no process or node knows it any more."""
        return await self._explainer.explain(request.name)

    async def LoadAdapter(
        self, request: router_pb2.LoadAdapterRequest, context: Context
    ) -> router_pb2.LoadAdapterResponse:
        return await self._adapters.load(request.name, request.path)

    async def UnloadAdapter(
        self, request: router_pb2.UnloadAdapterRequest, context: Context
    ) -> router_pb2.UnloadAdapterResponse:
        await self._adapters.unload(request.name)
        return router_pb2.UnloadAdapterResponse(known=True)

    async def Pause(
        self, request: router_pb2.PauseRequest, context: Context
    ) -> router_pb2.PauseResponse:
        return await self._engines.pause(request.mode)

    async def Continue(
        self, request: router_pb2.ContinueRequest, context: Context
    ) -> router_pb2.ContinueResponse:
        return await self._engines.resume()

    async def UpdateWeights(
        self, request: router_pb2.UpdateWeightsRequest, context: Context
    ) -> router_pb2.UpdateWeightsResponse:
        if not request.from_node:
            return await self._engines.update_weights(request.path, abort=request.abort)
        if request.path:
            raise InvalidRequest("from_node: not together with a path")
        return await self._engines.take_weights(request.from_node, abort=request.abort)

    async def ReleaseMemory(
        self, request: router_pb2.ReleaseMemoryRequest, context: Context
    ) -> router_pb2.ReleaseMemoryResponse:
        await self._engines.release_memory(request.tags)
        return router_pb2.ReleaseMemoryResponse()

    async def ResumeMemory(
        self, request: router_pb2.ResumeMemoryRequest, context: Context
    ) -> router_pb2.ResumeMemoryResponse:
        await self._engines.resume_memory(request.tags)
        return router_pb2.ResumeMemoryResponse()

    async def StartProfile(
        self, request: router_pb2.StartProfileRequest, context: Context
    ) -> router_pb2.ProfilesResponse:
        return await self._engines.start_profile(request.num_steps)

    async def StopProfile(
        self, request: router_pb2.StopProfileRequest, context: Context
    ) -> router_pb2.ProfilesResponse:
        return await self._engines.stop_profile()

    async def FlushCache(
        self, request: router_pb2.FlushCacheRequest, context: Context
    ) -> router_pb2.FlushCacheResponse:
        return await self._engines.flush_caches()

    async def Drain(
        self, request: router_pb2.DrainRouterRequest, context: Context
    ) -> router_pb2.DrainRouterResponse:
        await self._ends.drain(in_turn=request.in_turn)
        return router_pb2.DrainRouterResponse()

    async def Move(
        self, request: router_pb2.MoveRequest, context: Context
    ) -> router_pb2.MoveResponse:
        return await self._mover.move(request.request_id, request.source, request.target)

    async def TellPlan(
        self, request: router_pb2.TellPlanRequest, context: Context
    ) -> router_pb2.TellPlanResponse:
        self._plans.take(request.plan)
        return router_pb2.TellPlanResponse()

    def _offer(self, tools: Sequence[Any]) -> ToolOffer:
        """Return the offer of these tools.

        Raises:
            InvalidRequest: the model's tool call format is unknown.
        """
        if tools and self._model.speech.tools == NONE:
            raise InvalidRequest("messages.tools: how this model calls them is not known here")
        return optional(tools)

    def _guided(self, sampling: SamplingParams, offer: ToolOffer) -> SamplingParams:
        """Return the sampling with the grammar that tools need, as over HTTP."""
        try:
            return guided([sampling], offer, self._model.speech, "sampling.guide")[0]
        except ApiError as refusal:
            if refusal.param == "tools":
                raise InvalidRequest(f"messages.{refusal}") from None
            raise InvalidRequest(
                "sampling.guide: no grammar can write this model's tool calls; send one of both"
            ) from None

    @contextmanager
    def _begun(self, context: Context) -> Iterator[Client]:
        """Yield the client of a request and count the request.

        Send retry-after if it is overloaded.
        """
        try:
            self._guard.begin(context.caller)
            yield context.caller
        except Overloaded as error:
            context.set_trailing_metadata((("retry-after", str(ceil(error.retry_after_s))),))
            raise


def _asker(request: Any, client: Client, context: Context) -> PoolingCaller:
    """Return the PoolingCaller of any request that has these fields."""
    return PoolingCaller(
        client,
        label=request.request_id,
        request_id=new_request_id(),
        traceparent=_metadata(context, HEADER),
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
    )


def _metadata(context: Context, wanted: str) -> str:
    """Return the call's metadata with that name, "" if absent."""
    for name, value in context.invocation_metadata() or ():
        if name == wanted and isinstance(value, str):
            return value
    return ""


def _response(request_id: str, piece: OutputChunk | FinalChunk) -> router_pb2.GenerateResponse:
    match piece:
        case FinalChunk(usage=usage, stop_reason=reason):
            predicted = usage.predicted
            return router_pb2.GenerateResponse(
                request_id=request_id,
                text=piece.text,
                token_ids=piece.token_ids,
                logprobs=_logprobs(piece.tokens),
                prompt_logprobs=_prompt_logprobs(piece),
                stop_string=reason if isinstance(reason, str) else None,
                stop_token_id=reason if isinstance(reason, int) else None,
                finish_reason=piece.finish_reason,
                usage=router_pb2.Usage(
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    cached_tokens=usage.cached_tokens,
                    accepted_prediction_tokens=predicted.accepted if predicted else None,
                    rejected_prediction_tokens=predicted.rejected if predicted else None,
                ),
            )
        case _:
            return router_pb2.GenerateResponse(
                request_id=request_id,
                text=piece.text,
                token_ids=piece.token_ids,
                logprobs=_logprobs(piece.tokens),
                prompt_logprobs=_prompt_logprobs(piece),
            )


def _prompt_logprobs(piece: OutputChunk) -> sampling_pb2.Logprobs | None:
    """Return log-probabilities of the prompt's tokens, without the first token, which has none."""
    return _logprobs(piece.prompt.tokens[1:]) if piece.prompt is not None else None


def _logprobs(tokens: Sequence[TokenReport]) -> sampling_pb2.Logprobs | None:
    if not tokens:
        return None
    return sampling_pb2.Logprobs(
        logprob=[token.logprob or 0.0 for token in tokens],
        num_top=len(tokens[0].top),
        top_token=[other.token for token in tokens for other in token.top],
        top_logprob=[other.logprob or 0.0 for token in tokens for other in token.top],
    )
