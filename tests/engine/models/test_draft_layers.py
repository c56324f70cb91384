"""Draft layers and draft models: their drafts are those of transformers' layer or model for the
same vectors, however earlier tokens were computed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from common.config import SpeculativeConfig
from common.errors import ConfigError
from common.requests.sampling import SamplingParams
from engine.batch.batch import TO_GUESS
from engine.batch.graph_shapes import GraphShape
from engine.models import load, open_checkpoint
from engine.models.drafting import DeviceDrafter
from engine.models.refill import found
from engine.models.spec import LoadTarget
from engine.runner import forwards
from engine.runner.draft_graphs import GraphDrafter
from kernels.sampling.generator import gumbel_noise
from tests.support.engine.steps import Steps
from tests.support.hardware.tapes import RepeatRecorder
from tests.support.models.checkpoints import (
    TENSORS,
    edit_config,
    fingerprint,
    make_checkpoint,
    reference_model,
)
from tests.support.models.drafters import (
    make_draft,
    make_eagle,
    make_eagle3,
    make_hybrid_mtp,
    make_mtp,
)
from tests.support.models.tiny_models import make_tiny
from tests.support.models.vision import make_vision_checkpoint

CPU = torch.device("cpu")
NUM_DRAFTS = 3
DRAFT_MODELS = ("qwen2", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3")
GREEDY = SamplingParams(max_tokens=100, seed=0, temperature=0.0)

Draw = Callable[[Tensor, int], int]  # of the logits of a token at an index


@dataclass(frozen=True)
class Guessing:
    """A model and its draft layer. `behind` returns transformers' drafts after a text: this
    number of drafts, each drawn from its logits."""

    model: Path
    speculation: SpeculativeConfig
    behind: Callable[[list[int], Draw], list[int]]
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def drafts(self, text: list[int], sampling: SamplingParams) -> list[int]:
        """Return the drafts after a text, cached because tests of one model use the same ones."""
        key = (sampling.seed, *text)
        if key not in self.known:
            self.known[key] = self.behind(text, _draw(sampling))
        return self.known[key]


def _draw(sampling: SamplingParams) -> Draw:
    """Return a function that samples a request's tokens by its temperature alone."""

    def draw(logits: Tensor, index: int) -> int:
        if sampling.greedy:
            return int(logits.argmax())
        seeds = torch.tensor([[sampling.seed, 0]], dtype=torch.int32)
        noise = gumbel_noise(seeds, torch.tensor([index], dtype=torch.int32), len(logits))
        return int((logits / sampling.temperature + noise[0]).argmax())

    return draw


def _eagle(root: Path) -> Guessing:
    model = make_checkpoint(root / "model", "llama", num_hidden_layers=2)
    head = make_eagle(root / "head", model, bias=True)
    tensors = load_file(head / TENSORS)

    def joined(vectors: Tensor, embeddings: Tensor) -> Tensor:
        both = torch.cat((embeddings, vectors), dim=-1)
        return F.linear(both, tensors["fc.weight"], tensors["fc.bias"])

    layer = _layer(head, tensors, "layers.0.")
    layer.input_layernorm = torch.nn.Identity()
    behind = _behind(reference_model(model), layer, joined, lambda x: x)
    return Guessing(model, SpeculativeConfig(method="eagle", draft_model=str(head)), behind)


def _mtp(root: Path) -> Guessing:
    model = make_mtp(make_checkpoint(root / "model", "deepseek_v3"))
    tensors, name = load_file(model / TENSORS), "model.layers.2."

    def normed(x: Tensor, norm: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}{norm}.weight"], 1e-6)

    def joined(vectors: Tensor, embeddings: Tensor) -> Tensor:
        both = torch.cat((normed(embeddings, "enorm"), normed(vectors, "hnorm")), dim=-1)
        return F.linear(both, tensors[f"{name}eh_proj.weight"])

    own = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head")
    of_layer = {each: t for each, t in tensors.items() if not any(part in each for part in own)}
    layer = _layer(model, of_layer, name)
    behind = _behind(reference_model(model), layer, joined, lambda x: normed(x, "shared_head.norm"))
    return Guessing(model, SpeculativeConfig(method="mtp"), behind)


