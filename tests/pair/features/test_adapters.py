"""LoRA adapters through a prefill and a decode node. Each response is that of a model with the
adapter merged into its weights."""

import contextlib
import time

import pytest

from common.config import LoraConfig
from engine.scheduler.scheduler import DEADLINE_CHECK_S
from kvtransfer.messages import HandoffFailed, OpenHandoff
from node.messages import LoadAdapter, UnloadAdapter
from tests.pair.rig import PairRig, Size
from tests.support.models.adapters import make_adapter, merge
from tests.support.models.checkpoints import (
    ARCHITECTURES,
    EXPERT_ARCHITECTURES,
    HYBRID_ARCHITECTURES,
    LATENT_ARCHITECTURES,
    greedy_tokens,
    reference_model,
)
from tests.support.specs import make_request

NUM_TOKENS = 8
PROMPTS = [[(17 * i + 5 * n) % 256 for i in range(n)] for n in (1, 16, 70, 90)]
NAMES = ("a", "b", "c")


class Shelf:
    """Adapters of one model on disk, and the responses with each of them."""

    def __init__(self, known, directory):
        self._known = known
        self.directory = directory
        self._models = {}
        self._answers = {}
        for seed, name in enumerate(NAMES):
            make_adapter(directory / name, known.reference, seed=seed, rank=4 + 3 * seed)

    def greedy(self, name, prompt):
        """None: without an adapter."""
        if name is None:
            return self._known.greedy(prompt, NUM_TOKENS)
        if name not in self._models:
            base = reference_model(self._known.loaded.directory)
            self._models[name] = merge(base, self.directory / name)
        key = name, tuple(prompt)
        if key not in self._answers:
            (self._answers[key],) = greedy_tokens(self._models[name], [prompt], NUM_TOKENS)
        return self._answers[key]

    def size(self, *names, slots=4, **options):
        lora = LoraConfig(adapter_dir=self.directory, preload=names, max_loras=slots, max_rank=16)
        return Size(lora=lora, **options)


@pytest.fixture(scope="module")
def shelf(known, tmp_path_factory):
    return Shelf(known, tmp_path_factory.mktemp("adapters"))


def ids(rig):
    """Return the adapter ids by name. Every node must report the same ids."""
    reported = [dict(node.engine.loader.names()) for node in rig.nodes]
    assert all(one == reported[0] for one in reported)
    return reported[0] | {None: b""}


def tokens_of(*asked):
    return [one.tokens for one in asked]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_requests_with_and_without_adapters_share_a_batch(known, shelf, overlap):
    wanted = [(name, prompt) for prompt in PROMPTS for name in (None, *NAMES)]
    size = shelf.size(*NAMES, max_running_requests=16, num_pages=256)
    with PairRig(known.loaded, prefill=[size], decode=[size], overlap_schedule=overlap) as rig:
        by_name = ids(rig)
        for cold in ((), (rig.prefill[0],)):
            rig.flush(*cold)
            asked = [rig.ask(prompt, NUM_TOKENS, adapter=by_name[name]) for name, prompt in wanted]
            rig.run()
            assert tokens_of(*asked) == [shelf.greedy(name, prompt) for name, prompt in wanted]
    answers = {tuple(shelf.greedy(name, PROMPTS[3])) for name in (None, *NAMES)}
    assert len(answers) == 1 + len(NAMES), "the adapters make no difference"


def test_adapters_do_not_share_kv(known, shelf):
    prompt = PROMPTS[3]
    size = shelf.size("a", "b")
    with PairRig(known.loaded, prefill=[size], decode=[size]) as rig:
        by_name = ids(rig)
        for name in ("a", None, "b"):
            asked = rig.serve(prompt, NUM_TOKENS, adapter=by_name[name])
            assert asked.tokens == shelf.greedy(name, prompt)
            assert asked.cached_tokens == 0
        again = rig.ask(prompt, NUM_TOKENS, adapter=by_name["a"])
        salted = rig.serve(prompt, NUM_TOKENS, adapter=by_name["a"], namespace=b"s" * 16)
        assert again.cached_tokens > 0
        assert salted.cached_tokens == 0
        assert tokens_of(again, salted) == [shelf.greedy("a", prompt)] * 2


def test_an_open_has_the_adapter_and_its_namespace(known, shelf):
    size = shelf.size("a")
    with PairRig(known.loaded, prefill=[size], decode=[size]) as rig:
        adapter = ids(rig)["a"]
        rig.serve(PROMPTS[1], adapter=adapter, namespace=b"s" * 16)
        (reported,) = rig.wires.said(OpenHandoff)
    assert reported.source.spec.adapter == adapter
    assert reported.source.spec.namespace == b"s" * 16


