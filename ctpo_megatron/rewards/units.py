"""Units of measurement, and the words after a number: what a quantity is of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from ctpo_megatron.rewards.layout import FOREIGN, LATIN, without_text, word_set

# Dimension: factor and names of each unit. `T` and `K` are temperatures, which have no common zero.
_TABLE = {
    "L": "1/1000 mm millimeter millimetre|1/100 cm centimeter centimetre|1/10 dm decimeter decimetre|1 m meter metre|"
    "1000 km kilometer kilometre|127/5000 in inch inches|381/1250 ft foot feet|1143/1250 yd yard|201168/125 mi mile|"
    "1/1000000 \u03bcm \u00b5m micrometer|1/1000000000 nm nanometer",
    "M": "1/1000000 mg milligram|1/1000 g gram gm|1 kg kilogram kilo|100 quintal|1000 t ton tonne|"
    "45359237/100000000 lb lbs pound|45359237/1600000000 oz ounce",
    "t": "1/1000 ms millisecond|1 s sec second|60 min minute mins|3600 h hr hour hrs|86400 day|604800 week",
    "y": "1/12 month|1 year yr",
    "$": "1/100 cent|1 dollar usd buck",
    "e": "1 euro eur",
    "p": "1 pound_sterling gbp",
    "r": "1 rupee rs inr",
    "Y": "1 yen jpy",
    "a": "1/3600 arcsecond|1/60 arcminute|1 degree deg",
    "T": "1 celsius",
    "K": "1 fahrenheit",
    "V": "1/1000000 ml milliliter millilitre|1/1000 l liter litre|1/10000 dl|1/100000 cl|"
    "473176473/125000000000 gal gallon|473176473/500000000000 qt quart|473176473/1000000000000 pt pint",
    "E": "1 j joule|1000 kj",
    "P": "1 w watt|1000 kw",
    "N": "1 n newton",
    "U": "1 v volt",
    "A": "10000 hectare ha|40468564224/10000000 acre",
}
_SYMBOLS = {
    r"^\circ C": "celsius", r"^\circ F": "fahrenheit", r"^\circ": "degree", "'": "arcminute", '"': "arcsecond",
    r"\dollar": "dollar", r"\euro": "euro", r"\pounds": "pound_sterling", r"\yen": "yen",
}  # fmt: skip
_KNOWN = {
    name: (dimension, Fraction(entry.split()[0]))
    for dimension, entries in _TABLE.items()
    for entry in entries.split("|")
    for name in entry.split()[1:]
}
_COMPOUND = {
    "mph": "mile/hour", "kmph": "km/hour", "kph": "km/hour", "kmh": "km/hour", "fps": "ft/s", "cc": "cm^3",
    "mpg": "mile/gallon", "wpm": "word/minute", "bpm": "beat/minute", "rpm": "revolution/minute",
}  # fmt: skip
_PER = re.compile(r"\s*(?:(?:(?<=[\w.])\s+|^)(?:an?|every|each)\s+(?=\w)|(?<![A-Za-z])per\s+)")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_GENERIC = {"unit", "units"}
_FUNCTIONS = word_set(
    "sin cos tan cot sec csc log ln exp sqrt pi max min mod gcd lcm det arcsin arccos arctan infty infinity"
)
_NO_UNIT = word_set("is are not or and if when where for with only no but factorial below minus plus negative")
_ONE_LETTER = frozenset("mgshlLJNWVt")
_SHORT = word_set(
    "bag bed bit boy box bus car cat cow cup day dog egg hat hen jar lap lot man men pen pie pig red row toy "
    "way win won yen ant bee can bar pea pet ram am pm"
)
_ORDINAL = re.compile(r"\^?\s*(?:\{\s*)?(?:\\text\{)?\s*-?\s*(?:st|nd|rd|th)\s*\}?\s*\}?(?=\s|$)")
_BARE_WORDS = re.compile(rf"[{LATIN}\u00b5\u03bc][{LATIN}\u00b5\u03bc.'-]*")
_WORDS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts or measures.

    text: as written, in singular and lower case. words: of it. dimension: (name, power) pairs, or None where a word is
    not in the table. factor: of the base unit. scale: of the number itself, such as 10**6 for million.
    """

    text: str = ""
    words: frozenset[str] = frozenset()
    dimension: tuple[tuple[str, int], ...] | None = None
    factor: Fraction = Fraction(1)
    scale: int = 1
    percent: bool = False

    def __bool__(self) -> bool:
        return bool(self.words) or self.percent

    def __str__(self) -> str:
        return "\\%" if self.percent else self.text

    def factors(self, other: Unit) -> tuple[Fraction, Fraction] | None:
        """What numbers of the one and of the other are to be multiplied with to be compared; None if they cannot be.

        What one of them leaves out is not compared: the first part of a rate, or what money is paid for.
        """
        if self.dimension is not None and self.dimension == other.dimension:
            return self.factor, other.factor
        if "/" in self.text + other.text:
            return self._rates(other)
        if (self.dimension is not None and other.dimension is not None) or ("^" in self.text) != ("^" in other.text):
            return None
        return _ALIKE if self.words <= other.words or other.words <= self.words else None

    def _rates(self, other: Unit) -> tuple[Fraction, Fraction] | None:
        (above, below), (other_above, other_below) = self._parts(), other._parts()
        over = above.factors(other_above) if above and other_above else _ALIKE
        if not below or not other_below:
            known = above.dimension is not None and other_above.dimension is not None
            return over if above and other_above and (above.is_money() or not known) else None
        under = below.factors(other_below)
        return (over[0] / under[0], over[1] / under[1]) if over and under else None

    def _parts(self) -> tuple[Unit, Unit]:
        above, _, below = self.text.partition("/")
        return unit(above, blank=True) or NONE, unit(below, blank=True) or NONE

    def is_money(self) -> bool:
        """Whether it is a currency alone."""
        return self.dimension is not None and len(self.dimension) == 1 and self.dimension[0] in _MONEY


