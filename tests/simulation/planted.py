"""Faults planted in a simulation, one a process. They must be found by wrong tokens or by chaos.

`python -m tests.simulation.planted page NAME` runs a scenario with a page fault in the link, the
swap or the cache. `python -m tests.simulation.planted bug NAME FIRST SEEDS` searches seeds for a
bug in shipped code, and ends at the first one that finds it. Both print JSON. The page fault "none"
plants nothing.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from simulation.virtual.clock import VirtualClock, seed_all

PAGE_SCENARIO = """
cluster:
  {gpu: h100, model: llama-3-8b, prefill: 1, decode: 1, options: {engine.cache.num_pages: 130}}
load: {rate: 12, input: [100, 900], output: [20, 120], prefixes: 2, requests: 100}
"""
# Scenarios of faults in other memory. Pools are so small that requests of one prefix return after
# its eviction.
SCENARIOS = {
    "restored": """
cluster: {gpu: h100, model: llama-3-8b, prefill: 1, decode: 1, options: {
  engine.cache.num_pages: 300, engine.offload.cpu_bytes: 2_000_000_000}}
load: {rate: 8, input: [600, 1500], output: 20, prefixes: 12, requests: 40}
""",
    "window": """
cluster: {gpu: h100, model: gemma-3-12b, prefill: 1, decode: 1}
load: {rate: 8, input: [100, 1500], output: 20, requests: 20}
""",
    "state": """
