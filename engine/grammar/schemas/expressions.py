"""Conversion of regular expressions and string formats to the regex dialect of xgrammar.

Constructs that xgrammar would ignore are rejected.
"""

from common.errors import InvalidRequest

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
# String formats as expressions, because xgrammar's own are looser than the standard.
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "email": r"^[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,16}){0,2}"
    r"@[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?){1,3}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]{{0,5}})(#|{_POINTER})$",
}
XGRAMMAR_FORMATS = frozenset(
    {"duration", "hostname", "ipv6", "uri", "uri-reference", "uri-template", "uuid"}
)
# The other formats of JSON Schema. They have no effect, like unknown formats.
UNENFORCED_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
_CLASSES = frozenset("dDwWsS")
_CONTROL = frozenset("tnrfv0cx")
# A JSON string must escape these characters, so no expression may match them.
_UNQUOTABLE = frozenset('"\\')
_BUT_UNQUOTABLE = r'"\\'  # inside a set
_BUT = {"D": "0-9", "W": "A-Za-z0-9_", "S": r"\s"}  # the classes that these classes negate


def quotable(expression: str) -> str:
    """Return an expression for the content of a JSON string. It matches no text with quotes,
    backslashes or control characters, even if the original does.

    Raises:
        InvalidRequest: the expression requires such a character, or has a construct that `check`
            rejects.
    """
    return _Scan(expression, quoted=True).whole()


def check(expression: str) -> None:
    """Raise InvalidRequest, with the place, for constructs that xgrammar ignores: assertions,
    boundaries, back references, and anchors inside the expression."""
    _Scan(expression, quoted=False).whole()


