"""Entries of --prefill and --decode: names, files and addresses, and their changes."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError
from router.cluster import sources
from router.cluster.sources import (
    MAX_ADDRESSES,
    Addresses,
    DiscoveredNodes,
    Discovery,
    RefreshTimes,
    resolve,
)

D0, D1 = "10.0.0.1:50200", "10.0.0.2:50200"
P0, P1 = "10.0.1.1:50100", "10.0.1.2:50100"
HURRIED = RefreshTimes(dns_s=0.01, file_s=0.01, settled_s=0.005)
WAIT_S = 60.0


class Names:
    """A resolver with a fixed set of names. Unknown names fail as in the system's resolver."""

    def __init__(self, **known: list[str]) -> None:
        self.known = known
        self.num_asked = 0
        self.answering = asyncio.Event()
        self.answering.set()

    async def resolve(self, name: str, port: int) -> Addresses:
        self.num_asked += 1
        await self.answering.wait()
        if name not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return tuple(f"{host}:{port}" for host in self.known[name])

    async def asked_again(self) -> None:
        """Wait for an answer that was requested after this call."""
        async with asyncio.timeout(WAIT_S):
            before = self.num_asked
            while self.num_asked < before + 2:  # noqa: ASYNC110  (no code sets an event for it)
                await asyncio.sleep(0.002)


class Watched:
    """A running discovery, and the changes that it has reported."""

    def __init__(self, discovery: Discovery) -> None:
        self.discovery = discovery
        self.changes: asyncio.Queue[DiscoveredNodes] = asyncio.Queue()

    @property
    def members(self) -> DiscoveredNodes:
        return self.discovery.members

    async def changed(self) -> DiscoveredNodes:
        async with asyncio.timeout(WAIT_S):
            return await self.changes.get()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():  # noqa: ASYNC110  (no code sets an event for it)
                await asyncio.sleep(0.002)


@asynccontextmanager
async def watching(
    prefill: list[str], decode: list[str], names: Names | None = None
) -> AsyncIterator[Watched]:
    ask = (names or Names()).resolve
    watched = Watched(Discovery(prefill, decode, resolve=ask, times=HURRIED))
    await watched.discovery.start()
    running = asyncio.create_task(watched.discovery.run(watched.changes.put_nowait))
    try:
        yield watched
        assert not running.done() or running.exception() is None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_configured_addresses_are_the_members_in_that_order():
    async with watching([P1, P0], [D1, D0]) as watched:
        assert watched.members == DiscoveredNodes((P1, P0), (D1, D0))


@pytest.mark.parametrize(
    "entry",
    [
        *("", "host", "host:", "host:0", "host:65536", "unix:/x", "dns:name", "dns::1"),
        *("dns:a:b:1", "file:", "ipv4:1.2.3.4:5"),
    ],
)
def test_an_entry_of_an_unknown_form_is_rejected_by_name(entry):
    with pytest.raises(ConfigError, match="--prefill") as error:
        Discovery([entry], [D0])
    assert repr(entry) in str(error.value)


def test_no_entry_at_all_is_rejected():
    with pytest.raises(ConfigError, match="at least one decode node"):
        Discovery([], [])


@pytest.mark.parametrize(
    "prefill, decode",
    [
        ([P0, P0], [D0]),
        ([], [D0, D0]),
        ([D0], [D0]),
        (["dns:a:1"], ["dns:a:1"]),
        ([], ["file:x", "file:x"]),
    ],
)
def test_a_repeated_entry_is_rejected(prefill, decode):
    with pytest.raises(ConfigError, match="named twice"):
        Discovery(prefill, decode)


# Names ------------------------------------------------------------------------------------------


async def test_a_name_has_all_its_addresses_and_is_resolved_repeatedly():
    names = Names(prefill=["10.0.1.1"], decode=["10.0.0.1"])
    async with watching(["dns:prefill:50100"], ["dns:decode:50200"], names) as watched:
        assert watched.members == DiscoveredNodes((P0,), (D0,))
        names.known["decode"] = ["10.0.0.1", "10.0.0.2"]
        assert await watched.changed() == DiscoveredNodes((P0,), (D0, D1))
        names.known["decode"] = ["10.0.0.2"]
        assert await watched.changed() == DiscoveredNodes((P0,), (D1,))
        await names.asked_again()
        assert watched.changes.empty()


