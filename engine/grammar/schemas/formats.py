"""String formats as expressions, where xgrammar's own are looser than their definition."""

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_HOUR, _MINUTE = r"([01][0-9]|2[0-3])", r"[0-5][0-9]"
_TIME = rf"{_HOUR}:{_MINUTE}:{_MINUTE}(\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:{_MINUTE})"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_POINTER = r"(/([A-Za-z0-9_.:@ -]|~[01])*)*"

EXPRESSIONS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "email": r"^[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,16}){0,2}"
    r"@[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?){1,3}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]{{0,5}})(#|{_POINTER})$",
}
AS_XGRAMMAR_HAS_THEM = frozenset(
    {"duration", "hostname", "ipv6", "uri", "uri-reference", "uri-template", "uuid"}
)
# The other formats of JSON Schema. Unknown formats have no effect.
UNENFORCED = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
