"""Models computed by transformers' own classes through our pages: the same logits and tokens as
the class alone, for any chunks, and unsupported classes, which are rejected by name."""

import functools
import json
import random
import shutil
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from engine.models import load, open_checkpoint
from engine.models.linear.dense import DenseForm
from engine.models.spec import LoadTarget
from engine.models.transformers_backend import attention
from engine.models.transformers_backend.loading import hold
from engine.models.transformers_backend.skeleton import products
from tests.engine.models.test_model_precision import logits_of
from tests.engine.models.test_updated_weights import TOKENS, int8
from tests.support.engine.steps import Recorder, Steps, logits_after
from tests.support.models.checkpoints import edit_config, fingerprint, make_checkpoint
from tests.support.models.tiny_models import VOCABULARY_SIZE, WINDOW, make_tiny, tiny_config

CPU = torch.device("cpu")
# A property of each that others do not have.
CLASSES = {
    "gpt2": {},  # learned positions, transposed matrices
    "opt": {},  # positions with an offset
    "roberta": {"is_decoder": True},  # positions that start after those of padding
    "gpt_neox": {},  # rotation of a part of a head, attention and MLP side by side
    "granite": {},  # scales of embeddings, of scores and of logits
    # Windows, three layers in as many tables, one without positions, scaled logits.
    "cohere2": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "gemma3_text": {},  # a rotation for each kind of layer
    "gemma3n_text": {},  # layers that attend to the KV of others
    "phimoe": {"sliding_window": WINDOW},  # a window that only the mask contains
    "qwen3_moe": {},  # experts
    "deepseek_v3": {},  # K and V of different sizes
    "llama4_text": {},  # attention by chunks
    "phi3": {},  # one matrix for Q, K and V
    "olmo2": {},
    "gpt_oss": {},  # sinks
    # A rotation by the RoPE depends on the batch, from some length on.
    "helium": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 96,
    },
    "modernbert-decoder": {},  # its decoder has the name of a head
}

# One of each kind of attention, and of each form of matrices.
QUICK = ("gpt2", "cohere2", "qwen3_moe", "deepseek_v3", "llama4_text", "helium")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Make each checkpoint once."""
    return functools.cache(
        lambda kind: make_tiny(tmp_path_factory.mktemp(kind), kind, **CLASSES.get(kind, {}))
    )


@pytest.mark.parametrize(
    "kind, quantize",
    [
        pytest.param("gemma3n_text", "none", marks=pytest.mark.long),
        ("qwen3_moe", "none"),
        pytest.param("gpt2", "int8", marks=int8),
    ],
)
def test_updated_weights_are_used(checkpoints, tmp_path, kind, quantize):
    new = make_tiny(tmp_path, kind, seed=1, **CLASSES[kind])
    model = load(checkpoints(kind), CPU, torch.float32, quantize, "transformers")
    fresh = load(new, CPU, torch.float32, quantize, "transformers")
    before, wanted = logits_of(model, TOKENS), logits_of(fresh, TOKENS)
    assert not torch.equal(before, wanted)
    loadable = open_checkpoint(new, "transformers")
    loadable.refill(model)
    torch.testing.assert_close(logits_of(model, TOKENS), wanted, atol=0.0, rtol=0.0)
    loadable.drain(model)
    loadable.refill(model)
    torch.testing.assert_close(logits_of(model, TOKENS), wanted, atol=0.0, rtol=0.0)


def tokens_of(length, seed):
    return random.Random(seed).choices(range(2, VOCABULARY_SIZE - 64), k=length)


def alone(directory, texts):
    """Return the class's own logits at every position of each text, with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.no_grad():
        return [model.eval()(torch.tensor([text]), use_cache=False).logits[0] for text in texts]