async def test_a_name_that_cannot_be_resolved_keeps_its_last_answer_and_is_logged_once(caplog):
    names = Names(decode=["10.0.0.1"])
    async with watching([], ["dns:decode:50200"], names) as watched:
        del names.known["decode"]
        for _ in range(3):
            await names.asked_again()
        assert watched.members == DiscoveredNodes((), (D0,))
        (complaint,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert "decode" in complaint.getMessage()
        assert "Name or service not known" in complaint.getMessage()
        names.known["decode"] = ["10.0.0.2"]
        assert await watched.changed() == DiscoveredNodes((), (D1,))


async def test_a_name_without_an_address_yet_is_no_error():
    names = Names()
    async with watching([], ["dns:decode:50200"], names) as watched:
        assert watched.members == DiscoveredNodes()
        names.known["decode"] = ["10.0.0.1"]
        assert await watched.changed() == DiscoveredNodes((), (D0,))


async def test_a_resolver_that_hangs_delays_no_other_entry(file):
    names = Names(prefill=["10.0.1.1"])
    async with watching(["dns:prefill:50100"], [f"file:{file}"], names) as watched:
        names.answering.clear()
        file.write_text(f"[{D1}]")
        assert await watched.changed() == DiscoveredNodes((P0,), (D1,))


async def test_the_systems_resolver_returns_addresses_with_the_port():
    found = await resolve("localhost", 50200)
    assert set(found) <= {"127.0.0.1:50200", "[::1]:50200"} and found


async def test_a_name_that_no_resolver_accepts_is_reported(caplog):
    found = Discovery([], [f"dns:{'a' * 70}:1"])
    await found.start()
    assert found.members == DiscoveredNodes()
    assert caplog.text.count("discovery entry failed") == 1


# Files ------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that names one decode node."""
    file = tmp_path / "nodes"
    file.write_text(f"[{D0}]")
    return file


@pytest.mark.parametrize(
    "content",
    [
        f"- {D0}\n- {D1}\n",
        json.dumps([D0, D1]),
        f"prefill: [{P0}]\ndecode: [{D0}, {D1}]\n",
        json.dumps({"decode": [D0, D1], "others": [P1]}),
    ],
)
async def test_a_file_is_yaml_or_json_with_one_list_or_one_for_each_role(file, content):
    file.write_text(content)
    async with watching([], [f"file:{file}"]) as watched:
        assert watched.members.decode == (D0, D1)


async def test_one_file_can_have_the_nodes_of_both_roles(file):
    file.write_text(f"prefill: [{P0}]\ndecode: [{D0}]\n")
    async with watching([f"file:{file}"], [f"file:{file}"]) as watched:
        assert watched.members == DiscoveredNodes((P0,), (D0,))


def _in_place(file: Path, content: str) -> None:
    file.write_text(content)


def _by_renaming(file: Path, content: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(content)
    new.replace(file)


def _as_kubernetes_does(file: Path, content: str) -> None:
    """Return a mounted ConfigMap: the file is a link through a directory that is replaced."""
    data = file.parent / f"data-{len(list(file.parent.iterdir()))}"
    data.mkdir()
    (data / file.name).write_text(content)
    link = file.parent / "link.new"
    link.symlink_to(data)
    os.replace(link, file.parent / "data")
    if not file.is_symlink():
        file.unlink()
        file.symlink_to(Path("data") / file.name)


@pytest.mark.parametrize("write", [_in_place, _by_renaming, _as_kubernetes_does])
async def test_a_file_is_read_again_after_any_kind_of_write(file, write):
    async with watching([], [f"file:{file}"]) as watched:
        write(file, f"[{D0}, {D1}]")
        assert await watched.changed() == DiscoveredNodes((), (D0, D1))
        write(file, "[]")
        assert await watched.changed() == DiscoveredNodes()


async def test_a_file_that_is_being_written_is_not_used(file, monkeypatch):
    """Every part of it would be a valid list. Seen failing with two readings that may differ."""
    source = sources.parse(f"file:{file}", "decode", resolve, HURRIED)
    assert await source.look() == (D0,)
    file.write_text("")
    unwritten = [f"- {number}:1\n" for number in range(8, 0, -1)]

    async def write_more(seconds: float) -> None:
        """Write between two readings."""
        with file.open("a") as writer:
            writer.write(unwritten.pop() if unwritten else "")

    monkeypatch.setattr(sources.asyncio, "sleep", write_more)
    assert await source.look() == tuple(f"{number}:1" for number in range(1, 9))


BAD = [
    ("- [", "is not YAML"),
    ("", "expected a list"),
    ("decode: x", "expected a list"),
    ("prefill: []", "expected a list"),
    ("- 10.0.0.1", "host:port"),
    ("- {a: 1}", "host:port"),
    ("[" + ",".join(f"a{i}:1" for i in range(MAX_ADDRESSES + 1)) + "]", "are allowed"),
    ("- '\x00'", "is not YAML"),
    ("#" * (1 << 20) + "\n", "more than"),
]


@pytest.mark.parametrize("content, complaint", BAD, ids=[because for _, because in BAD])
async def test_an_invalid_file_keeps_the_last_valid_list_and_reports_the_error(
    file, content, complaint, caplog
):
    async with watching([], [f"file:{file}"]) as watched:
        file.write_text(content)
        await watched.until(lambda: complaint in caplog.text)
        assert watched.members == DiscoveredNodes((), (D0,))
        file.write_text(f"[{D1}]")
        assert await watched.changed() == DiscoveredNodes((), (D1,))
    assert caplog.text.count(complaint) == 1


# No file can have a name as long as the second.
@pytest.mark.parametrize("link, complaint", [(None, "No such file"), ("a" * 300, "too long")])
async def test_a_file_that_cannot_be_opened_keeps_its_last_list(file, link, complaint, caplog):
    async with watching([], [f"file:{file}"]) as watched:
        file.unlink()
        if link is not None:
            file.symlink_to(link)
        await watched.until(lambda: complaint in caplog.text)
        assert watched.members == DiscoveredNodes((), (D0,))
        file.unlink(missing_ok=True)
        file.write_text(f"[{D1}]")
        assert await watched.changed() == DiscoveredNodes((), (D1,))


@pytest.mark.parametrize("content", [None, "", "- nonsense"])
async def test_a_file_that_is_invalid_at_the_start_is_an_error(file, content):
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--decode"):
        await Discovery([], [f"file:{file}"], times=HURRIED).start()


async def test_a_pipe_without_a_writer_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "nodes")
    with pytest.raises(ConfigError, match="is not a file"):
        await Discovery([], [f"file:{tmp_path / 'nodes'}"], times=HURRIED).start()


async def test_an_unchanged_file_is_parsed_once(file, monkeypatch):
    """Parsing a thousand addresses takes 30 ms, during which no request would make progress."""
    parsed: list[bytes] = []
    load = sources.yaml.load
    monkeypatch.setattr(
        sources.yaml, "load", lambda text, kind: (parsed.append(text), load(text, kind))[1]
    )
    source = sources.parse(f"file:{file}", "decode", resolve, HURRIED)
    for _ in range(3):
        assert await source.look() == (D0,)
    file.write_text(f"[{D1}]")
    assert await source.look() == (D1,)
    assert parsed == [f"[{D0}]".encode(), f"[{D1}]".encode()]


# Several entries --------------------------------------------------------------------------------


async def test_an_address_of_two_entries_is_one_node():
    names = Names(decode=["10.0.0.1", "10.0.0.2"])
    async with watching([], [D1, "dns:decode:50200"], names) as watched:
        assert watched.members == DiscoveredNodes((), (D1, D0))


async def test_an_address_of_both_roles_has_neither_until_it_is_corrected(caplog):
    names = Names(a=["10.0.0.1", "10.0.0.2"], b=["10.0.0.2"])
    async with watching(["dns:a:50200"], ["dns:b:50200"], names) as watched:
        assert watched.members == DiscoveredNodes((D0,), ())
        await names.asked_again()
        assert caplog.text.count("node in several roles ignored") == 1
        names.known["a"] = ["10.0.0.1"]
        assert await watched.changed() == DiscoveredNodes((D0,), (D1,))
