"""Grammars that are expensive to compile, or ever more expensive with each token of the response.

Names and constants are random, so that no grammar is in a node's cache.
"""

from random import Random

from tests.attack.posts import complete
from tests.attack.target import Target

NUM_WORKERS = 3

_NUM_RULES = 60


async def ambiguous(target: Target, draw: Random) -> None:
    """Every text has exponentially many parses, from the start or after a prefix."""
    name, prefix = _name(draw), draw.choice(("", "[a-z ]{90} ", "[a-z ]{300} ", '"x "{400} '))
    await _follow_grammar(target, f"root ::= {prefix}{name}\n{name} ::= {name} {name} | [a-z ]")


async def small_rules(target: Target, draw: Random) -> None:
    """Sixty rules of one line each, in a chain or independent."""
    name = _name(draw)
    await _follow_grammar(target, draw.choice((_chain, _doubling_chain, _side_by_side))(name))


async def nested_repetitions(target: Target, draw: Random) -> None:
    prefix = "".join(draw.choices("ab", k=draw.randrange(9)))
    await _follow_regex(target, prefix + draw.choice(_NESTED))


async def accepted_but_dear(target: Target, draw: Random) -> None:
    """Send a regex that is barely under the limit of the trial compilation."""
    prefix = "".join(draw.choices("ab", k=draw.randrange(9)))
    await _follow_regex(target, prefix + draw.choice(_DEAR))


_NESTED = ("((a*)*b*)*", "((a|b)*(b|a)*)*", "(([a-z ]*)*[a-b]*)*", "((a?){30}b?){30}", "(a*a*)*b")
_DEAR = (
    "(a|b|ab|ba)*",
    "([a-z]{1,20} ){1,40}",
    "[a-z ]{0,500}",
    "(a|ab|abc|b|bc|c)*",
    "(.{0,9}x)*",
)


def _chain(name: str) -> str:
    rules = "\n".join(f"{name}{n} ::= {name}{n + 1} | [a-z ]" for n in range(_NUM_RULES))
    return f"root ::= {name}0*\n{rules}\n{name}{_NUM_RULES} ::= [a-z ]"


def _doubling_chain(name: str) -> str:
    rules = "\n".join(
        f"{name}{n} ::= {name}{n + 1} | {name}{n + 1} {name}{n + 1} | [a-z ]"
        for n in range(_NUM_RULES)
    )
    return f"root ::= {name}0*\n{rules}\n{name}{_NUM_RULES} ::= [a-z ]"


def _side_by_side(name: str) -> str:
    rules = "\n".join(f"{name}{n} ::= [a-z ]" for n in range(_NUM_RULES))
    return f"root ::= ({' | '.join(f'{name}{n}' for n in range(_NUM_RULES))})*\n{rules}"


def _name(draw: Random) -> str:
    return "r" + "".join(draw.choices("abcdefgh", k=6))


async def _follow_grammar(target: Target, grammar: str) -> None:
    await complete(target, guided_grammar=grammar, min_tokens=500, max_tokens=600)


async def _follow_regex(target: Target, regex: str) -> None:
    await complete(target, guided_regex=regex, min_tokens=500, max_tokens=600)
