"""The router's page in Chromium, with a router and nodes that are real processes."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium")

from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import Background
from tests.browser.view import PHONE, View
from tests.support.network.http_client import post
from tests.support.processes.cluster import Cluster, slowed

pytestmark = [pytest.mark.slow, pytest.mark.long]

EVIL = "<img src=/x onerror=alert(1)>"
GREEDY = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def cluster(
    driver: Any, background: Background, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster whose model has a name that is HTML."""
    from tests.support.models.noise_model import (
        write,  # seconds, for nothing where there is no browser
    )

    model = tmp_path_factory.mktemp("noise") / "model"
    write(model)
    flags = [f"--served-model-name={EVIL}"]
    made = Cluster(
        model,
        tmp_path_factory.mktemp("logs"),
        router_flags=flags,
        environment=slowed(0.005),  # or the longest response might end before it is stopped
    )
    background(made.__aenter__())
    yield made
    background(made.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def browser(driver: Any, cluster: Cluster) -> View:
    return View(driver, f"http://127.0.0.1:{cluster.http_port}")


@pytest.fixture
def view(browser: View) -> Iterator[View]:
    """Return a freshly loaded page. It must not have logged an error, nor sent a request to
    another host."""
    browser.open()
    yield browser
    # The page may request a timeline before the router has it, and then repeats the request.
    # Chromium logs the error.
    early = re.compile(r"/requests/\S+ - Failed to load resource: .* status of 404 ")
    assert [said for said in browser.complaints() if not early.search(said)] == []
    strange = [url for url in browser.asked() if not url.startswith(f"{browser.url}/")]
    assert strange == []


def test_the_page_shows_every_node_and_the_link_between_them(view: View, cluster: Cluster):
    addresses = [node.address for node in cluster.nodes]
    assert view.texts(".node .address") == addresses
    view.until(lambda: view.texts(".node .state") == ["ready", "ready"], "both are ready")
    view.until(lambda: view.texts(".links text"), "the link is drawn")
    (drawn,) = view.texts(".links text")
    assert re.fullmatch(r"(cma|tcp) [\d.]+ GB/s", drawn)
    path, speed = drawn.split(" ", 1)
    assert view.text(".reads li") == f"{addresses[0]} {path} {speed}"
    line = view.run("return document.querySelector('.link .line').getBoundingClientRect().toJSON()")
    left, right = (view.one(f".node[data-role={role}]").rect for role in ("prefill", "decode"))
    assert line["left"] == pytest.approx(left["x"] + left["width"], abs=2)
    assert line["right"] == pytest.approx(right["x"], abs=10)
    assert view.one(".node .bar").accessible_name.startswith("512 of 512 pages free")
    view.until(lambda: view.text("#router-state") == "ready", "so is the router")
    assert "2of 2" in view.text("#tiles .tile")


def test_a_response_streams_and_equals_that_of_the_api(
    view: View, cluster: Cluster, background: Background
):
    view.ask("Once upon a time", **GREEDY)
    text = view.answered()
    fields = {"prompt": "Once upon a time", **GREEDY}
    answer = background(post(cluster.http_port, "/v1/completions", fields)).json
    assert text == answer["choices"][0]["text"] != ""
    facts = view.facts("#facts")
    assert (facts["Output"], facts["Finish reason"]) == ("24 tokens", "length")
    assert facts["Prompt"].startswith("16 tokens")
    assert re.fullmatch(r"[\d.]+ m?s", facts["TTFT"])
    assert re.fullmatch(r"[\d.]+k?", facts["Tokens/s"])


def test_chat_uses_the_models_template(view: View, cluster: Cluster, background: Background):
    view.ask("hello", kind="chat", **GREEDY)
    text = view.answered()
    fields = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}
    answer = background(post(cluster.http_port, "/v1/chat/completions", fields)).json
    assert text == answer["choices"][0]["message"]["content"]


def test_the_timeline_of_the_users_request_appears_in_three_lanes(view: View, cluster: Cluster):
    view.ask("a prompt of its own for a hand-off that is seen", **GREEDY)
    view.answered()
    view.until_its_timeline()
    assert view.attributes(".chart .lane", "data-lane") == ["router", "prefill", "decode"]
    assert view.texts(".chart .lane-node") == [node.address for node in cluster.nodes]
    drawn = set(view.attributes(".phase", "data-phase"))
    assert {"prefill", "transfer", "running"} <= drawn
    chosen = view.until(lambda: view.texts("tr.chosen button"), "it is chosen in the list")
    assert chosen == [view.text("#timeline-id")]
    assert view.texts("#request-rows button")[0] == chosen[0]
    view.run("document.querySelector('#span [value=whole]').click()")
    whole = set(view.attributes(".phase", "data-phase"))
    rows = {row.replace(" ", "_") for row in view.texts("#phase-rows td:nth-child(2)")}
    assert drawn | {"stream"} <= whole == rows
    parts = view.texts("#breakdown-legend li")
    assert any(part.startswith("prefill ") for part in parts)


