"""Other weights in the tensors of an existing model: it computes exactly the same as a model
that was loaded from them."""

from types import SimpleNamespace

import pytest
import torch

from common.config import EngineConfig
from common.errors import FailedPrecondition, InvalidRequest
from common.requests.namespace import UNNAMED
from engine.models import load, open_checkpoint
from engine.models.linear import onednn
from engine.models.spec import LoadTarget
from engine.models.weights import placed_experts
from engine.ranks import Share
from engine.ranks.expert_placement import ExpertPlacement
from engine.update import WeightsInMemory, WeightUpdater
from tests.engine.models.test_model_precision import logits_of
from tests.support.hardware import devices
from tests.support.models.checkpoints import (
    ARCHITECTURES,
    EXPERT_ARCHITECTURES,
    HYBRID_ARCHITECTURES,
    LATENT_ARCHITECTURES,
    VOCABULARY_SIZE,
    make_checkpoint,
)
from tests.support.models.quantized_checkpoints import FORMATS, INT8, requantised

CPU = torch.device("cpu")
ALL = (*ARCHITECTURES, *EXPERT_ARCHITECTURES, *HYBRID_ARCHITECTURES, *LATENT_ARCHITECTURES)
# One of each kind of block. The others are `long`.
SOME = ("gemma2", "gpt_oss", "qwen3_next", "deepseek_v2")
int8 = pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
TOKENS = torch.randint(
    0, VOCABULARY_SIZE, (110,), generator=torch.Generator().manual_seed(0)
).tolist()


@pytest.fixture(params=["torch", "compiled"])
def products(request, monkeypatch):
    devices.use(request.param, monkeypatch)


def changed(tmp_path, architecture, dtype=torch.float32, quantize="none", **fields):
    """Return a model with updated weights, and one that was loaded from these."""
    old = make_checkpoint(tmp_path / "old", architecture, **fields)
    new = make_checkpoint(tmp_path / "new", architecture, seed=1, **fields)
    model = load(old, CPU, dtype, quantize)
    before = logits_of(model, TOKENS)
    open_checkpoint(new).refill(model)
    fresh = load(new, CPU, dtype, quantize)
    assert not torch.equal(before, logits_of(fresh, TOKENS))
    return logits_of(model, TOKENS), logits_of(fresh, TOKENS)


@pytest.mark.parametrize(
    "architecture",
    [*SOME, *(pytest.param(each, marks=pytest.mark.long) for each in ALL if each not in SOME)],
)
def test_a_model_computes_with_its_new_weights(tmp_path, architecture):
    torch.testing.assert_close(*changed(tmp_path, architecture), atol=0.0, rtol=0.0)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    "dtype, quantize",
    [
        pytest.param(torch.bfloat16, "none", id="bfloat16"),
        pytest.param(torch.bfloat16, "int8", id="int8", marks=int8),
        pytest.param(torch.float32, "none", id="float32"),
    ],
)
@pytest.mark.parametrize(
    "architecture", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)]
)
def test_packed_and_quantized_matrices_are_updated_as_well(tmp_path, architecture, dtype, quantize):
    found = changed(tmp_path, architecture, dtype, quantize)
    torch.testing.assert_close(*found, atol=0.0, rtol=0.0)


