"""Slots shared by clients: how many each gets, and how long others wait."""

import asyncio
from itertools import count

import pytest

from api.auth.client import Client, by_address
from api.auth.fair_slots import FairShareLimiter, FairShares
from common.errors import NodeUnavailable, Overloaded

LONG_S = 30.0  # for waits that must not end


async def waiting(slots, *clients):
    """Let one request of each of these clients wait for a slot, in this order."""
    tasks = [asyncio.create_task(slots.acquire(client)) for client in clients]
    await asyncio.sleep(0)
    return tasks


def take_all(shares, name, weight=1.0):
    """Take slots until the client is rejected. Return their number."""
    for number in count():
        if not shares.may_acquire(name, weight):
            return number
        shares.acquire(name)


def test_a_single_client_gets_seven_eighths():
    assert take_all(FairShares(1024), "a") == 896
    assert take_all(FairShares(1024), "a", weight=10.0) == 896


@pytest.mark.parametrize("places", range(1, 8))
def test_a_single_client_gets_all_of_a_few_slots(places):
    assert take_all(FairShares(places), "a") == places


@pytest.mark.parametrize("others", [1, 10, 100, 140])
def test_a_new_client_gets_a_slot_however_many_others_take_all_they_can(others):
    shares = FairShares(1024)
    greedy = [f"greedy {number}" for number in range(others)]
    for _ in range(1024):  # each releases a slot when its request ends, and all want more
        for name in greedy:
            if shares.held(name):
                shares.release(name)
            take_all(shares, name)
    assert shares.may_acquire("new", 1.0)


def test_without_free_slots_a_new_client_gets_the_first_released_one():
    shares = FairShares(1024)
    for name in "abcdefgh":
        take_all(shares, name)
    assert shares.num_held == 1024
    shares.release("a")
    assert not shares.may_acquire("a", 1.0)
    assert shares.may_acquire("new", 1.0)


def test_shares_converge_to_the_weights():
    shares = FairShares(1024)
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    take_all(shares, "a")
    for _ in range(2000):  # each releases one and all want more
        for name, weight in weights.items():
            if shares.held(name):
                shares.release(name)
            for _ in range(2):
                if shares.may_acquire(name, weight):
                    shares.acquire(name)
    assert shares.held("a") == pytest.approx(1024 * 7 / 29, rel=0.05)
    assert shares.held("b") == pytest.approx(1024 * 7 / 29, rel=0.05)
    assert shares.held("c") == pytest.approx(1024 * 14 / 29, rel=0.05)


def test_no_record_of_a_client_that_has_left_is_kept():
    shares = FairShares(8)
    for number in range(1000):
        shares.acquire(f"client {number}")
        shares.release(f"client {number}")
    assert (shares.num_held, shares._held) == (0, {})


@pytest.mark.parametrize(
    "addresses, client",
    [
        (["10.0.0.1", "::ffff:10.0.0.1"], "10.0.0.1"),
        (["2001:db8:1:2::1", "2001:db8:1:2:ffff::9"], "2001:db8:1:2::/64"),
        (["fe80::1%eth0"], "fe80::/64"),
        (["a.socket"], "a.socket"),
    ],
)
def test_addresses_of_one_network_are_one_client(addresses, client):
    assert {by_address(address).name for address in addresses} == {client}


async def test_2000_requests_of_one_client_leave_room_for_another_at_once():
    slots = FairShareLimiter(1024, longest_wait_s=LONG_S)
    greedy, other = by_address("10.0.0.1"), by_address("10.0.0.2")
    asked = await waiting(slots, *[greedy] * 2000)
    refused = [task for task in asked if task.done() and task.exception()]
    assert (slots.num_taken, slots.num_waiting) == (896, 224)
    assert len(refused) == 2000 - 896 - 224
    for _ in range(100):
        await asyncio.wait_for(slots.acquire(other), LONG_S)
    assert slots.num_of(other) == 100
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert slots.num_waiting == 0


async def test_a_released_slot_goes_to_the_client_with_the_fewest():
    slots = FairShareLimiter(2, longest_wait_s=LONG_S)
    first, second = by_address("10.0.0.1"), by_address("10.0.0.2")
    for _ in range(2):
        await slots.acquire(first)
    again, other = await waiting(slots, first, second)
    slots.release(first)
    await asyncio.wait_for(other, LONG_S)
    assert not again.done()
    slots.release(second)
    await asyncio.wait_for(again, LONG_S)