def test_opening_a_request_shows_its_events(view: View, cluster: Cluster):
    view.ask("a prompt to be explained", **GREEDY)
    view.answered()
    view.until_its_timeline()
    assert not view.all("#event-rows tr")
    view.run("document.querySelector('#events summary').click()")
    places = view.until(lambda: view.texts("#event-rows td:nth-child(2)"), "its events are there")
    assert set(places) == {
        "router",
        *(f"prefill {node.address}" for node in cluster.prefill),
        *(f"decode {node.address}" for node in cluster.decode),
    }
    assert {"placed", "granted"} <= set(view.texts("#event-rows td:nth-child(3)"))


def test_a_response_can_be_stopped(view: View):
    view.ask("on and on", max_tokens=4000, temperature=0)
    view.until(lambda: view.text("#answer"), "the answer begins")
    view.one("#prompt").send_keys(Keys.ESCAPE)
    stopped = view.until(lambda: view.text("#progress"), "it is stopped")
    assert re.fullmatch(r"Stopped after [\d.]+ m?s", stopped)
    assert view.one("#send").is_displayed() and not view.one("#stop").is_displayed()
    view.until(lambda: "cancelled" in view.texts("td.end"), "the list tells how it ended")


def test_a_rejection_is_shown_in_the_routers_words(view: View):
    view.ask("x" * 10_000, **GREEDY)
    view.until(lambda: view.one("#problem").is_displayed(), "the refusal is shown")
    assert "10000" in view.text("#problem")
    assert not view.one("#answer").is_displayed()
    # Chromium itself logs every response with an error status.
    assert all("status of 400" in complaint for complaint in view.complaints())


BOTH_WAYS = """
  const [prefill, decode] = arguments;
  const real = window.fetch;
  window.fetch = async (path, ...rest) => {
    const answer = await real(path, ...rest);
    if (path !== "/cluster") return answer;
    const content = await answer.json();
    const links = (reader) => content.nodes.find((node) => node.address === reader).links;
    const add = (reader, peer, path) => links(reader).push({ peer, path, gib_per_s: 1 });
    add(prefill, decode, "rdma");
    add(decode, decode, "nvlink");
    return Response.json(content);
  };
"""


def test_every_line_is_between_the_two_columns(view: View, cluster: Cluster):
    view.run(BOTH_WAYS, *(node.address for node in cluster.nodes))
    view.until(lambda: len(view.all(".link")) == 3, "links in all directions are drawn")
    left, right = (view.one(f".node[data-role={role}]").rect for role in ("prefill", "decode"))
    boxes = view.run(
        "return [...document.querySelectorAll('.link .line')]"
        ".map((line) => line.getBoundingClientRect().toJSON())"
    )
    assert all(box["left"] >= left["x"] + left["width"] - 2 for box in boxes), boxes
    assert all(box["right"] <= right["x"] + 2 for box in boxes), boxes


def test_names_of_models_and_requests_are_shown_as_text(
    view: View, cluster: Cluster, background: Background
):
    headers = {"x_request_id": EVIL}
    fields = {"prompt": "x", **GREEDY}
    background(post(cluster.http_port, "/v1/completions", fields, **headers))
    view.until(lambda: EVIL in view.texts("#request-rows button"), "the request is listed")
    view.run(
        "[...document.querySelectorAll('#request-rows button')]"
        ".find((b) => b.textContent === arguments[0]).click()",
        EVIL,
    )
    view.until(lambda: view.text("#timeline-id") == EVIL, "it is chosen")
    view.until(lambda: len(view.all(".chart .lane")) == 3, "its lanes are drawn")
    assert view.text("#model") == EVIL
    assert view.all("img") == []


def test_the_browser_does_not_interpret_text_as_html_and_runs_no_foreign_script(view: View):
    attempt = "try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name }"
    assert view.run(attempt) == "TypeError"
    script = """
      const inline = document.createElement("p");
      try { inline.setAttribute("onclick", "window.ran = true"); inline.click() } catch {}
      return window.ran === true
    """
    assert view.run(script) is False
    refused = view.complaints()
    assert refused and all("has been blocked" in complaint for complaint in refused)