@pytest.mark.long  # in float32: test_ranks_with_replicas_compute_the_whole_model
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    "architecture, dtype, quantize, stored",
    [
        *(
            case
            for each in ("gpt_oss", "qwen3_moe")
            for case in (
                pytest.param(each, torch.bfloat16, "none", None, id=f"{each}-bfloat16"),
                pytest.param(each, torch.bfloat16, "int8", None, id=f"{each}-int8", marks=int8),
                pytest.param(each, torch.float32, "none", None, id=f"{each}-float32"),
            )
        ),
        pytest.param("qwen3_moe", torch.bfloat16, "none", INT8, id="int8 as stored", marks=int8),
    ],
)
def test_slots_have_the_numbers_of_their_new_experts(
    tmp_path, architecture, dtype, quantize, stored
):
    """They equal those of experts that were there from the beginning. One case has biases."""
    directory = make_checkpoint(tmp_path / "model", architecture)
    if stored:
        directory, _ = requantised(directory, tmp_path, FORMATS[stored])
    checkpoint, first = open_checkpoint(directory), ExpertPlacement(2, 2, counts_tokens=False)
    model = checkpoint.load(
        LoadTarget(CPU, dtype, quantize, Share(1, 2, None, True, placement=first))
    )
    moved, moves = ExpertPlacement(2, 2, counts_tokens=False), {}
    for experts in placed_experts(model):
        moves[experts.layer] = first.slots(experts.layer, experts.shape.count)[::-1]
    moved.move(moves)
    checkpoint.move_experts(model, moves)
    fresh = checkpoint.load(
        LoadTarget(CPU, dtype, quantize, Share(1, 2, None, True, placement=moved))
    )
    x = torch.randn(40, model.spec.hidden_size).to(dtype)
    for mine, other in zip(placed_experts(model), placed_experts(fresh), strict=True):
        weights = torch.ones(40, 1)
        for expert in range(mine.shape.count):
            ids = torch.full((40, 1), expert, dtype=torch.int32)
            found = mine.apply(x, weights, ids)
            assert torch.equal(found, other.apply(x, weights, ids))
            assert expert != 2 or found.any()  # which only the other rank had


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Return directories of weights. `old` is served."""
    root = tmp_path_factory.mktemp("weights")
    make_checkpoint(root / "old")
    make_checkpoint(root / "new", seed=1)
    make_checkpoint(root / "wider", intermediate_size=192)
    make_checkpoint(root / "damaged", seed=2)
    file = root / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    (root / "empty").mkdir()
    return root


@pytest.fixture
def update(shelf):
    served = open_checkpoint(shelf / "old")
    config = EngineConfig(model=str(shelf / "old"), weights_dir=shelf)
    memory = WeightsInMemory(load(shelf / "old", CPU, torch.float32), served)
    made = WeightUpdater(config, shelf / "old", UNNAMED, memory)
    yield made
    made.close()


def test_weights_are_identified_by_their_content(update, shelf, tmp_path):
    one = update.prepare("new").result(60)
    assert len(one) == 16 and one == update.prepare(str(shelf / "new")).result(60)
    assert one != update.prepare("old").result(60)


@pytest.mark.parametrize(
    "path, said",
    [
        ("..", "it is outside engine.weights_dir"),
        ("/etc", "it is outside engine.weights_dir"),
        ("new\0", "not a path"),
    ],
)
def test_a_path_outside_of_the_directory_is_rejected_at_once(update, path, said):
    with pytest.raises(InvalidRequest, match=said):
        update.prepare(path)


@pytest.mark.parametrize(
    "path, said",
    [
        ("wider", "its configuration belongs to another model"),
        ("damaged", "truncated"),
        ("empty", "config.json"),
        ("missing", "config.json"),
    ],
)
def test_incompatible_weights_are_detected_before_anything_changes(update, path, said):
    with pytest.raises(InvalidRequest, match=said) as caught:
        update.prepare(path).result(60)
    assert str(caught.value).startswith("model_path: ") and update.whole
    with pytest.raises(FailedPrecondition, match="not prepared"):
        update.put(b"x" * 16)


def test_without_a_directory_weights_cannot_be_updated(shelf):
    config = EngineConfig(model=str(shelf / "old"))
    memory = WeightsInMemory(SimpleNamespace(), open_checkpoint(shelf / "old"))
    update = WeightUpdater(config, shelf / "old", UNNAMED, memory)
    with pytest.raises(InvalidRequest, match=r"has no engine\.weights_dir"):
        update.prepare("new")
    update.close()


def test_weights_that_cannot_be_read_leave_incomplete_ones_until_the_next_update(
    update, shelf, tmp_path
):
    make_checkpoint(shelf / "vanishing", seed=3)
    vanishing = update.prepare("vanishing").result(60)
    (shelf / "vanishing" / "model.safetensors").unlink()
    with pytest.raises(FailedPrecondition, match="incomplete"):
        update.put(vanishing).result(60)
    assert not update.whole and update.id == b""
    update.put(update.prepare("new").result(60)).result(60)
    assert update.whole
    exact = logits_of(load(shelf / "new", CPU, torch.float32), TOKENS)
    assert torch.equal(logits_of(update._memory.model, TOKENS), exact)
