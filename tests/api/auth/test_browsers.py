"""Protection against requests that a web page makes a browser send: the Host header, and CORS."""

import pytest

from api.http_checks import AllowedHosts, Cors

OWN = ["localhost", "localhost:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::1]"]


@pytest.mark.parametrize("host", [*OWN, "LOCALHOST", "page.localhost:8000", ""])
def test_this_machines_own_names_are_accepted(host):
    assert AllowedHosts("127.0.0.1", ()).refusal(host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evillocalhost",
        "10.0.0.1",
        "[::2]:80",
        "::1:8000:evil",
        "localhost:evil",
    ],
)
@pytest.mark.parametrize("listens_on", ["127.0.0.1", "localhost", "::1"])
def test_other_names_are_rejected_on_loopback(listens_on, host):
    sentence = AllowedHosts(listens_on, ()).refusal(host)
    assert sentence is not None
    assert "--allowed-hosts" in sentence


def test_names_can_be_allowed_and_others_are_then_rejected_on_every_address():
    check = AllowedHosts("0.0.0.0", ("baton.example", "[2001:db8::1]"))
    for host in ("baton.example", "Baton.Example:443", "[2001:db8::1]:80", "localhost"):
        assert check.refusal(host) is None
    assert check.refusal("evil.example")
    assert AllowedHosts("0.0.0.0", ()).refusal("any.example") is None


def test_a_listed_site_may_read_only_the_api():
    assert Cors(()).headers("/v1/models", "https://a.example") == ()
    cors = Cors(("https://a.example",))
    reported = dict(cors.headers("/v1/models", "https://a.example"))
    assert reported["access-control-allow-origin"] == "https://a.example"
    assert reported["vary"] == "origin"
    assert "retry-after" in reported["access-control-expose-headers"]
    assert dict(cors.headers("/v1/models", "https://b.example")) == {"vary": "origin"}
    assert dict(cors.headers("/v1/models", "")) == {"vary": "origin"}
    assert cors.headers("/cluster", "https://a.example") == ()


def test_a_preflight_response_lists_the_methods_and_headers():
    cors = Cors(("*",))
    wanted = "authorization, x-stainless-os"
    reported = dict(cors.preflight("/v1/completions", "null", wanted))
    assert reported["access-control-allow-methods"] == "GET, POST"
    assert reported["access-control-allow-headers"] == wanted
    assert "access-control-allow-credentials" not in reported
    assert dict(cors.headers("/v1/completions", "null"))["access-control-allow-origin"] == "*"
    unsafe = dict(cors.preflight("/v1/completions", "null", "a\r\nset-cookie: b"))
    assert "access-control-allow-headers" not in unsafe
