"""Adapters from their files to their slots: accepted and rejected files, eviction, and waiting
requests."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import LoraConfig
from common.errors import (
    AdapterNotLoaded,
    ConfigError,
    FailedPrecondition,
    InvalidRequest,
    Overloaded,
)
from engine.adapters.adapters import (
    AdapterBank,
    AdapterManager,
    adapter_directory,
    bank_of,
    load_all,
    no_adapters,
)
from engine.adapters.library import (
    MAX_LOADING,
    AdapterCache,
    AdapterDirectory,
    AdapterLoader,
    no_adapter_directory,
)
from engine.adapters.stored import AdapterLimits, AdapterReader, LoraAdapter, LoraPair
from engine.batch.table import SlotTable
from engine.models import load
from engine.models.checkpoint import OpenFiles
from engine.scheduler.arrivals import SKIP_AHEAD_S
from node.queues import AdapterQueue
from tests.support.engine.engine_rig import Rig
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.specs import make_batch, make_request

CPU = torch.device("cpu")
LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint, CPU, torch.float32)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return reference_model(checkpoint)


@pytest.fixture
def shelf(model, tmp_path):
    (tmp_path / "shelf").mkdir()
    reader = AdapterReader(products=model.products, limits=LIMITS, dtype=torch.float32)
    return AdapterDirectory(tmp_path / "shelf", reader)


@pytest.fixture
def make(reference, tmp_path):
    def make(name="a", **how):
        return make_adapter(tmp_path / "shelf" / name, reference, **how)

    return make


def refusal(shelf, path="a"):
    with pytest.raises(InvalidRequest) as refused:
        shelf.read(path)
    assert str(refused.value).startswith("lora_path: ")
    return str(refused.value)


def test_an_adapter_is_a_pair_for_each_module_with_its_scale_in_the_second(shelf, make):
    directory = make(rank=4, alpha=6.0, modules=("q_proj", "down_proj"))
    adapter = shelf.read("a")
    stored = load_file(directory / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    assert len(adapter.pairs) == 4
    down, up = (stored[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    assert torch.equal(adapter.pairs[name].down, down)
    assert torch.equal(adapter.pairs[name].up, up * 1.5)


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_their_rank(shelf, make):
    plain, stable = make("a", rank=4, alpha=4.0), make("b", rank=4, alpha=2.0, use_rslora=True)
    assert plain != stable
    one, other = shelf.read("a").pairs, shelf.read("b").pairs
    assert all(torch.equal(one[name].up, other[name].up) for name in one)


def test_an_adapters_id_depends_only_on_its_content(shelf, make):
    make("a", seed=1), make("b", seed=1, lora_dropout=0.7), make("c", seed=2)
    make("d", seed=1, alpha=32.0), make("e", seed=1, modules=("q_proj",))
    ids = [shelf.read(name).id for name in "abcde"]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4
    assert {len(each) for each in ids} == {16}


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"lora_alpha": math.inf}, "lora_alpha"),
        ({"r": 0}, "r must"),
    ],
)
def test_unsupported_configurations_are_rejected_by_name(shelf, make, wrong, named):
    make(**wrong)
    assert named in refusal(shelf)


def test_modules_that_the_model_lacks_are_rejected_by_name(shelf, make):
    make(modules=("lm_head",))
    assert "the model has no lm_head that an adapter may change" in refusal(shelf)


@pytest.mark.parametrize("side", ["A", "B"])
def test_incomplete_pairs_and_pairs_of_other_sizes_are_rejected(shelf, make, side):
    path = make(modules=("q_proj",)) / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"
    save_file({**tensors, name: torch.ones(7, 5)}, path)
    assert "layers.0.self_attn.q_proj has shapes" in refusal(shelf)
    save_file({each: tensors[each] for each in tensors if each != name}, path)
    assert "layers.0.self_attn.q_proj has" in refusal(shelf)
    save_file({**tensors, "base_model.model.other.lora_embedding_A": torch.ones(1)}, path)
    assert "lora_embedding_A is not a matrix of a LoRA adapter" in refusal(shelf)


def test_too_large_an_adapter_is_rejected_before_it_is_read(shelf, make, monkeypatch):
    make("rank", rank=17)
    directory = make("bytes")
    with (directory / "adapter_model.safetensors").open("ab") as file:
        file.truncate(LIMITS.max_bytes + 1)
    make("config", notes="x" * (1 << 20))
    monkeypatch.setattr(OpenFiles, "map", lambda *_: pytest.fail("it is read"))
    assert "rank 17, engine.lora.max_rank is 16" in refusal(shelf, "rank")
    assert f"{LIMITS.max_bytes} allowed" in refusal(shelf, "bytes")
    assert "allowed" in refusal(shelf, "config")


def test_invalid_files_do_not_end_the_engine(shelf, make):
    path = make(modules=("q_proj",)) / "adapter_model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    one, other, *_ = [name for name in header if name.endswith("lora_A.weight")]
    header[one]["data_offsets"] = header[other]["data_offsets"]  # two tensors of the same bytes
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + path.read_bytes()[8 + length :])
    assert refusal(shelf).endswith("does not begin where the tensor before it ends)")
    make("large", alpha=10**400)
    assert refusal(shelf, "large") == "lora_path: the files cannot be read (OverflowError)"
    config = make("text") / "adapter_config.json"
    config.write_bytes(b"\xff[" * 1000)
    assert refusal(shelf, "text").startswith("lora_path: text/adapter_config.json: ")


def test_no_file_outside_of_the_directory_is_read(shelf, make, tmp_path):
    make("inside/a")
    outside = tmp_path / "outside"
    (tmp_path / "shelf" / "inside" / "a").rename(outside)
    os.symlink(outside, tmp_path / "shelf" / "link")
    for path in ("../outside", str(outside), "link", "inside/../../outside", ".", "", "\0", "/"):
        assert refusal(shelf, path) in (
            "lora_path: it is outside engine.lora.adapter_dir",
            "lora_path: not a path",
        )
    assert refusal(shelf, "nowhere").endswith("nowhere/adapter_config.json: no such file")
    assert str(tmp_path) not in refusal(shelf, "nowhere")
    outside.rename(tmp_path / "shelf" / "again")
    assert shelf.read(str(tmp_path / "shelf" / "again")).pairs


def test_without_a_directory_there_are_no_adapters(model):
    nothing = no_adapter_directory()
    assert refusal(nothing) == "lora_path: this node has no engine.lora.adapter_dir"
    assert bank_of(LoraConfig(), model, free=0).num_slots == 0


def test_an_engine_starts_only_if_its_configured_adapters_load(model, make, tmp_path):
    make("a"), make("b", seed=1)
    config = LoraConfig(adapter_dir=tmp_path / "shelf", preload=("a", "other=b"))
    library = AdapterCache(config.max_cpu_loras, config.max_cpu_lora_bytes)
    load_all(config, adapter_directory(config, model), library)
    assert set(library.names()) == {"a", "other"}
    for wrong in ({"preload": ("c",)}, {"preload": ("a", "b"), "max_cpu_loras": 1}):
        config = LoraConfig(adapter_dir=tmp_path / "shelf", **wrong)
        with pytest.raises(ConfigError, match=r"engine\.lora\.preload: "):
            load_all(
                config,
                adapter_directory(config, model),
                AdapterCache(config.max_cpu_loras, config.max_cpu_lora_bytes),
            )


def test_slots_that_do_not_fit_and_models_without_linear_layers_are_rejected(model, tmp_path):
    config = LoraConfig(adapter_dir=tmp_path)
    needed = bank_of(config, model, free=1 << 30).num_bytes
    assert bank_of(config, model, free=needed).num_slots == 4
    with pytest.raises(ConfigError, match=r"engine\.lora\.max_loras: 4 slots of rank 32 take"):
        bank_of(config, model, free=needed - 1)
    borrowed = type("Borrowed", (), {"products": ()})()
    with pytest.raises(
        ConfigError, match=r"engine\.lora\.adapter_dir: .* runs on the Transformers library"
    ):
        bank_of(config, borrowed, free=1 << 30)


def drawn(name, num_numbers=4):
    pair = LoraPair(torch.zeros(1, num_numbers), torch.zeros(0, 1))
    return LoraAdapter(name.encode() * 16, {"m": pair})


def cached(max_adapters, max_bytes, names, num_numbers=4):
    library = AdapterCache(max_adapters, max_bytes)
    for name in names:
        library.add(name, drawn(name, num_numbers))
    return library


def test_the_least_recently_used_adapters_are_evicted_by_number_and_bytes():
    library = cached(2, 1 << 20, "ab")
    library.drop(library.hold(drawn("a").id).id)
    library.add("c", drawn("c"))
    assert set(library.names()) == {"a", "c"} and library.num_evicted == 1
    library = cached(9, 100, "abc", 8)  # 32 bytes each
    library.add("d", drawn("d", 15))
    assert set(library.names()) == {"c", "d"} and library.num_bytes == 92


def test_adapters_in_use_are_never_evicted():
    library = cached(2, 1 << 20, "ab")
    for name in "ab":
        library.hold(drawn(name).id)
    with pytest.raises(Overloaded):
        library.add("c", drawn("c"))
    library.drop(drawn("b").id)
    library.add("c", drawn("c"))
    assert set(library.names()) == {"a", "c"}


def test_an_adapter_in_use_outlives_its_name_and_its_slot_is_not_reused():
    library = cached(2, 1 << 20, "a")
    held = library.hold(drawn("a").id)
    assert library.remove("a")
    assert not library.remove("a")
    assert not library.names()
    with pytest.raises(AdapterNotLoaded):
        library.hold(held.id)
    assert len(library) == 1
    library.drop(held.id)
    assert len(library) == 0


def test_a_name_has_one_content_and_a_content_may_have_two_names():
    library = AdapterCache(2, 1 << 20)
    assert library.add("a", drawn("a"))
    assert not library.add("a", drawn("a"))
    with pytest.raises(FailedPrecondition):
        library.add("a", drawn("b"))
    library.add("same", drawn("a"))
    assert len(library) == 1
    library.remove("a")
    assert library.hold(drawn("a").id)


@pytest.fixture
def rig(model):
    """Return a rig with two slots, and requests by the name of their adapter."""
    library, engine = cached(9, 1 << 20, "abcd"), Rig()
    adapters = AdapterManager(library, AdapterBank((), 2, 16, CPU, torch.float32), engine.table)
    line = AdapterQueue(adapters)

    def ask(name, arrived=0.0):
        request = engine.request([1, 2, 3], arrived=arrived, adapter=name.encode() * 16)
        adapters.hold(request)
        line.put(request)
        return request

    return adapters, line, ask


def with_slot(line, now=0.0):
    return "".join(chr(request.spec.adapter[0]) for request, _ in line.ready(now))


def test_as_many_adapters_as_slots_are_computed_together(rig):
    adapters, line, ask = rig
    asked = {name: ask(name) for name in "abca"}
    assert with_slot(line) == "aba"
    assert len(line) == 1
    assert with_slot(line) == ""
    adapters.release(asked["b"].key)
    assert with_slot(line) == "c"
    assert adapters.num_fills == 3


def test_an_adapter_that_is_still_in_a_slot_is_not_copied_again(rig):
    adapters, line, ask = rig
    for name in "aab":
        request = ask(name)
        assert with_slot(line) == name
        adapters.release(request.key)
    assert adapters.num_fills == 2
    ask("c"), ask("b")
    assert with_slot(line) == "cb"  # replaces a, the least recently used
    assert adapters.num_fills == 3


def test_an_adapter_that_is_used_again_keeps_its_slot(rig):
    adapters, line, ask = rig
    request = ask("a")
    assert with_slot(line) == "a"
    adapters.release(request.key)
    ask("a"), ask("b"), ask("c")
    assert with_slot(line) == "ab"


def test_a_waiting_request_is_overtaken_for_a_limited_time_by_requests_with_loaded_adapters(rig):
    adapters, line, ask = rig
    first = {name: ask(name) for name in "ab"}
    assert with_slot(line) == "ab"
    ask("c", arrived=1.0)
    ask("a", arrived=2.0)
    assert with_slot(line, now=2.0) == "a"
    late = 1.0 + SKIP_AHEAD_S + 0.1
    ask("a", arrived=late)
    assert with_slot(line, now=late) == ""
    adapters.release(first["b"].key)
    assert with_slot(line, now=late) == "ca"


def test_a_request_that_leaves_the_queue_holds_no_slot(rig):
    adapters, line, ask = rig
    request = ask("a")
    assert line.remove(request)
    adapters.release(request.key)
    adapters.release(request.key)
    assert with_slot(line) == ""
    assert adapters.num_slots_used == 0


def test_tokens_are_grouped_again_when_their_adapters_change():
    """Steps whose tokens have the same adapters share the groups."""
    table, bank = SlotTable(4, 64, 16), AdapterBank((), 2, 16, CPU, torch.float32)
    adapters, slots = AdapterManager(cached(9, 1 << 20, "ab"), bank, table), []
    for key, name in enumerate("abb"):
        request = make_request([1, 2, 3], key=key, adapter=name.encode() * 16)
        adapters.hold(request)
        assert adapters.take_slot(request)
        slots.append(table.acquire(request))

    def groups(*rows, tokens=1):
        own, count = [slots[row] for row in rows], len(rows)
        return adapters.build(make_batch(own, [0] * count, [tokens] * count)).tokens

    assert [(span[1], span[2]) for span in groups(0, 1, 2).spans()] == [(0, 1), (1, 3)]
    assert groups(0, 1) is groups(0, 2)
    for rows, order in (((1, 0), [1, 0]), ((0, 1), [0, 1]), ((0,), [0])):
        assert groups(*rows).order.tolist() == order
    assert groups(1, 0, tokens=2).order.tolist() == [2, 3, 0, 1]


def test_a_step_without_adapters_has_no_adapter_inputs():
    without = no_adapters(SlotTable(4, 64, 16))
    assert without.build(None) is None


def test_loaded_files_are_registered_in_a_turn_of_the_engine(shelf, make):
    make("a")
    library = AdapterCache(1, 1 << 20)
    loader = AdapterLoader(shelf, library)
    loaded, missing = loader.load("x", "a"), loader.load("y", "b")
    loader._reader.shutdown(wait=True)
    assert not loaded.done() and not loader.names()
    loader.poll()
    assert loaded.result() == (library.names()["x"], True)
    assert isinstance(missing.exception(), InvalidRequest)


def test_the_number_of_concurrent_loads_is_limited(shelf):
    loader = AdapterLoader(shelf, AdapterCache(1, 1 << 20))
    for number in range(MAX_LOADING):
        loader.load(str(number), "nowhere")
    with pytest.raises(Overloaded):
        loader.load("one more", "nowhere")
    loader.close()


def test_configuration_errors_are_explained():
    with pytest.raises(ValueError, match=r"needs lora\.adapter_dir"):
        LoraConfig(preload=("a",))
    with pytest.raises(ValueError, match="letters, digits"):
        LoraConfig(adapter_dir="/x", preload=("../a",))
    assert json.loads(LoraConfig().model_dump_json())["max_loras"] == 4