def test_two_parts_of_the_page_show_the_same_rate_of_a_request(view: View):
    # Seen failing: 83 and 36 tokens/s.
    view.ask("how fast is this one", **GREEDY)
    view.answered()
    both = ("#facts", "#timeline-facts")

    def agreed() -> bool:
        asked, reported = (view.facts(where) for where in both)
        return all(asked[name] == reported.get(name) for name in ("TTFT", "Tokens/s"))

    view.until(agreed, "the times of the prompt box are those of the timeline")
    cached = ".node[data-role=prefill] .facts"
    view.until(
        lambda: (
            f"{view.facts(cached)['cache hit rate']} cache hits"
            in view.texts(".tile .tile-foot > span:first-child")
        ),
        "the cache hit rate of the cluster is that of its only prefill node",
    )


def test_the_tiles_show_percentiles_rejections_errors_and_the_scale_of_each_line(view: View):
    view.run(FAKE, EVIL)
    view.until(lambda: len(view.all(".node")) == 64, "the cluster is shown")

    def tile(name: str) -> str:
        script = (
            "return [...document.querySelectorAll('.tile')]"
            ".find((tile) => tile.firstChild.textContent === arguments[0]).innerText"
        )
        return " ".join(view.run(script, name).split())

    assert tile("TTFT").startswith("TTFT 39.0 ms p50 p99 1.14 s")
    assert tile("ITL") == "ITL – p50 p99 –"
    assert tile("Rejected (429)") == "Rejected (429) 3 last minute 7 since start"
    assert tile("Errors") == "Errors 2 last minute 5 since start"
    view.until(lambda: tile("TTFT").endswith("39.0 ms 0"), "the line has a scale")
    view.until(lambda: tile("In-flight requests").endswith("1 0"), "and so has that of requests")


def test_the_help_page_explains_the_terms(view: View):
    view.run("document.querySelector('.docs').click()")
    terms = view.until(lambda: view.texts(".terms dt"), "the reference is shown")
    assert {"TTFT", "ITL", "prealloc queue", "Errors", "length", "cma"} <= set(terms)
    assert all(view.texts(".terms dd"))


def test_prompts_that_the_model_can_answer_are_buttons(view: View):
    view.run(FAKE, "baton-demo")
    view.until(lambda: view.texts("#examples button"), "there are some")
    view.run("document.querySelector('#examples button').click()")
    view.answered()
    assert view.run("return document.querySelector('#prompt').value") == "add 27 15 ="


def test_a_tooltip_explains_the_terms_of_a_card(view: View):
    titled = "return [...document.querySelectorAll(arguments[0])].map((e) => e.title)"
    for words in (".node .facts > div", ".queues li", "#paths li", ".reads li", "#holders li"):
        titles = view.until(lambda words=words: view.run(titled, words), f"there are {words}")
        assert all(titles), words


SILENT = """
  const real = window.fetch;
  window.fetch = async (path, ...rest) => {
    const answer = await real(path, ...rest);
    if (path !== "/cluster" && path !== "/requests") return answer;
    const content = await answer.json();
    Object.assign(content.router ?? content, { processes: 2, silent_processes: 1 });
    return Response.json(content);
  };
"""


def test_a_router_process_that_does_not_respond_is_reported_beside_the_totals(view: View):
    view.run(SILENT)
    words = "1 of 2 router processes does not respond"
    for place in ("#router-state", "#requests-note"):
        view.until(lambda place=place: words in view.text(place), f"{place} says so")
    assert "2 processes" in view.text("#about")


FAKE = """
  const evil = arguments[0];
  const real = window.fetch;
  const node = (role, i) => ({
    role, address: `${evil} 10.0.0.${i}:50100`, state: evil, instance_id: `${i}`, pids: [1, 2],
    pages: { free: 10, request: 5, [evil]: 2 }, queues: { [evil]: 3, waiting: 1 }, counters: {},
    steps: 1, mode: evil, seen_s: performance.now() / 1000,
    links: role === "decode" ? [...Array(32).keys()].map((p) => (
      { peer: `${evil} 10.0.0.${p}:50100`, path: evil, gib_per_s: 3 })) : [],
  });
  const cluster = () => ({
    router: { state: evil, reason: evil, version: evil, model: evil, uptime_s: 1,
              live_requests: 1, max_requests: 2, has_chat_template: true,
              models: [{ name: evil, state: evil, has_chat_template: true }],
              rejected_requests: 7, failed_requests: 5, recent: {
                window_s: 60, rejected_requests: 3, failed_requests: 2,
                ttft: { count: 9, p50_s: 0.039, p99_s: 1.14 },
                itl: { count: 0, p50_s: 0, p99_s: 0 } } },
    plan: { acts: true, pressures: { [evil]: 2, decode: 0.5 }, ago_s: 99,
            events: [{ what: evil, because: evil, ago_s: 5 }] },
    nodes: [...Array(64).keys()].map((i) => node(i < 32 ? "prefill" : "decode", i)),
  });
  window.fetch = (path, ...rest) =>
    path === "/cluster" ? Promise.resolve(Response.json(cluster())) : real(path, ...rest);
"""


