"""Consistency check of the scheduler: every page, host page and slot has a known holder."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from common.errors import EngineFault
from engine.batch.table import RequestTable
from engine.kv_cache.pages import Holder, PageAllocator, Pages
from engine.kv_cache.radix import RadixCache
from engine.offload.tiers import Tiers
from engine.scheduler.assembly import Step
from engine.scheduler.residents import Residents
from engine.scheduler.retracted import RetractedRequests


def check_books(
    *,
    table: RequestTable,
    pages: PageAllocator,
    cache: RadixCache,
    tiers: Tiers,
    residents: Residents,
    retracted: RetractedRequests,
    launched: Sequence[Step],
    elsewhere: Mapping[Holder, Iterable[Pages]],
) -> None:
    """Compare the holds on pages with the holders that are known.

    Args:
        elsewhere: pages that others hold, by kind of holder; one array per hold.
    Raises:
        EngineFault: a page or slot leaked, or was allocated twice.
    """
    pages.check()
    cache.check()
    table.check()
    tiers.check()
    slots = np.flatnonzero(table.live)
    if sorted(residents.by_slot) != slots.tolist():
        raise EngineFault(f"slots {slots} are live, requests have {sorted(residents.by_slot)}")
    known: dict[Holder, list[Pages]] = {holder: [] for holder in Holder}
    known[Holder.REQUEST] = [table.pages_of(int(slot)) for slot in slots]
    known[Holder.STEP] = [held for step in launched for held in step.held()]
    known[Holder.STEP] += retracted.unsaved_pages()
    known[Holder.COPY].extend(tiers.copied())
    del known[Holder.CACHE]  # the tree has checked these
    for holder, mine in known.items():
        _check_holds(pages, holder, [*mine, *elsewhere.get(holder, ())])
    swapped = [copied for step in launched for copied in step.swaps.on_host()]
    on_host: dict[Holder, Sequence[Pages]] = {
        Holder.REQUEST: retracted.host_pages(),
        Holder.STEP: swapped,
        Holder.COPY: [*tiers.copied_on_host()],
    }
    for holder, held in on_host.items():
        _check_holds(tiers.host.pages, holder, held, "host pages")


def _check_holds(
    pages: PageAllocator, holder: Holder, known: Sequence[Pages], what: str = "pages"
) -> None:
    counts = np.zeros(pages.num_pages, np.int32)
    for held in known:
        counts[held] += 1
    wrong = np.flatnonzero(counts != pages.holds(holder))
    if len(wrong):
        raise EngineFault(f"{what} {wrong} have {holder.name} holds that nobody knows of")