def _hybrid(root: Path, architecture: str) -> Guessing:
    model = make_hybrid_mtp(make_checkpoint(root / "model", architecture))
    tensors = load_file(model / TENSORS)

    def normed(x: Tensor, norm: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + tensors[f"mtp.{norm}.weight"], 1e-6)

    def joined(vectors: Tensor, embeddings: Tensor) -> Tensor:
        parts = normed(embeddings, "pre_fc_norm_embedding"), normed(vectors, "pre_fc_norm_hidden")
        return F.linear(torch.cat(parts, dim=-1), tensors["mtp.fc.weight"])

    layer, reference = _layer(model, tensors, "mtp.layers.0."), reference_model(model)
    behind = _behind(reference, layer, joined, lambda x: x, lambda x: normed(x, "norm"))
    return Guessing(model, SpeculativeConfig(method="mtp"), behind)


def _eagle3(root: Path) -> Guessing:
    model = make_checkpoint(root / "model", "llama", num_hidden_layers=7)
    head = make_eagle3(root / "head", model)
    tensors, name = load_file(head / TENSORS), "midlayer."
    reference = reference_model(model)

    def normed(x: Tensor, norm: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{norm}.weight"], 1e-6)

    layer = _layer(head, {}, "")
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = tensors[f"{name}self_attn.{part}.weight"]
        getattr(layer.self_attn, part).weight = torch.nn.Parameter(weight)
    for part in ("gate_proj", "up_proj", "down_proj"):
        weight = tensors[f"{name}mlp.{part}.weight"]
        getattr(layer.mlp, part).weight = torch.nn.Parameter(weight)

    @torch.no_grad()
    def behind(text: list[int], draw: Draw) -> list[int]:
        drafts: list[int] = []
        states = reference.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        tapped = torch.cat([states[number][0] for number in (2, 3, 4)], dim=1)
        vectors = F.linear(tapped, tensors["fc.weight"])
        for _ in range(NUM_DRAFTS):
            embeddings = reference.get_input_embeddings()(torch.tensor([*text, *drafts])[1:])
            embeddings = normed(embeddings, f"{name}input_layernorm")
            both = torch.cat((embeddings, normed(vectors, f"{name}hidden_norm")), dim=1)
            x = F.pad(both, (0, 0, 1, 0))[None]  # nothing is before the first token
            places = torch.arange(x.shape[1])[None]
            mixed, _ = layer.self_attn(
                x,
                position_embeddings=layer.rotary(x, places),
                attention_mask=torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None],
            )
            past = vectors[-1] + mixed[0, -1]
            out = past + layer.mlp(normed(past, f"{name}post_attention_layernorm"))
            vectors = torch.cat((vectors, out[None]))
            logits = torch.full((len(tensors["t2d"]),), -torch.inf)
            logits[1::2] = tensors["lm_head.weight"] @ normed(out, "norm")
            drafts.append(draw(logits, len(text) + len(drafts)))
        return drafts

    return Guessing(model, SpeculativeConfig(method="eagle", draft_model=str(head)), behind)


def _draft_model(root: Path, architecture: str = "qwen3") -> Guessing:
    model = make_checkpoint(root / "model", "llama")
    draft = make_checkpoint(root / "draft", architecture, seed=1)
    reference = reference_model(draft)

    @torch.no_grad()
    def behind(text: list[int], draw: Draw) -> list[int]:
        drafts: list[int] = []
        for _ in range(NUM_DRAFTS):
            logits = reference(torch.tensor([[*text, *drafts]])).logits[0, -1]
            drafts.append(draw(logits, len(text) + len(drafts)))
        return drafts

    return Guessing(model, SpeculativeConfig(method="draft_model", draft_model=str(draft)), behind)


def _layer(directory: Path, tensors: dict[str, Tensor], prefix: str) -> torch.nn.Module:
    """Return transformers' decoder layer, of the type of the model's last one, with these
    tensors of a checkpoint."""
    config = AutoConfig.from_pretrained(directory)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = model.model.layers[-1]
    mine = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    experts: dict[int, dict[str, Tensor]] = {}
    for name in [name for name in mine if name.startswith("mlp.experts.")]:
        _, _, number, matrix, _ = name.split(".")
        experts.setdefault(int(number), {})[matrix] = mine.pop(name)
    if experts:  # in transformers' format
        each = [experts[number] for number in sorted(experts)]
        mine["mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat((one["gate_proj"], one["up_proj"])) for one in each]
        )
        mine["mlp.experts.down_proj"] = torch.stack([one["down_proj"] for one in each])
    missing = layer.load_state_dict(mine, strict=False).missing_keys
    assert not mine or set(missing) <= {"input_layernorm.weight"}
    layer.rotary = model.model.rotary_emb
    return layer