_ALIKE = (Fraction(1), Fraction(1))
_MONEY = {(currency, 1) for currency in "$eprY"}
NONE = Unit()
PERCENT = Unit(percent=True)


@lru_cache(maxsize=1024)
def unit(text: str, blank: bool = False) -> Unit | None:
    """The unit that a whole text names; None where it names none. blank: a blank separates it from its number."""
    text = text.strip()
    if not text:
        return NONE
    if (percent := re.fullmatch(r"\\%(.*)", text)) and not re.search(r"[\d+*/=-]", percent[1]):
        return PERCENT
    if (ordinal := _ORDINAL.match(text)) and ordinal.end() == len(text):
        return NONE
    text = re.sub(r"\b([apAP])\.\s?[mM]\b\.?", r"\1m", text)
    text = re.sub(r"\\cdot(?![a-z])", " ", text)
    bare = re.sub(r"\\text\s*\{[^{}]*\}|\\[a-z]+|\^\\circ(?: ?[CF]\b)?|['\"{}]", " ", text).split()
    if not all(_may_stand_bare(word.strip("./()-"), blank) for part in bare for word in re.split(r"[/^\d-]", part)):
        return None
    for symbol, name in _SYMBOLS.items():
        text = text.replace(symbol, f" {name} ")
    text = without_text(text)
    text = re.sub(r"\^\s*\{\s*(-?\d+)\s*\}", r"^\1", text)
    text = re.sub(r"\bdegrees?\s+(?=(?i:celsius|fahrenheit)\b)", " ", text)
    text = re.sub(r"degree\s+([CF])\b", lambda m: "celsius" if m[1] == "C" else "fahrenheit", text)
    text = _PER.sub("/", re.sub(r"\s+", " ", text))
    text = re.sub(r"(?<![A-Za-z])(?:each|apiece)(?![A-Za-z])", " ", text)
    for name, meant in _COMPOUND.items():
        text = re.sub(rf"\b{name}\b", meant, text, flags=re.IGNORECASE)
    text = re.sub(r"\s*/\s*", "/", text)
    characters = rf"[{LATIN}{FOREIGN}\u00b5\u03bc_\s./^\d'()-]*"
    if not re.fullmatch(characters, text) or re.search(r"(?<!\^)(?<!\^-)\d", text):
        return None
    return _unit_of(text.strip(" ."))


