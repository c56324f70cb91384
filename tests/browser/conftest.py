"""A headless browser, and a real cluster that runs while tests wait for the browser."""

import asyncio
import shutil
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import uvloop

BROWSER, DRIVER = "chromium", "chromedriver"


class Background:
    """An event loop on its own thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, Any], limit_s: float = 90.0) -> Any:
        """Run the coroutine there and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    loop = Background()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """Return a Chromium that records its log and requests. Skip the test if there is none."""
    binary, service = shutil.which(BROWSER), shutil.which(DRIVER)
    if binary is None or service is None:
        pytest.skip("needs a browser: Debian's packages chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new",
        "--no-sandbox",  # not available to root, and the pages are our own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--window-size=1280,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    yield started
    started.quit()