def _behind(
    model: torch.nn.Module,
    layer: torch.nn.Module,
    joined: Callable[[Tensor, Tensor], Tensor],
    for_head: Callable[[Tensor], Tensor],
    recurring: Callable[[Tensor], Tensor] = lambda x: x,
) -> Callable[[list[int], Draw], list[int]]:
    """Compute the definition: all vectors of the text and of its drafts, again for each draft.

    Args:
        recurring: the output of the layer that is its next input.
    """

    @torch.no_grad()
    def behind(text: list[int], draw: Draw) -> list[int]:
        embed, drafts = model.get_input_embeddings(), []
        vectors = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        for _ in range(NUM_DRAFTS):
            tokens = torch.tensor([*text, *drafts])
            # Nothing precedes the first token: its key and value are zeros.
            x = torch.cat(
                (vectors.new_zeros(1, vectors.shape[1]), joined(vectors, embed(tokens[1:])))
            )
            places = torch.arange(len(x))[None]
            hidden = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
            out = layer(
                x[None],
                attention_mask=hidden,
                position_ids=places,
                position_embeddings=layer.rotary(x[None], places),
            )[0]
            out = recurring(out)
            vectors = torch.cat((vectors, out[-1:]))
            logits = model.get_output_embeddings()(for_head(out[-1]))
            drafts.append(draw(logits, len(text) + len(drafts)))
        return drafts

    return behind


@pytest.fixture(
    scope="module",
    params=[
        _eagle,
        _mtp,
        _eagle3,
        partial(_hybrid, architecture="qwen3_next"),
        pytest.param(partial(_hybrid, architecture="qwen3_5_text"), marks=pytest.mark.long),
        _draft_model,
        *(
            pytest.param(partial(_draft_model, architecture=each), marks=pytest.mark.long)
            for each in DRAFT_MODELS
        ),
    ],
    ids=["eagle", "mtp", "eagle3", "qwen3_next", "qwen3_5", "draft_model", *DRAFT_MODELS],
)
def guessing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guessing:
    return request.param(tmp_path_factory.mktemp("guessing"))