cluster: {gpu: h200, model: qwen3-next-80b-a3b, prefill: 1, decode: 1, prefill_tp: 2, decode_tp: 2}
load: {rate: 8, input: [600, 1500], output: 20, prefixes: 2, requests: 20}
""",
}


def wrap(owner: Any, name: str, made: Callable[..., Any]) -> None:
    """Replace a method by `made(original, *arguments)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: made(original, *args, **kwargs))


def module(name: str) -> Any:
    return import_module(name)


# Page faults ----------------------------------------------------------------------------------


def _after_read(damage: Callable[[Any, Any, Any], None]) -> None:
    """Damage the destination of each read with at least two pages: (pool, source, pages)."""
    links = module("simulation.node.link")

    def advance(original: Any, link: Any) -> None:
        job = link._jobs.waiting[0]
        ends = job.before is not None and len(job.pages.source) > 4  # no canary
        before = link._port.pool[job.pages.destination].copy()
        original(link)
        if ends:
            damage(link._port.pool, (link._source, before), job.pages)

    wrap(links.SimLink, "_advance", advance)


def link_reads_a_wrong_page() -> None:
    def damage(pool: Any, sides: Any, pages: Any) -> None:
        source, _ = sides
        pool[pages.destination[-1]] = source[pages.source[0]]

    _after_read(damage)


def link_leaves_a_stale_page() -> None:
    def damage(pool: Any, sides: Any, pages: Any) -> None:
        _, before = sides
        pool[pages.destination[-1]] = before[-1]

    _after_read(damage)


def link_tears_a_page() -> None:
    def damage(pool: Any, sides: Any, pages: Any) -> None:
        _, before = sides
        last, mask = pages.destination[-1], type(pool[0])(0xFFFFFFFF)
        pool[last] = (pool[last] & mask) | (before[-1] & ~mask)

    _after_read(damage)


def swap_exchanges_two_pages() -> None:
    runner = module("simulation.device.runner")

    def copy(original: Any, device: Any, batch: Any) -> None:
        original(device, batch)
        if batch.swap_in is not None and len(batch.swap_in.device_pages) > 1:
            pages = batch.swap_in.device_pages
            device._pool[pages[:2]] = device._pool[pages[1::-1]]

    wrap(runner.SimDevice, "_copy", copy)


def cache_hit_misses_its_last_page() -> None:
    radix = module("engine.kv_cache.radix")

    def match(original: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(cache, *args, **kwargs)
        if found.holding.num_pages < 2:
            return found
        tables = found.holding.tables.copy()
        tables[:, -1] = tables[:, -2]  # a page of the request has no entry of its own
        return found._replace(holding=type(found.holding)(tables, found.holding.state))

    wrap(radix.PrefixCache, "match", match)


def tier_restores_pages_in_another_order() -> None:
    copier = module("simulation.device.runner")

    def load(original: Any, itself: Any, copies: Any) -> Any:
        return original(itself, type(copies)(copies.device_pages, copies.host_pages[::-1]))

    wrap(copier.SimCopier, "load", load)


def prefix_hit_keeps_an_old_state() -> None:
    device = module("simulation.device.sim_device")
    wrap(device.SimDevice, "_resume", lambda original, itself, batch, step: None)


PAGES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "wrong": link_reads_a_wrong_page,
    "stale": link_leaves_a_stale_page,
    "torn": link_tears_a_page,
    "swapped": swap_exchanges_two_pages,
    "missing": cache_hit_misses_its_last_page,
    "restored": tier_restores_pages_in_another_order,
    "window": link_reads_a_wrong_page,
    "state": prefix_hit_keeps_an_old_state,
}


# Bugs of shipped code ---------------------------------------------------------------------------


def a_chunk_is_published_a_page_early() -> None:
    """A prefill node publishes a page that the next chunk computes."""

    def publish(original: Any, self: Any, state: Any, end: int, last: Any = None) -> None:
        if last is None and end > state.request.cached_tokens:
            size = self._tables.page_size
            end = min(end + size, self._whole_pages(len(state.request.token_ids)))
        original(self, state, end, last)

    wrap(module("prefill_node.handoffs").OutgoingHandoffs, "_publish", publish)


def published_pages_are_not_held() -> None:
    """A prefill node frees pages when the prompt ends, and not when the consumer has them."""
    pages = module("engine.kv_cache.pages")
    publication = pages.PageHolder.PUBLICATION

    def unless_published(original: Any, self: Any, some: Any, holder: Any) -> None:
        if holder is not publication:
            original(self, some, holder)

    wrap(pages.PageAllocator, "hold", unless_published)
    wrap(pages.PageAllocator, "drop", unless_published)


def pages_of_failed_handoffs_stay_published() -> None:
    """A prefill node keeps the pages of a hand-off that its consumer does not complete."""

    def closed(original: Any, self: Any, event: Any) -> None:
        exported = None if event.completed else self._exported.pop(event.serial, None)
        original(self, event)
        del exported

    wrap(module("prefill_node.handoffs").OutgoingHandoffs, "closed", closed)


def the_end_of_a_stream_forgets_its_handoffs() -> None:
    """A producer keeps the hand-offs of a consumer that has gone."""

    def forget(self: Any, stream: int, reason: str) -> None:
        self._heartbeats.stop(stream)
        del self._streams[stream]

    module("kvtransfer.protocol.producer").ProducerEnd._forget_stream = forget


def reads_of_a_lost_handoff_do_not_end() -> None:
    """A consumer keeps the pages of a hand-off that it has lost while a read wrote them.

    Two similar bugs are not observable. A producer that confirms the Done of a hand-off which it
    has given up has sent Failed before, on the same stream. If a consumer frees the pages too
    early, the reads of other requests follow on the same port and correct most of them.
    """
    late: set[Any] = set()

    def settle(original: Any, self: Any, id: Any) -> Any:
        if self._landing.get(id):
            late.add(id)
        return [] if id in late else original(self, id)

    wrap(module("kvtransfer.protocol.attempt").ConsumerLinks, "settle", settle)


def a_handoff_is_done_before_its_reads_end() -> None:
    """A consumer does not wait for reads that are in progress."""
    attempt = module("kvtransfer.protocol.attempt")
    attempt.ConsumerHandoff.all_read = property(
        lambda self: self.ranges is not None and self.ranges.complete
    )


def evicted_pages_stay_in_the_tree() -> None:
    """The prefix cache releases the end of a leaf, and still finds it."""

    def shorten(original: Any, self: Any, leaf: Any, num_pages: int) -> None:
        if num_pages:
            self._pages.release(leaf.pages[:, num_pages:])
            self._queue(leaf)
        else:
            original(self, leaf, num_pages)

    wrap(module("engine.kv_cache.radix").PrefixCache, "_shorten", shorten)


def a_retracted_request_saves_a_page_too_few() -> None:
    """The last page is not saved if its second token is the newest one with KV."""

    def saved(original: Any, self: Any, slot: int) -> Any:
        self._table.length[slot] -= 1
        holding = original(self, slot)
        self._table.length[slot] += 1
        return holding

    wrap(module("engine.scheduler.retraction").RetractedRequests, "_saved_of", saved)


def a_slot_is_reused_while_a_step_has_it() -> None:
    """The slot of a request that ended gets a new one before the last step has finished."""
    module("engine.batch.table").SlotTable.in_flight = lambda self, slot: False


def a_replay_begins_a_token_early() -> None:
    """The router replays a request without its last token, and sends the client that one again."""

    def continued(original: Any, self: Any, token_ids: Any, engine_crashes: int) -> Any:
        spec = original(self, token_ids[:-1], engine_crashes)
        early = bool(len(token_ids))
        return module("msgspec.structs").replace(spec, num_generated=spec.num_generated + early)

    wrap(module("common.request").RequestSpec, "continued", continued)


BUGS: dict[str, Callable[[], None]] = {
    "early publish": a_chunk_is_published_a_page_early,
    "early free": published_pages_are_not_held,
    "leak of failed hand-offs": pages_of_failed_handoffs_stay_published,
    "leak at the end of a stream": the_end_of_a_stream_forgets_its_handoffs,
    "reads of a lost hand-off": reads_of_a_lost_handoff_do_not_end,
    "done before the reads": a_handoff_is_done_before_its_reads_end,
    "stale radix page": evicted_pages_stay_in_the_tree,
    "short swap": a_retracted_request_saves_a_page_too_few,
    "slot reuse": a_slot_is_reused_while_a_step_has_it,
    "wrong replay offset": a_replay_begins_a_token_early,
}


def run_page_fault(name: str, clock: VirtualClock) -> dict[str, Any]:
    """Run the scenario of a page fault with it. Return its report."""
    msgspec, yaml = module("msgspec"), module("yaml")
    scenarios = module("simulation.virtual.scenario")
    PAGES[name]()
    scenario = msgspec.convert(
        yaml.safe_load(SCENARIOS.get(name, PAGE_SCENARIO)), scenarios.Scenario
    )
    seed_all(scenario.seed)
    report = module("simulation.virtual.run").run(scenario, clock)
    return dict(msgspec.to_builtins(report))


def find_bug(name: str, first: int, seeds: int, clock: VirtualClock) -> dict[str, Any]:
    """Run seeds until one finds the bug. Returns the seed, or None, and the CPU time."""
    chaos = module("simulation.virtual.chaos")
    planner = module("cli.planner.virtual").planner
    module("node.role_parts").load_roles()  # before the bug replaces their methods
    BUGS[name]()
    cpu_s = 0.0
    for seed in range(first, first + seeds):
        outcome = chaos.outcome_of(clock, planner, chaos.drawn(seed))
        cpu_s += outcome.cpu_s
        if outcome.violations:
            return {"seed": seed, "cpu_s": cpu_s, "violations": outcome.violations}
    return {"seed": None, "cpu_s": cpu_s, "violations": []}


def main() -> None:
    clock = VirtualClock()
    clock.install()
    match sys.argv[1:]:
        case ["page", name]:
            found = run_page_fault(name, clock)
        case ["bug", name, first, seeds]:
            found = find_bug(name, int(first), int(seeds), clock)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
