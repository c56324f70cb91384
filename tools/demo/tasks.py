"""Tasks of the demo model with their correct responses: facts to recall, lists, sums.

Tasks are text. Of tokens, only the number per word is used. Everything is drawn from the caller's
`Random`.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tools.demo.tokenizer import CALL, CALL_END
from tools.demo.words import COMMANDS, LETTERS, MARKS, WORDS

Draw = Callable[[Random], str]

MAX_DIGITS = 3
MAX_REVERSED = 12
_SINGLE_TOKENS = frozenset((*MARKS, *COMMANDS, *WORDS, *LETTERS))
_CALL_MARKS = (CALL, CALL_END)
_ONE_WORD_KEYS = 400  # tokens of facts for which there are surely enough words


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt and the only correct response.

    exact: the response is machine-readable, so its characters must match exactly: no space in
    front, and none around marks.
    """

    prompt: str
    answer: str
    exact: bool = False

    @property
    def num_tokens(self) -> int:
        return cost(self.prompt) + (exact_cost if self.exact else cost)(self.answer) + 1


def cost(text: str) -> int:
    """Return the number of tokens: 1 for a known word or mark, else a space and its characters."""
    marks = sum(text.count(mark) for mark in _CALL_MARKS)
    words = _without_marks(text, " ").replace(",", " , ").split()
    return marks + sum(1 if word in _SINGLE_TOKENS else 1 + len(word) for word in words)


def exact_cost(text: str) -> int:
    """Return the number of tokens of an exact response. A known word includes its space."""
    marks = sum(text.count(mark) for mark in _CALL_MARKS)
    characters = _without_marks(text, "")
    words = re.findall(r" [a-z]+", characters)
    saved = sum(len(word) - 1 for word in words if word[1:] in _SINGLE_TOKENS)
    return marks + len(characters) - saved


def _without_marks(text: str, put_in: str) -> str:
    for mark in _CALL_MARKS:
        text = text.replace(mark, put_in)
    return text


# Words.


def known_word(random: Random) -> str:
    return random.choice(WORDS)


def spelled_word(random: Random) -> str:
    return "".join(random.choices(LETTERS, k=random.randint(2, 8)))


def digits(random: Random) -> str:
    return str(number(random))


def any_word(random: Random) -> str:
    return random.choices((known_word, digits, spelled_word), (6, 2, 2))[0](random)


# Recall.


def facts(random: Random, num_tokens: int, word: Draw) -> dict[str, str]:
    """Return about `num_tokens` tokens of facts: keys of one or two words, values of one to three.

    In some lists the keys are made of few words, so that no single word identifies a key.
    """
    num_words = 2 if num_tokens > _ONE_WORD_KEYS else random.randint(1, 2)
    key_word = word
    if num_words == 2 and random.random() < 0.3:
        fewest = 2 + math.isqrt(2 * num_tokens // 5)
        pool = [word(random) for _ in range(random.randint(fewest, 3 * fewest))]
        key_word = lambda source: source.choice(pool)  # noqa: E731
    known: dict[str, str] = {}
    left = num_tokens
    while left > 0:
        key = _phrase(random, num_words, key_word)
        if key not in known:
            known[key] = _phrase(random, random.choices((1, 2, 3), (5, 3, 2))[0], word)
            left -= cost(key) + cost(known[key]) + 2
    return known


def word_facts(random: Random, num_tokens: int) -> dict[str, str]:
    """Return facts of two known words for each key and two for each value: six tokens a fact."""
    known: dict[str, str] = {}
    while 6 * (len(known) + 1) <= num_tokens:
        known[_phrase(random, 2, known_word)] = _phrase(random, 2, known_word)
    return known


def recall(given: dict[str, str], key: str, value: str) -> Exchange:
    """Return `red fox = tea, blue owl = jam, red fox =`. `given` may be empty."""
    facts_and_key = [*(f"{k} = {v}" for k, v in given.items()), key]
    return Exchange(f"{', '.join(facts_and_key)} =", value)


def recalls(random: Random, num_tokens: int, word: Draw) -> list[Exchange]:
    """Return a conversation: facts, then questions about them, with more facts and sums between."""
    known = facts(random, int(num_tokens * random.uniform(0.35, 0.9)), word)
    given = known.copy()
    exchanges: list[Exchange] = []
    left = num_tokens
    while left > 0:
        if exchanges and random.random() < 0.1:
            exchange = add(number(random), number(random))
        else:
            key = random.choice(list(known))
            exchange = recall(given, key, known[key])
            more = facts(random, 12, word) if random.random() < 0.1 else {}
            given = {k: v for k, v in more.items() if k not in known}
            known |= given
        exchanges.append(exchange)
        left -= exchange.num_tokens
    return exchanges


def _phrase(random: Random, num_words: int, word: Draw) -> str:
    return " ".join(word(random) for _ in range(num_words))


# Lists and sums.


def number(random: Random) -> int:
    """Draw a number of one digit up to MAX_DIGITS, with equally likely lengths."""
    return random.randrange(10 ** random.randint(1, MAX_DIGITS))


def add(a: int, b: int) -> Exchange:
    return Exchange(f"add {a} {b} =", str(a + b))


def copy(words: Sequence[str]) -> Exchange:
    text = " ".join(words)
    return Exchange(f"copy {text} =", text)


def reverse(words: Sequence[str]) -> Exchange:
    return Exchange(f"reverse {' '.join(words)} =", " ".join(reversed(words)))


def single_tokens(random: Random, count: int) -> list[str]:
    """Return known words or letters, sometimes of so few kinds that they repeat."""
    kinds: Sequence[str] = random.choices((WORDS, LETTERS), (7, 3))[0]
    if random.random() < 0.2:
        kinds = random.sample(kinds, min(count + 1, len(kinds)))
    return random.choices(kinds, k=count)


def copies(random: Random, num_tokens: int, word: Draw) -> list[Exchange]:
    """Return lists of all lengths to copy. A single length would teach a distance, not a search."""
    exchanges = []
    left = num_tokens
    while left > 0:
        count = random.randint(1, max(1, left // 2 - 3))
        words = [word(random)]
        while cost(" ".join(words)) < count:
            words.append(word(random))
        exchanges.append(copy(words if random.random() < 0.7 else single_tokens(random, count)))
        left -= exchanges[-1].num_tokens
    return exchanges


def sums_and_lists(random: Random, num_tokens: int) -> list[Exchange]:
    exchanges = []
    left = num_tokens
    while left > 0:
        if random.random() < 0.7:
            exchange = add(number(random), number(random))
        else:
            exchange = reverse(single_tokens(random, random.randint(1, MAX_REVERSED)))
        exchanges.append(exchange)
        left -= exchange.num_tokens
    return exchanges
