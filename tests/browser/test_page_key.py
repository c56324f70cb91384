"""The page of a router that requires API keys, in Chromium."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium")

from selenium.webdriver.common.keys import Keys

from common.config import ClientsConfig
from tests.api.auth.rig import KEYS, entry, write
from tests.api.models import write_model
from tests.api.rig import router_for
from tests.browser.conftest import Background
from tests.browser.view import View
from tests.support.processes.stub_decode_node import StubDecodeNode

pytestmark = pytest.mark.long


class Served:
    """A router with one stub node, from its making to `stop`, in one task."""

    def __init__(self, clients: ClientsConfig, model: Path) -> None:
        self._clients = clients
        self._model = model
        self._stop = asyncio.Event()
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    async def port(self) -> int:
        await asyncio.wait((self._port, self._task), return_when=asyncio.FIRST_COMPLETED)
        return self._port.result()

    async def stop(self) -> None:
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        async with StubDecodeNode() as node:
            knobs: Any = {"decode": [node.address], "clients": self._clients}
            async with router_for(self._model, **knobs) as (client, router):
                await client.wait_until_serving()
                self._port.set_result(router.http_port)
                await self._stop.wait()


@pytest.fixture(scope="module")
def view(
    driver: Any, background: Background, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[View]:
    directory = tmp_path_factory.mktemp("keys")
    file = write(directory / "keys.yaml", entry("alice"), entry("op", role="operator"))

    async def start() -> Served:
        return Served(ClientsConfig(api_keys=file), write_model(directory))

    served: Served = background(start())
    yield View(driver, f"http://127.0.0.1:{background(served.port())}")
    background(served.stop())


def give(view: View, key: str) -> None:
    view.fill("#key", key)
    view.one("#key").send_keys(Keys.ENTER)


def test_the_page_asks_for_an_operators_key_and_keeps_it_for_the_tab(view: View):
    view.driver.get(f"{view.url}/")
    view.until(lambda: view.one("#key-form").is_displayed(), "a key is asked for")
    assert "API key is missing" in view.text("#key-words")
    assert not view.one("#lost").is_displayed()
    assert view.one("#key").accessible_name == "API key"
    assert view.run("return document.activeElement.id") == "key"
    give(view, KEYS["alice"])
    view.until(lambda: "alice is a client's" in view.text("#key-words"), "it is not enough")
    give(view, KEYS["op"])
    view.until(lambda: view.all(".node"), "the cluster is shown")
    assert not view.one("#key-form").is_displayed()
    assert view.text("#router-state") == "ready"
    view.driver.refresh()
    view.until(lambda: view.all(".node"), "it still has the key")
    assert not view.one("#key-form").is_displayed()
    assert view.run("return localStorage.length") == 0
    assert KEYS["op"] not in view.run("return document.documentElement.outerHTML")
    # Chromium itself logs every response with an error status.
    assert all("status of 40" in complaint for complaint in view.complaints())


def test_requests_of_the_page_have_the_key(view: View):
    view.driver.get(f"{view.url}/")
    view.until(lambda: view.all(".node"), "the cluster is shown")
    asked = "return fetch('/v1/models').then((answer) => answer.status)"
    assert view.run(asked) == 401
    view.ask("x" * 10_000)
    view.until(lambda: view.one("#problem").is_displayed(), "the router has answered")
    assert "10001" in view.text("#problem") or "10000" in view.text("#problem")