class DrawnDrafts:
    """Records the drafts that the device draws, row by row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[list[int]] = []
        drawn, draw = forwards.drawn, GraphDrafter.draw

        def noting(steps, batch, num_rows, *others):
            token_ids = drawn(steps, batch, num_rows, *others)
            self._note(token_ids, batch.query_starts[: num_rows[0]])
            return token_ids

        def noting_graph(drafter, batch, num_rows, columns):
            result = draw(drafter, batch, num_rows, columns)
            if (batch.token_ids != TO_GUESS).all():  # otherwise more drafts follow
                self._note(batch.token_ids, batch.query_starts[: int(num_rows)])
            return result

        monkeypatch.setattr(forwards, "drawn", noting)
        monkeypatch.setattr(GraphDrafter, "draw", noting_graph)

    def _note(self, token_ids: Tensor, firsts: Tensor) -> None:
        for first in firsts.tolist():
            self.rows.append(token_ids[first + 1 : first + 1 + NUM_DRAFTS].tolist())


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_drafts_are_those_of_transformers_layer(
    guessing: Guessing, overlap: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts in chunks of any size, after pages of another request, and after rejected
    drafts. With overlap the rejection is not known yet. Each draft is drawn with its own request's
    noise for its position.

    Seen failing with vectors of a step's last drafts instead of the accepted ones, with only those
    of rows' last tokens, with a first token that has a predecessor, and with noise of positions
    shifted by the number of rejected drafts.
    """
    model = load(guessing.model, CPU, torch.float32, speculation=guessing.speculation)
    model.compute_in_one_way()
    said, recorder = DrawnDrafts(monkeypatch), RepeatRecorder() if graphs else None
    steps = Steps(model, num_slots=4 * (1 + NUM_DRAFTS), overlap=overlap, recorder=recorder)
    for shape in steps.runner.graph_shapes:
        if shape.chooses or shape == GraphShape(24, 7, late=True):
            steps.runner.capture(shape)
    prompts = [[7], list(range(40)), [9, 8] * 20, [*range(32), 5, 6]]
    hot = [SamplingParams(max_tokens=100, seed=seed, temperature=1.0) for seed in (5, 6)]
    samplings = [GREEDY, hot[0], GREEDY, hot[1]]
    slots = [steps.add(*one) for one in zip(prompts, samplings, strict=True)]
    for slot, chunk in zip(slots[:3], (1, 40, 13), strict=True):
        steps.prefill(slot, chunk=chunk)
    if steps.table.tables.state_pages:  # the content of these pages is useless without a state
        steps.prefill(slots[3])
    else:
        pages = steps.table.page_table
        pages[slots[3], :, :2] = pages[slots[1], :, :2]
        steps.prefill(slots[3], start=32)
    for _ in range(4):
        rows = []
        for slot in slots:
            known, length = int(steps.table.known[slot]), int(steps.table.length[slot])
            steps.table.tokens[slot, known : length + NUM_DRAFTS] = TO_GUESS
            rows.append((slot, length - 1, length + NUM_DRAFTS))
        steps.launch(rows, verify=True)
    steps.settle()
    texts = [steps.table.tokens_of(slot).tolist() for slot in slots]
    steps.close()
    assert len(said.rows) == 4 * len(slots)
    assert not graphs or len(recorder.replays) >= 4 * (2 + 2 * NUM_DRAFTS)
    for row, text in enumerate(texts):
        length = len(prompts[row]) + 1
        for drafts in said.rows[row :: len(slots)]:
            assert drafts == guessing.drafts(text[:length], samplings[row])
            stood = 0
            while stood < NUM_DRAFTS and drafts[stood] == text[length + stood]:
                stood += 1
            length += 1 + stood