class _Scan:
    def __init__(self, expression: str, *, quoted: bool) -> None:
        self._expression = expression
        self._quoted = quoted
        self._at = 0
        self._depth = 0

    def whole(self) -> str:
        parts = []
        counted = False
        while self._at < len(self._expression):
            sign = self._expression[self._at]
            if sign == "?" and self._quoted:
                self._at += 1
                # xgrammar 0.2.8 reads (ab)? as a?b? here, so `?` becomes a count. After a count,
                # `?` only sets the order of attempts, which does not matter to a grammar.
                parts.append("" if counted else "{0,1}")
                continue
            parts.append(self._next())
            counted = sign in "*+}"
        return "".join(parts)

    def _next(self) -> str:
        start = self._at
        sign = self._expression[start]
        self._at += 1
        match sign:
            case "\\":
                return self._escape()
            case "[":
                return self._set()
            case "(":
                self._depth += 1
                self._group()
            case ")":
                self._depth -= 1
            case "^":
                if self._depth or (start and self._expression[start - 1] != "|"):
                    raise self._error("^ is only supported at the start", start)
                return self._anchor(sign)
            case "$":
                rest = self._expression[self._at :]
                if self._depth or (rest and rest[0] != "|"):
                    raise self._error("$ is only supported at the end", start)
                return self._anchor(sign)
            case "." if self._quoted:
                return f"[^{_BUT_UNQUOTABLE}]"
            case _:
                self._check_quotable(sign, start)
        return self._expression[start : self._at]

    def _anchor(self, sign: str) -> str:
        """Return an anchor, or nothing in quoted mode, because a grammar always matches the whole
        text."""
        return "" if self._quoted else sign

    def _group(self) -> None:
        rest = self._expression[self._at :]
        if rest.startswith("?") and not rest.startswith("?:"):
            raise self._error("groups with (? are not supported, except (?:", self._at - 1)
        self._at += 2 * rest.startswith("?:")

    def _escape(self) -> str:
        """Read an escape after its backslash."""
        start = self._at - 1
        if self._at >= len(self._expression):
            raise self._error("incomplete escape", start)
        sign = self._expression[self._at]
        self._at += 1
        if sign == "u":
            code = self._expression[self._at : self._at + 4]
            try:
                character = chr(int(code, 16))
            except ValueError:
                raise self._error(f"\\u{code} is not a character", start) from None
            self._at += 4
            if self._quoted:
                self._check_quotable(character, start)
        elif self._quoted and sign in _BUT:
            return f"[^{_BUT[sign]}{_BUT_UNQUOTABLE}]"
        elif self._quoted and (sign in _CONTROL or sign in _UNQUOTABLE):
            raise self._error("characters that JSON escapes are not supported", start)
        elif sign.isalnum() and sign not in _CLASSES and sign not in _CONTROL:
            raise self._error(f"\\{sign} is not supported", start)
        return self._expression[start : self._at]

    def _set(self) -> str:
        """Read a set after its bracket. A range that contains forbidden characters is split around
        them."""
        start = self._at - 1
        signs: list[str] = []
        if self._expression[self._at : self._at + 1] == "^":
            signs.append("^")
            self._at += 1
        while True:
            if self._at >= len(self._expression):
                raise self._error("unterminated character set", start)
            if self._expression[self._at] == "]":
                self._at += 1
                break
            signs.append(self._member(negated=signs[:1] == ["^"]))
        if not self._quoted:
            return self._expression[start : self._at]
        if signs[:1] == ["^"]:
            signs.append(_BUT_UNQUOTABLE)
        if not any(signs):
            raise self._error("characters that JSON escapes are not supported", start)
        return f"[{''.join(signs)}]"

    def _member(self, *, negated: bool) -> str:
        """Read one character, a class or a range of a set."""
        low = self._single()
        rest = self._expression[self._at : self._at + 2]
        if not rest.startswith("-") or rest in ("-", "-]") or len(low) != 1:
            if len(low) != 1:
                return low
            unquotable = self._quoted and not negated and (low in _UNQUOTABLE or low < " ")
            return "" if unquotable else _literal(low)
        self._at += 1
        place = self._at
        high = self._single()
        if len(high) != 1 or high < low:
            raise self._error("invalid range in a character set", place)
        if not self._quoted or negated:
            return f"{_literal(low)}-{_literal(high)}"
        return "".join(_ranges(max(ord(low), 0x20), ord(high)))

    def _single(self) -> str:
        """Read a character, or a class with its backslash."""
        start = self._at
        sign = self._expression[start]
        self._at += 1
        if sign != "\\":
            return sign
        if self._at >= len(self._expression):
            raise self._error("incomplete escape", start)
        sign = self._expression[self._at]
        self._at += 1
        if sign in _CLASSES:
            if self._quoted and sign in _BUT:
                raise self._error(f"\\{sign} is not supported in a set", start)
            return "\\" + sign
        if sign in "ux":
            length = 4 if sign == "u" else 2
            code = self._expression[self._at : self._at + length]
            self._at += length
            try:
                return chr(int(code, 16))
            except ValueError:
                raise self._error(f"\\{sign}{code} is not a character", start) from None
        if sign in "tnrfv":
            return {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}[sign]
        if sign.isalnum():
            raise self._error(f"\\{sign} is not supported", start)
        return sign

    def _check_quotable(self, character: str, place: int) -> None:
        if self._quoted and (character in _UNQUOTABLE or character < " "):
            raise self._error("characters that JSON escapes are not supported", place)

    def _error(self, why: str, place: int) -> InvalidRequest:
        return InvalidRequest(f"{why}, at character {place} of {self._expression[:80]!r}")


def _literal(character: str) -> str:
    """Return a character as it is written in a set."""
    return f"\\{character}" if character in "\\]^-[" else character


def _ranges(low: int, high: int) -> list[str]:
    """Return the ranges between `low` and `high` without characters that JSON strings must
    escape."""
    parts = []
    for barrier in (*(ord(each) for each in sorted(_UNQUOTABLE)), high + 1):
        last = min(high, barrier - 1)
        if low <= last:
            parts.append(f"{_literal(chr(low))}-{_literal(chr(last))}")
        low = max(low, barrier + 1)
    return parts
