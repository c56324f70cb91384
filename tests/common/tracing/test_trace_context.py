"""traceparent, strictly by W3C's specification."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tracing.context import SpanName, TraceContext, checked, is_sampled, log_fields, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


def test_a_header_names_a_span_and_its_sampling_flag():
    assert parse(HEADER) == SpanName(int(TRACE, 16), int(SPAN, 16), True)
    assert parse(HEADER[:-2] + "00") == SpanName(int(TRACE, 16), int(SPAN, 16), False)
    assert is_sampled(HEADER) and not is_sampled(HEADER[:-2] + "00")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        HEADER.upper(),
        f" {HEADER}",
        f"{HEADER}\n",
        f"{HEADER}-more",  # version 00 has four fields
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01more",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 300,
    ],
)
def test_an_invalid_header_is_ignored(header):
    assert parse(header) is None and checked(header) == ""


@pytest.mark.parametrize(
    ("header", "passed_on"),
    [
        (f"01-{TRACE}-{SPAN}-01", HEADER),
        (f"cc-{TRACE}-{SPAN}-01-more", HEADER),
        (f"00-{TRACE}-{SPAN}-03", HEADER),  # flags that this version does not know
        (f"00-{TRACE}-{SPAN}-fe", HEADER[:-2] + "00"),
    ],
)
def test_fields_of_later_versions_are_not_propagated(header, passed_on):
    assert checked(header) == passed_on


@settings(max_examples=100)
@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"))
def test_any_text_is_a_valid_header_or_ignored(text):
    header = checked(text)
    assert checked(header) == header
    assert not header or header.startswith("00-")


def test_only_lines_of_a_traced_request_have_a_trace_id():
    assert log_fields(HEADER) == {"trace_id": TRACE} and log_fields("") == {}
    assert (
        TraceContext(HEADER).log_fields == {"trace_id": TRACE} and TraceContext().log_fields == {}
    )
    own = f"00-{TRACE}-{'a' * 16}-01"
    assert (TraceContext(HEADER).passed_on, TraceContext(HEADER, own).passed_on) == (HEADER, own)
