"""The page as a user sees and operates it."""

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")
WAIT_S = 60.0
PHONE = (375, 812)
DESKTOP = (1280, 900)
# Stores the id of the last request.
RECORD_ID = """
  const real = window.fetch;
  window.fetch = async (path, ...rest) => {
    const answer = await real(path, ...rest);
    window.asked = answer.headers.get("baton-request-id") ?? window.asked;
    return answer;
  };
"""


class View:
    """One browser that shows the page of one router."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, size: tuple[int, int] = DESKTOP) -> None:
        """Load the page again and wait until it shows a cluster. Earlier log messages are
        dropped."""
        self.resize(size)
        self.driver.get(f"{self.url}/")
        self.driver.get_log("browser")
        self.run(RECORD_ID)
        self.until(lambda: self.all(".node"), "the cluster is shown")

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )

    def colours(self, scheme: str) -> None:
        """Args:
        scheme: "light" or "dark", the preference of the user's system.
        """
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    # Content --------------------------------------------------------------------------------------

    def one(self, selector: str) -> WebElement:
        found: WebElement = self.driver.find_element(By.CSS_SELECTOR, selector)
        return found

    def all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def text(self, selector: str) -> str:
        """Return all text in it, visible or not."""
        text: str = self.run("return document.querySelector(arguments[0]).textContent", selector)
        return text

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        texts: list[str] = self.run(script, selector)
        return texts

    def attributes(self, selector: str, name: str) -> list[str]:
        script = (
            "const [selector, name] = arguments;"
            "return [...document.querySelectorAll(selector)].map((e) => e.getAttribute(name))"
        )
        values: list[str] = self.run(script, selector, name)
        return values

    def facts(self, where: str) -> dict[str, str]:
        """Return the terms and values of the description lists there, read at one moment."""
        script = (
            "const texts = (name) => [...document.querySelectorAll(`${arguments[0]} ${name}`)]"
            "  .map((e) => e.textContent);"
            "const told = texts('dd');"
            "return texts('dt').map((name, i) => [name, told[i]])"
        )
        return dict(self.run(script, where))

    def until(self, condition: Callable[[], T], what: str, deadline_s: float = WAIT_S) -> T:
        """Check repeatedly, and return the result of `condition` once it is true."""
        end = time.monotonic() + deadline_s
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
            time.sleep(0.05)
        return value

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked(self) -> list[str]:
        """Return the URLs of all requests since the last call."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def overflow(self) -> int:
        """Return how many pixels a user would have to scroll to the right."""
        script = "const d = document.documentElement; return d.scrollWidth - d.clientWidth"
        pixels: int = self.run(script)
        return pixels

    # Actions --------------------------------------------------------------------------------------

    def ask(self, prompt: str, *, kind: str = "text", **fields: object) -> None:
        """Fill in the form and send it by keyboard. Fields are named by their ids, with `_` for
        `-`."""
        self.run("document.querySelector(`[name=kind][value=${arguments[0]}]`).click()", kind)
        for name, value in fields.items():
            self.fill(f"#{name.replace('_', '-')}", str(value))
        # like pasted text
        self.run("document.querySelector('#prompt').value = arguments[0]", prompt)
        self.one("#prompt").send_keys(Keys.CONTROL, Keys.ENTER)

    def fill(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def answered(self) -> str:
        """Wait for the end of a response and return its text."""
        self.until(lambda: self.one("#facts").is_displayed(), "the answer ends")
        return self.text("#answer")

    def until_its_timeline(self) -> None:
        """Wait for the timeline of the last request. Until then the page may show another one."""
        shown = "return document.querySelector('#timeline-id').title === window.asked"
        self.until(
            lambda: self.run(shown) and self.facts("#timeline-facts")["Finish reason"] != "running",
            "its timeline is drawn",
        )