def test_sixty_four_nodes_with_html_names_are_shown_as_text_that_fits_a_phone(view: View):
    view.run(FAKE, EVIL)
    view.until(lambda: len(view.all(".node")) == 64, "all nodes are shown")
    assert all(EVIL in text for text in view.texts(".node .address"))
    assert len(view.all(".link")) == 32 * 32
    view.resize(PHONE)
    view.run("for (const each of document.querySelectorAll('.node details')) each.open = true")
    assert view.overflow() == 0
    assert view.all("img") == []
    assert view.run("return window.ran") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_horizontal_scrolling_and_with_contrast(
    view: View, scheme: str
):
    view.colours(scheme)
    view.open(PHONE)
    prompt, tiles = (view.one(each).rect["y"] for each in ("#ask", "#tiles"))
    assert prompt < tiles
    view.ask("a longer prompt, to have an answer, facts and a timeline here", **GREEDY)
    view.answered()
    view.until_its_timeline()
    assert view.overflow() == 0
    assert view.run(FAINT) == []
    view.colours("")


# Text whose contrast with its background is below 4.5, as WCAG computes it.
FAINT = """
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const words = walker.currentNode.data.trim();
    if (!words || !element.checkVisibility() || element.closest(".unseen, noscript")) continue;
    const style = getComputedStyle(element);
    const bar = element.closest(".phase")?.querySelector("rect");
    const ink = rgba(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const ground = bar ? rgba(getComputedStyle(bar).fill) : behind(element);
    const [dark, light] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) faint.push(`${words}: ${contrast.toFixed(1)}`);
  }
  return faint;
"""


# Announcements to a screen reader. Checks at intervals would miss those of a short response.
RECORD_BUSY = """
  window.left = [];
  new MutationObserver((changes) => window.left.push(...changes.map((change) => change.oldValue)))
    .observe(document.querySelector("#answer"), {
      attributeFilter: ["aria-busy"],
      attributeOldValue: true,
    });
"""


def test_the_page_works_with_a_keyboard_and_a_screen_reader(view: View):
    view.one("body").send_keys(Keys.TAB)
    assert view.run("return document.activeElement.textContent") == "Skip to the prompt"
    fields = view.all("textarea, input, button, summary, [tabindex]")
    names = [field.accessible_name for field in fields if field.is_displayed()]
    assert names and all(names), names
    answer = view.one("#answer")
    assert answer.get_dom_attribute("aria-live") == "polite"
    view.run(RECORD_BUSY)
    view.ask("a prompt", **GREEDY)
    view.answered()
    view.until(lambda: answer.get_dom_attribute("aria-busy") == "false", "it is over")
    assert view.run("return window.left") == ["false", "true"]


def test_a_failed_node_and_its_return_are_shown_within_seconds(
    view: View, cluster: Cluster, background: Background
):
    (node,) = cluster.decode
    card = f".node[data-address='{node.address}']"
    background(cluster.kill(node))
    view.until(
        lambda: view.one(card).get_dom_attribute("data-state") == "unreachable",
        "the dead node is unreachable",
    )
    view.until(lambda: view.text("#router-state").startswith("not ready: no decode"), "told on top")
    view.until(lambda: view.texts(".link") == [], "its link is gone")
    background(cluster.start_again(node))
    view.until(lambda: view.one(card).get_dom_attribute("data-state") == "ready", "it is back")
    view.until(lambda: len(view.all(".link")) == 1, "and its link")
    view.until(lambda: view.text("#router-state") == "ready", "and requests can be placed")


def test_a_failed_router_is_reported_and_the_page_recovers_by_itself(
    view: View, cluster: Cluster, background: Background
):
    assert not view.one("#lost").is_displayed()
    background(cluster.kill_router())
    view.until(lambda: view.one("#lost").is_displayed(), "the loss is told")
    assert "Connection lost. The router cannot be reached." in view.text("#lost")
    assert view.text("#router-state") == "connection lost"
    assert len(view.all(".node")) == 2  # known data stays, and is marked as old
    view.ask("anyone there?", **GREEDY)
    view.until(lambda: view.one("#problem").is_displayed(), "the prompt box tells it too")
    assert view.text("#problem") == "The router cannot be reached."
    background(cluster.start_router_again())
    view.until(lambda: not view.one("#lost").is_displayed(), "it recovers")
    view.until(lambda: view.text("#router-state") == "ready", "all is well")
    view.ask("anyone there?", **GREEDY)
    assert view.answered()
    assert all("net::ERR_" in complaint for complaint in view.complaints())