def test_requests_with_more_adapters_than_slots_take_turns(known, shelf):
    """All requests complete: none is overtaken without limit."""
    wanted = [(name, prompt) for name in (*NAMES, None) for prompt in PROMPTS]
    size = shelf.size(*NAMES, slots=1, max_running_requests=16, num_pages=256)
    with PairRig(known.loaded, prefill=[size], decode=[size]) as rig:
        by_name = ids(rig)
        asked = [rig.ask(prompt, NUM_TOKENS, adapter=by_name[name]) for name, prompt in wanted]
        rig.run()
        assert tokens_of(*asked) == [shelf.greedy(name, prompt) for name, prompt in wanted]
        assert all(node.engine.adapters.num_fills == len(NAMES) for node in rig.nodes)
        assert all(node.engine.adapters.num_slots_used == 0 for node in rig.nodes)


def test_a_request_that_waits_for_an_adapter_slot_times_out(known, shelf):
    size = shelf.size("a", "b", slots=1)
    with PairRig(known.loaded, prefill=[size], decode=[size]) as rig:
        by_name = ids(rig)
        first = rig.ask(PROMPTS[0], 400, adapter=by_name["a"])
        rig.until(lambda: first.tokens, "it runs")
        late = rig.ask(PROMPTS[0], adapter=by_name["b"], budget_s=0.01)
        left = rig.ask(PROMPTS[0], adapter=by_name["b"])
        rig.turn(*rig.decode)
        rig.let_time_pass(time.monotonic() + DEADLINE_CHECK_S)
        rig.until(lambda: late.ended, "its budget is spent")
        assert late.ended.error.startswith("deadline")
        assert not first.ended
        rig.cancel(left)
        rig.until(lambda: left.ended, "it is cancelled")
        rig.cancel(first)


@pytest.fixture
def occupied(shelf):
    """Return a function that occupies a node's only slot with adapter a until the end of the
    test."""
    with contextlib.ExitStack() as exits:

        def occupy(rig):
            adapters = rig.prefill[0].engine.adapters
            somebody = make_request(key=1 << 40, adapter=ids(rig)["a"])
            adapters.hold(somebody)
            assert adapters.take_slot(somebody)
            exits.callback(adapters.release, somebody.key)
            return lambda: adapters.release(somebody.key)

        yield occupy


def test_a_request_that_waits_for_an_adapter_slot_counts_as_queued_on_the_prefill_node(
    known, shelf, occupied
):
    few, many = shelf.size("a", "b", slots=1, max_queued_requests=1), shelf.size("a", "b", slots=2)
    with PairRig(known.loaded, prefill=[few], decode=[many], handoff_retries=0) as rig:
        leave = occupied(rig)
        waits = rig.ask(PROMPTS[2], NUM_TOKENS, adapter=ids(rig)["b"])
        rig.until(lambda: rig.prefill[0].queue("adapter"), "it waits for a slot")
        refused = rig.ask(PROMPTS[1], NUM_TOKENS)  # a request without an adapter would not wait
        rig.run(refused)
        assert rig.prefill[0].count("refused/overloaded") == 1
        assert not waits.tokens
        leave()
        rig.run()
        assert tokens_of(waits, refused) == [
            shelf.greedy("b", PROMPTS[2]),
            shelf.greedy(None, PROMPTS[1]),
        ]


def test_the_prefill_node_rejects_a_request_that_would_get_an_adapter_slot_too_late(
    known, shelf, occupied
):
    few, many = shelf.size("a", "b", slots=1), shelf.size("a", "b", slots=2)
    with PairRig(known.loaded, prefill=[few], decode=[many], handoff_retries=0) as rig:
        occupied(rig)
        late = rig.ask(PROMPTS[2], NUM_TOKENS, adapter=ids(rig)["b"], queue_s=0.2)
        rig.until(lambda: rig.prefill[0].count("refused/dropped"), "it is dropped there")
        rig.run(late)
        assert late.ended.retry_after_s
        assert rig.prefill[0].queue("adapter") == 0


def test_an_unloaded_adapter_remains_for_its_running_requests(known, shelf):
    size = shelf.size("a", "b", slots=1)
    with PairRig(known.loaded, prefill=[size], decode=[size]) as rig:
        by_name = ids(rig)
        runs = rig.ask(PROMPTS[2], NUM_TOKENS, adapter=by_name["a"])
        waits = rig.ask(PROMPTS[1], NUM_TOKENS, adapter=by_name["b"])
        rig.until(lambda: runs.tokens, "it runs")
        for node in rig.nodes:
            rig.command(node, UnloadAdapter("a"))
            rig.command(node, UnloadAdapter("b"))
        rig.until(lambda: all(node.router.answers for node in rig.nodes), "both are unloaded")
        refused = rig.serve(PROMPTS[1], adapter=by_name["a"])
        assert "is not loaded" in refused.ended.error
        assert tokens_of(runs, waits) == [
            shelf.greedy("a", PROMPTS[2]),
            shelf.greedy("b", PROMPTS[1]),
        ]
        assert all(len(node.engine.adapters.library) == 0 for node in rig.nodes)