def _unit_of(text: str) -> Unit | None:
    words = [word.strip(".()'") for word in re.split(r"[\s/^]+|-?\d", text)]
    words = [word for word in words if word and word not in ("a", "an", "the", "of", "old")]
    if not words:
        return None if re.search(r"[\d^/]", text) else NONE
    if {word.lower() for word in words} <= _POWERS.keys():
        return None
    if len(words) > _WORDS_AT_ONCE or not _NO_UNIT.isdisjoint(word.lower() for word in words):
        return None
    scale = 1
    while words and words[0].lower() in _SCALES:
        scale *= _SCALES[words[0].lower()]
        text = re.sub(rf"^\s*{words[0]}\s*", "", text)
        words = words[1:]
    if not words or {word.lower() for word in words} <= _GENERIC:
        return Unit(scale=scale)
    names = frozenset(_singular(word) for word in words)
    shown = re.sub(r"[A-Za-z]+", lambda word: _singular(word[0]), " ".join(text.split()))
    dimension, factor = _dimension(text) or (None, Fraction(1))
    return Unit(shown, names, dimension, factor, scale)


def _may_stand_bare(word: str, blank: bool) -> bool:
    """Whether a word without an upright font is a unit rather than a product of variables."""
    if not word or word in ("a", "an", "the", "of", "per", "old"):
        return True
    if word in _ONE_LETTER:
        return blank
    known = _singular(word) in _KNOWN or word.lower() in (*_COMPOUND, *_POWERS, *_SCALES, *_SHORT)
    if word.lower() in _FUNCTIONS and not known:
        return False
    return (known and len(word) > 1) or (len(word) > 3 and bool(_BARE_WORDS.fullmatch(word)))


def _singular(word: str) -> str:
    word = word if word in _ONE_LETTER else word.lower()
    if word.lower() in _KNOWN:
        return word.lower()
    for ending, instead in (("ies", "y"), ("es", "e"), ("es", ""), ("s", "")):
        if word.endswith(ending) and word[: -len(ending)] + instead in _KNOWN:
            return word[: -len(ending)] + instead
    for ending, instead in (("ies", "y"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss")):
        if word.endswith(ending):
            return word[: -len(ending)] + instead
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _dimension(text: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """The dimension and the factor of a unit such as `km/h`, `cm^2` or `square meters`; None with an unknown word."""
    powers: dict[str, int] = {}
    factor, sign, power, last = Fraction(1), 1, 1, ("", Fraction(1))
    for token in re.findall(r"/|\^-?\d+|[A-Za-z\u00b5\u03bc_]+", text):
        if token == "/":
            sign = -1
        elif token.startswith("^") or token.lower() in ("squared", "cubed"):
            if not last[0]:
                return None
            extra = (int(token[1:]) if token.startswith("^") else _POWERS[token.lower()]) - 1
            powers[last[0]] += sign * extra
            factor *= last[1] ** (sign * extra)
        elif token.lower() in _POWERS:
            power = _POWERS[token.lower()]
        elif token.lower() in ("the", "of", "a", "an", "old"):
            continue
        elif (known := _KNOWN.get(_singular(token).lower())) is None:
            return None
        else:
            powers[known[0]] = powers.get(known[0], 0) + sign * power
            factor *= known[1] ** (sign * power)
            last, power = known, 1
    volume = powers.pop("V", 0) * 3 + powers.pop("A", 0) * 2  # in cubic and square metres
    if volume:
        powers["L"] = powers.get("L", 0) + volume
    return tuple(sorted((name, power) for name, power in powers.items() if power)), factor