# Seen failing if slots are counted without the weight: the lighter client has fewer.
async def test_a_released_slot_goes_to_the_client_with_the_fewest_for_its_weight():
    slots = FairShareLimiter(8, longest_wait_s=LONG_S)
    light, heavy, other = (
        Client(name, weight=weight)
        for name, weight in (("light", 1.0), ("heavy", 3.0), ("other", 1.0))
    )
    for client, number in ((light, 2), (heavy, 3), (other, 3)):
        for _ in range(number):
            await slots.acquire(client)
    of_light, of_heavy = await waiting(slots, light, heavy)
    slots.release(other)
    assert (slots.num_of(light), slots.num_of(heavy), slots.num_waiting) == (3, 4, 1)
    await asyncio.wait_for(of_heavy, LONG_S)
    assert not of_light.done()
    slots.release(other)
    await asyncio.wait_for(of_light, LONG_S)


@pytest.mark.parametrize(
    "asked, order",
    [
        # Equal clients are served in turn.
        ([("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 0)], "a0 b0 c0 a0 a0"),
        # Of one client the request of highest priority is first. Seen failing with a queue in order
        # of arrival.
        ([("a", 0), ("a", -1), ("a", 5), ("a", 0)], "a5 a0 a0 a-1"),
    ],
)
async def test_waiting_clients_take_turns_and_the_most_urgent_request_of_each_is_first(
    asked, order
):
    slots = FairShareLimiter(1, longest_wait_s=LONG_S)
    holder = by_address("holder")
    await slots.acquire(holder)
    served = []

    async def one(name, priority):
        client = by_address(name)
        await slots.acquire(client, priority)
        served.append(f"{name}{priority}")
        slots.release(client)

    tasks = [asyncio.create_task(one(*each)) for each in asked]
    await asyncio.sleep(0)
    slots.release(holder)
    await asyncio.wait_for(asyncio.gather(*tasks), LONG_S)
    assert " ".join(served) == order


# Seen failing if the last arrival is rejected.
async def test_the_request_of_lowest_priority_is_rejected_from_a_full_queue():
    slots = FairShareLimiter(1, longest_wait_s=LONG_S)
    client = by_address("a")
    await slots.acquire(client)
    low = asyncio.create_task(slots.acquire(client, -1))
    rest = await waiting(slots, *[client] * 6)
    assert slots.num_waiting == 7  # as many as of one client may
    with pytest.raises(Overloaded):
        await slots.acquire(client, -1)
    urgent = asyncio.create_task(slots.acquire(client, 1))
    with pytest.raises(Overloaded):
        await asyncio.wait_for(low, LONG_S)
    assert slots.num_waiting == 7
    slots.release(client)
    await asyncio.wait_for(urgent, LONG_S)
    assert not any(task.done() for task in rest)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    assert slots.num_waiting == 0


async def test_waiting_has_a_time_limit():
    slots = FairShareLimiter(1, longest_wait_s=0.01)
    client = by_address("a")
    await slots.acquire(client)
    with pytest.raises(Overloaded, match="1 requests are live"):
        await slots.acquire(client)
    assert slots.num_waiting == 0
    slots.release(client)
    await slots.acquire(client)


async def test_a_slot_granted_to_a_client_that_leaves_goes_to_the_next():
    slots = FairShareLimiter(1, longest_wait_s=LONG_S)
    holder, gone, next_one = (by_address(name) for name in ("holder", "gone", "next"))
    await slots.acquire(holder)
    leaving, staying = await waiting(slots, gone, next_one)
    slots.release(holder)
    leaving.cancel()
    await asyncio.wait_for(staying, LONG_S)
    assert (slots.num_taken, slots.num_of(gone), slots.num_of(next_one)) == (1, 0, 1)


async def test_waits_end_when_the_router_accepts_no_more_requests():
    slots = FairShareLimiter(1, longest_wait_s=LONG_S)
    client = by_address("a")
    await slots.acquire(client)
    tasks = await waiting(slots, client, client)
    slots.close(NodeUnavailable("over"))
    for task in tasks:
        with pytest.raises(NodeUnavailable, match="over"):
            await asyncio.wait_for(task, LONG_S)
    assert (slots.num_taken, slots.num_waiting) == (1, 0)


# Seen failing if another request's slot is released, which leaves one too many.
async def test_a_client_that_leaves_when_all_waits_end_releases_no_slot():
    slots = FairShareLimiter(1, longest_wait_s=LONG_S)
    holder, gone = by_address("holder"), by_address("gone")
    await slots.acquire(holder)
    (leaving,) = await waiting(slots, gone)
    slots.close(NodeUnavailable("over"))
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (slots.num_taken, slots.num_of(holder), slots.num_of(gone)) == (1, 1, 0)


def test_a_client_without_a_key_has_no_limits():
    usage = by_address("10.0.0.1").usage
    usage.begin(10**9)
    usage.prompts(10**9)
    usage.begin()
    assert usage.headers() == ()
