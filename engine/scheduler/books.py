"""Consistency check of the scheduler: every page, host page and slot has a known holder."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from common.errors import EngineFault
from engine.core import EngineCore
from engine.kv_cache.pages import PageAllocator, PageHolder, Pages
from engine.scheduler.assembly import ScheduledStep
from engine.scheduler.residents import SlotOwners
from engine.scheduler.retraction import RetractedRequests


def check_books(
    core: EngineCore,
    residents: SlotOwners,
    retracted: RetractedRequests,
    launched: Sequence[ScheduledStep],
    elsewhere: Mapping[PageHolder, Iterable[Pages]],
) -> None:
    """Compare the holds on pages with the holders that are known.

    Args:
        elsewhere: pages that others hold, by kind of holder; one array per hold.
    Raises:
        EngineFault: a page or slot leaked, or was allocated twice.
    """
    table, pages, tiers = core.table, core.pages, core.tiers
    pages.check()
    core.cache.check()
    table.check()
    tiers.check()
    slots = np.flatnonzero(table.live)
    if sorted(residents.by_slot) != slots.tolist():
        raise EngineFault(f"slots {slots} are live, requests have {sorted(residents.by_slot)}")
    known: dict[PageHolder, list[Pages]] = {holder: [] for holder in PageHolder}
    known[PageHolder.REQUEST] = [table.pages_of(int(slot)) for slot in slots]
    known[PageHolder.STEP] = [held for step in launched for held in step.held()]
    known[PageHolder.STEP] += retracted.unsaved_pages()
    known[PageHolder.COPY].extend(tiers.copied())
    del known[PageHolder.CACHE]  # the tree has checked these
    for holder, mine in known.items():
        _check_holds(pages, holder, [*mine, *elsewhere.get(holder, ())])
    swapped = [copied for step in launched for copied in step.swaps.on_host()]
    on_host: dict[PageHolder, Sequence[Pages]] = {
        PageHolder.REQUEST: retracted.host_pages(),
        PageHolder.STEP: swapped,
        PageHolder.COPY: [*tiers.copied_on_host()],
    }
    for holder, held in on_host.items():
        _check_holds(tiers.host.pages, holder, held, "host pages")


def _check_holds(
    pages: PageAllocator, holder: PageHolder, known: Sequence[Pages], what: str = "pages"
) -> None:
    counts = np.zeros(pages.num_pages, np.int32)
    for held in known:
        counts[held] += 1
    wrong = np.flatnonzero(counts != pages.holds(holder))
    if len(wrong):
        raise EngineFault(f"{what} {wrong} have {holder.name} holds that nobody knows of")