def test_the_decode_node_prefills_prompts_whose_adapter_the_prefill_node_lacks(known, shelf):
    """The prefill node must refuse. KV of the model without the adapter would be wrong, and
    nothing would detect it."""
    with PairRig(
        known.loaded, prefill=[shelf.size("b")], decode=[shelf.size("a")], handoff_retries=0
    ) as rig:
        adapter = dict(rig.decode[0].engine.loader.names())["a"]
        asked = rig.serve(PROMPTS[2], NUM_TOKENS, adapter=adapter)
        # More messages may follow: the prefill node also refuses what the consumer sent before it
        # received the first refusal.
        refusal = rig.wires.said(HandoffFailed)[0]
        assert refusal.reason == f"adapter: {adapter.hex()} is not loaded on this node"
        assert asked.tokens == shelf.greedy("a", PROMPTS[2])
        assert rig.prefill[0].count("refused/adapter") == 1
        assert rig.decode[0].count("local_prefills") == 1


def test_an_adapter_migrates_with_its_request(known, shelf):
    size = shelf.size("a")
    with PairRig(known.loaded, prefill=[size], decode=[size, size], migrates=True) as rig:
        asked = rig.ask(PROMPTS[1], 64, adapter=ids(rig)["a"])
        joined = rig.moved_midway(asked, 3)
        assert joined[:NUM_TOKENS] == shelf.greedy("a", PROMPTS[1])
        alone = rig.serve(PROMPTS[1], 64, **asked.of_spec)
        assert joined == alone.tokens


def test_a_request_does_not_migrate_to_a_node_with_another_adapter_of_the_name(known, shelf):
    size = shelf.size("a", "b")
    with PairRig(known.loaded, prefill=[size], decode=[size, size], migrates=True) as rig:
        by_name = ids(rig)
        asked = rig.ask(PROMPTS[1], 64, adapter=by_name["a"])
        rig.until(lambda: len(asked.tokens) >= 3, "it runs")
        asked.of_spec["adapter"] = by_name["b"]
        refused = rig.move(asked, 0, 1)
        source, *others = rig.decode[0], rig.decode[1], rig.prefill[0]
        while not refused.ended:  # the source's request does not continue in between
            rig.until(
                lambda: source.router.woken.is_set() or refused.ended, "it is refused", *others
            )
            rig.turn(source)
        rig.run()
        assert refused.ended.error.endswith("the request has another adapter")
        assert len(asked.tokens) == 64


def test_adapters_are_loaded_while_requests_run(known, shelf):
    size = shelf.size("a")
    with PairRig(known.loaded, prefill=[size], decode=[size]) as rig:
        before = rig.ask(PROMPTS[3], 64, adapter=ids(rig)["a"])
        for node in rig.nodes:
            rig.command(node, LoadAdapter("later", "b"))
        rig.until(lambda: all(node.router.answers for node in rig.nodes), "it is loaded")
        assert [node.router.answers[0].error for node in rig.nodes] == ["", ""]
        adapter = ids(rig)["later"]
        assert [node.router.answers[0].adapter for node in rig.nodes] == [adapter] * 2
        asked = rig.serve(PROMPTS[2], NUM_TOKENS, adapter=adapter)
        assert asked.tokens == shelf.greedy("b", PROMPTS[2])
        assert len(before.tokens) == 64


@pytest.mark.long
@pytest.mark.parametrize(
    "architecture",
    [*ARCHITECTURES, *EXPERT_ARCHITECTURES, *HYBRID_ARCHITECTURES, *LATENT_ARCHITECTURES],
)
def test_every_linear_layer_of_every_family_supports_adapters(model, architecture, tmp_path):
    known = model(architecture)
    products = known.loaded.model.products
    modules = {name.rpartition(".")[2] for product in products for name in product.modules}
    directory = make_adapter(tmp_path / "a", known.reference, modules=sorted(modules))
    merged = merge(reference_model(known.loaded.directory), directory)
    size = Size(lora=LoraConfig(adapter_dir=tmp_path, preload=("a",), max_rank=4))
    with PairRig(known.loaded, prefill=[size], decode=[size]) as rig:
        adapter = ids(rig)["a"]
        asked = [rig.ask(prompt, NUM_TOKENS, adapter=adapter) for prompt in PROMPTS]
        beside = [rig.ask(prompt, NUM_TOKENS) for prompt in PROMPTS]
        rig.run()
        assert tokens_of(*asked) == greedy_tokens(merged, PROMPTS, NUM_TOKENS)
        assert tokens_of(*beside) == [known.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