@pytest.fixture
def llama(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_hidden_layers": 2}, ["num_hidden_layers", "one layer"]),
        ({"hidden_size": 128}, ["hidden_size", "64"]),
        ({"vocab_size": 1000}, ["vocab_size", "320"]),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ["layers of the model's 2"]),
        ({"model_type": "mixtral"}, ["LlamaForCausalLM", "model_type llama"]),
        ({"intermediate_size": 100}, ["layers.0.mlp.gate_proj.weight", "100"]),
        ({"mlp_bias": True}, ["misses", "layers.0.mlp"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_head_for_another_model_is_rejected_by_name(tmp_path, llama, changes, words):
    head = make_eagle(tmp_path / "head", llama)
    edit_config(head, **changes)
    _check_refused(words, lambda: load(llama, CPU, torch.float32, speculation=_with_head(head)))


def _check_refused(words: Iterable[str], load: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as refused:
        load()
    assert all(word in str(refused.value) for word in words), refused.value


def _with_head(head: Path) -> SpeculativeConfig:
    return SpeculativeConfig(method="eagle", draft_model=str(head))


def _with_draft(draft: Path) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", draft_model=str(draft))


@pytest.mark.parametrize(
    "made, words",
    [
        ({"vocab_size": 400}, ["400 tokens", "the model 320"]),
        ({"architecture": "qwen3_next"}, ["qwen3_next", "recurrent states"]),
        ({"made_by": AutoModel}, ["llama", "no language model head"]),
    ],
    ids=["vocabulary", "states", "no head"],
)
def test_an_incompatible_draft_model_is_rejected_by_name(tmp_path, llama, made, words):
    draft = make_checkpoint(tmp_path / "draft", **{"architecture": "llama", **made})
    words = (*words, str(draft))
    _check_refused(words, lambda: open_checkpoint(llama, speculation=_with_draft(draft)))


def test_draft_models_of_transformers_and_with_images_are_rejected_by_name(tmp_path, llama):
    for make, words in (
        (lambda root: make_tiny(root, "granite"), "granite.* is not supported; llama"),
        (make_vision_checkpoint, "images are not supported"),
    ):
        draft = make(tmp_path / words[:7])
        edit_config(draft, vocab_size=320)
        with pytest.raises(ConfigError, match=words):
            open_checkpoint(llama, speculation=_with_draft(draft))


def test_models_without_a_draft_layer_are_rejected(llama, tmp_path):
    mtp, without = SpeculativeConfig(method="mtp"), make_checkpoint(tmp_path, "qwen3_next")
    for directory, backend, speculation, words in (
        (llama, "native", mtp, "mtp needs an MTP layer"),
        (without, "native", mtp, f"mtp needs an MTP layer.*{without} has none"),
        (llama, "transformers", mtp, "mtp needs a native implementation"),
        (llama, "transformers", _with_draft(llama), "draft_model needs a native implementation"),
        (llama, "native", _with_head(tmp_path / "none"), "no such directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_checkpoint(directory, backend, speculation)


def test_the_fingerprint_of_a_node_includes_its_draft_layer(llama, tmp_path):
    """Its presence, its name, and its weights. Drafts without a layer are not included."""
    plain = fingerprint(llama)
    assert plain == fingerprint(llama, speculation=SpeculativeConfig(method="ngram"))
    for make, with_drafter in ((make_eagle, _with_head), (make_draft, _with_draft)):
        drafters = [make(tmp_path / f"{make.__name__} {n}", llama, seed=n) for n in range(2)]
        first, second = (fingerprint(llama, speculation=with_drafter(each)) for each in drafters)
        assert {name for name in first if first[name] != second[name]} == {"drafter"}
        assert {name for name in plain if plain[name] != first[name]} == {"drafter", "config"}


def test_a_layer_of_the_checkpoint_counts_as_weights_and_is_updated_with_them(tmp_path):
    old, new = (
        make_mtp(make_checkpoint(tmp_path / str(seed), "deepseek_v3", seed=seed), seed=seed)
        for seed in range(2)
    )
    mtp = SpeculativeConfig(method="mtp")
    plain, drafting = open_checkpoint(old), open_checkpoint(old, speculation=mtp)
    weighed = [each.weight_bytes(LoadTarget(CPU, torch.float32)) for each in (plain, drafting)]
    assert weighed[1] > weighed[0]
    assert set(drafting.stored()) - set(plain.stored())
    model = load(old, CPU, torch.float32, speculation=mtp)
    assert len(model.products) == len(load(old, CPU, torch.float32).products)
    open_checkpoint(new, speculation=mtp).refill(model)
    fresh = load(new, CPU, torch.float32, speculation=mtp)
    for name in ("token_norm", "head_norm", "body.ffn_norm"):
        mine, its = (attrgetter(name)(each.drafter.layer) for each in (model, fresh))
        assert torch.equal(mine.weight, its.weight)


@pytest.mark.parametrize(
    "make, with_drafter", [(make_eagle, _with_head), (make_draft, _with_draft)]
)
def test_a_drafter_of_another_checkpoint_is_kept_in_updates_and_released_with_the_weights(
    llama, tmp_path, make, with_drafter
):
    """After a release they are restored unchanged, or not at all."""
    drafter, new = (
        make(tmp_path / "drafter", llama),
        make_checkpoint(tmp_path / "new", "llama", seed=4),
    )
    speculation = with_drafter(drafter)
    plain, drafting = open_checkpoint(llama), open_checkpoint(llama, speculation=speculation)
    weighed = [each.weight_bytes(LoadTarget(CPU, torch.float32)) for each in (plain, drafting)]
    assert weighed[1] > weighed[0]
    assert set(drafting.stored()) == set(plain.stored())
    model = drafting.load(LoadTarget(CPU, torch.float32))
    assert len(model.products) == len(plain.load(LoadTarget(CPU, torch.float32)).products)
    before = _tensors_of(model.drafter)
    open_checkpoint(new, speculation=speculation).refill(model)
    assert all(map(torch.equal, _tensors_of(model.drafter), before))
    drafting.drain(model)
    assert not all(map(torch.equal, _tensors_of(model.drafter), before))
    drafting.refill(model)
    assert all(map(torch.equal, _tensors_of(model.drafter), before))
    drafting.drain(model)
    make(drafter, llama, seed=7)
    with pytest.raises(ConfigError, match=r"draft_model: the files have changed"):
        drafting.refill(model)


def _tensors_of(drafter: DeviceDrafter) -> list[Tensor]:
    """Return copies of the tensors of a drafter's layers."""
    return [each.clone() for each in found(Tensor, list(drafter.parts))]