@pytest.mark.parametrize(
    "kind",
    [
        *QUICK,
        *(pytest.param(kind, marks=pytest.mark.long) for kind in CLASSES if kind not in QUICK),
    ],
)
def test_logits_of_random_chunks_of_two_texts_are_those_of_the_class_alone(checkpoints, kind):
    directory = checkpoints(kind)
    model = Recorder(load(directory, CPU, torch.float32, backend="transformers"))
    longest = min(70, model.spec.context_length)
    texts = [tokens_of(longest, 1), tokens_of(longest * 2 // 3, 2)]
    expected = alone(directory, texts)
    steps = Steps(model, overlap=False, num_slots=2, context_length=128)
    slots = [steps.add(text) for text in texts]
    cuts, done, wanted = random.Random(kind), [0, 0], []
    while any(start < len(text) for start, text in zip(done, texts, strict=True)):
        rows = []
        for row, (start, text) in enumerate(zip(done, texts, strict=True)):
            if start == len(text):
                continue
            end = min(len(text), start + cuts.choice((1, 1, 1, 2, 7, 16, 21)))
            rows.append((slots[row], start, end))
            wanted.append(expected[row][end - 1])
            done[row] = end
        # Rows of one token are decode rows, and are last.
        order = sorted(range(len(rows)), key=lambda i: rows[i][2] - rows[i][1] == 1)
        wanted[-len(rows) :] = [wanted[i - len(rows)] for i in order]
        steps.launch([rows[i] for i in order], samples=[True] * len(rows))
    steps.close()
    assert (torch.cat(model.seen) - torch.stack(wanted)).abs().max() <= 1e-4


def test_layers_that_attend_to_the_kv_of_others_keep_none(checkpoints, monkeypatch):
    model = load(checkpoints("gemma3n_text"), CPU, torch.float32)
    assert len(model.spec.layers) == 2  # of four
    stored, store = [], attention.store_kv
    monkeypatch.setattr(attention, "store_kv", lambda *them: stored.append(store(*them)))
    steps = Steps(model, overlap=False)
    steps.prefill(steps.add(tokens_of(20, 5)), chunk=32)
    steps.close()
    assert len(stored) == 2


def test_native_models_and_their_classes_compute_the_same(tmp_path):
    directory = make_checkpoint(tmp_path, "gemma2")
    seen = []
    for backend in ("native", "transformers"):
        model = load(directory, CPU, torch.float32, backend=backend)
        seen.append(logits_after(model, tokens_of(100, 3), (30, 60, 90, 100)))
    assert (seen[0] - seen[1]).abs().max() <= 1e-4


def test_the_backend_is_reported_and_native_is_preferred(tmp_path, checkpoints):
    native = make_checkpoint(tmp_path, "qwen3")
    assert open_checkpoint(native).computed == "natively"
    asked = open_checkpoint(native, "transformers")
    assert asked.computed == "by transformers' Qwen3ForCausalLM, as requested"
    other = open_checkpoint(checkpoints("olmo2"))
    assert other.computed == "by transformers' Olmo2ForCausalLM, olmo2 has no native implementation"
    with pytest.raises(ConfigError, match="'olmo2' is not supported; llama"):
        open_checkpoint(checkpoints("olmo2"), "native")


def test_nodes_with_different_backends_differ_in_one_field_of_the_fingerprint(tmp_path):
    directory = make_checkpoint(tmp_path, "qwen3")
    native, borrowed = fingerprint(directory, "native"), fingerprint(directory, "transformers")
    assert native["model_backend"] == "native" and borrowed["model_backend"] == "transformers"
    assert native["weights"] == borrowed["weights"]


def test_a_fingerprint_depends_on_the_weights_and_not_on_the_path(checkpoints, tmp_path):
    first = fingerprint(checkpoints("olmo2"))
    copy = shutil.copytree(checkpoints("olmo2"), tmp_path / "copy")
    assert fingerprint(copy) == first
    edit_config(copy, rms_norm_eps=0.5)
    assert fingerprint(copy)["config"] != first["config"]


def test_the_context_length_is_that_of_the_class(checkpoints, tmp_path):
    by_chunks = open_checkpoint(checkpoints("llama4_text"))
    assert by_chunks.spec.context_length == WINDOW and f"chunk of {WINDOW}" in by_chunks.computed
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    }
    phi3 = make_tiny(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=128)
    longest = open_checkpoint(phi3)
    assert longest.spec.context_length == 128 and "RoPE depends on the batch" in longest.computed
    assert open_checkpoint(checkpoints("helium")).spec.context_length == 96
    # One of its 512 positions is before a text's first token.
    assert open_checkpoint(checkpoints("roberta")).spec.context_length == 511


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("kind", ["olmo2", "gpt2", "deepseek_v3"])
def test_products_use_the_fast_forms_of_the_processor(checkpoints, kind, quantize):
    """bfloat16 and int8 are close to float32, and use the reported memory."""
    loadable = open_checkpoint(checkpoints(kind), "transformers")
    seen = []
    for dtype, form in ((torch.float32, "none"), (torch.bfloat16, quantize)):
        try:
            model = loadable.load(LoadTarget(CPU, dtype, form))
        except ConfigError as error:
            pytest.skip(str(error))
        seen.append(logits_after(model, tokens_of(50, 4), (20, 40, 50))[-1].float())
    exact, rounded = seen
    assert (exact - rounded).abs().max() < 0.2 * exact.std()


REFUSED = [
    ("mamba", {}, "layer types linear_attention are not supported"),
    ("bart", {}, "encoder-decoder models are not supported"),
    ("bloom", {}, "its forward does not accept position_ids"),
    ("falcon", {}, "it does not use the attention interface"),
    ("doge", {}, "its layers modify the attention mask"),
    ("diffllama", {}, "layer 0 calls attention 2 times"),
    ("rwkv", {}, "recurrent states are not supported"),
    ("phi4_multimodal", {}, "convolutions over tokens are not supported"),
    ("bert", {"is_decoder": False}, "encoders are not supported"),
    ("olmo2", {"architectures": ["Olmo2ForSequenceClassification"]}, "classifiers are only"),
]


@pytest.mark.parametrize("kind, fields, why", REFUSED)
def test_an_unsupported_class_is_rejected_by_name_before_weights_are_read(
    tmp_path, kind, fields, why
):
    tiny_config(kind, **fields).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=why) as refused:
        open_checkpoint(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["dbrx", pytest.param("longcat_flash", marks=pytest.mark.long)])
def test_a_class_that_reads_numbers_out_of_tensors_can_be_probed_without_weights(tmp_path, kind):
    """For example which expert has tokens, as an index, or how many there are."""
    tiny_config(kind).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).spec.layers


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    with pytest.raises(ConfigError, match="remote code, which is not supported"):
        open_checkpoint(tmp_path)


def test_weights_that_are_missing_or_of_another_shape_are_reported_by_name(checkpoints, tmp_path):
    directory = shutil.copytree(checkpoints("olmo2"), tmp_path / "copy")
    edit_config(directory, num_hidden_layers=5)
    with pytest.raises(ConfigError, match=r"misses 11 weights.*model\.layers\.4\."):
        load(directory, CPU, torch.float32)


# Seen failing with the modules in a list while they are replaced.
def test_only_one_matrix_at_a_time_exists_twice(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints("olmo2"))
    replaced = [weakref.ref(module) for _, module, _, _ in products(model)]
    alive: list[int] = []

    class Counting(DenseForm):
        def hold(self, matrix, bias=None):
            alive.append(sum(each() is not None for each in replaced))
            return super().hold(matrix, bias)

    hold(model, Counting(CPU, torch.float32))
    assert alive == list(range(len(replaced), 0, -1))
