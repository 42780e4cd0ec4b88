"""Units of measurement, and the words after a number: what a quantity is of."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from ctpo_answers.layout import FOREIGN, FUNCTIONS, LATIN, is_product, without_text, word_set

_PREFIXES = dict(zip("QRYZEPTGMk", (Fraction(10) ** power for power in range(30, 0, -3)), strict=True))
_PREFIXES |= dict(
    zip("mu\u00b5\u03bcnpfazyrq", (Fraction(10) ** -power for power in (3, 6, 6, 6, *range(9, 31, 3))), strict=True)
)
_PREFIXES |= {"h": Fraction(100), "da": Fraction(10), "d": Fraction(1, 10), "c": Fraction(1, 100)}
_PREFIX_NAMES = {
    **{"quetta": "Q", "ronna": "R", "yotta": "Y", "zetta": "Z", "exa": "E", "peta": "P", "tera": "T", "giga": "G"},
    **{"mega": "M", "kilo": "k", "hecto": "h", "deca": "da", "deci": "d", "centi": "c", "milli": "m", "micro": "u"},
    **{"nano": "n", "pico": "p", "femto": "f", "atto": "a", "zepto": "z", "yocto": "y", "ronto": "r", "quecto": "q"},
}
# SI: symbol, names, and the unit in base units (BIPM, The International System of Units, 9th edition, tables 2, 4, 8).
_SI = """
m meter metre = m | g gram gramme gm = 1/1000 kg | s second sec = s | A ampere amp = A | mol mole = mol
K kelvin = K | cd candela = cd | Hz hertz = s^-1 | N newton = kg m s^-2 | Pa pascal = kg m^-1 s^-2
J joule = kg m^2 s^-2 | W watt = kg m^2 s^-3 | C coulomb = A s | V volt = kg m^2 s^-3 A^-1
F farad = kg^-1 m^-2 s^4 A^2 | \u03a9 ohm = kg m^2 s^-3 A^-2 | S siemens = kg^-1 m^-2 s^3 A^2
Wb weber = kg m^2 s^-2 A^-1 | T tesla = kg s^-2 A^-1 | H henry = kg m^2 s^-2 A^-2 | lm lumen = cd sr
lx lux = cd sr m^-2 | Bq becquerel = Bq | Gy gray = Gy | Sv sievert = Sv | kat katal = mol s^-1
rad radian = rad | sr steradian = sr | L l liter litre = 1/1000 m^3 | t ton tonne = 1000 kg
eV electronvolt = 1602176634/10000000000000000000000000000 kg m^2 s^-2 | M molar = 1000 mol m^-3
bar = 100000 kg m^-1 s^-2 | cal calorie = 523/125 kg m^2 s^-2 | bit = bit | B byte = 8 bit | baud Bd = baud
pc parsec = pc | Da dalton = Da
"""
# Units without prefixes. Celsius, Fahrenheit and kelvin have no common zero.
_OTHER = """
in inch inches = 127/5000 m | ft foot feet = 381/1250 m | yd yard = 1143/1250 m | mi mile = 201168/125 m
\u00c5 angstrom = 1/10000000000 m | AU = 149597870700 m | ly lightyear = 9460730472580800 m
quintal = 100 kg | lb lbs pound = 45359237/100000000 kg
oz ounce = 45359237/1600000000 kg | kilo = kg | min minute mins = 60 s | h hr hour hrs = 3600 s | day = 86400 s
week = 604800 s | month = 1/12 year | yr year = year | cent = 1/100 dollar | dollar usd buck = dollar
euro eur = euro | pound_sterling gbp = gbp | rupee rs inr = inr | yen jpy = jpy | arcsecond = 1/3600 degree
arcminute = 1/60 degree | degree deg = degree | celsius = celsius | fahrenheit = fahrenheit
gal gallon = 473176473/125000000000 m^3 | qt quart = 473176473/500000000000 m^3
pt pint = 473176473/1000000000000 m^3 | hectare ha = 10000 m^2 | acre = 40468564224/10000000 m^2
atm atmosphere = 101325 kg m^-1 s^-2 | mmHg = 26664477483/200000000 kg m^-1 s^-2 | hp horsepower = hp
"""
_SYMBOLS = {
    r"^\circ C": "celsius", r"^\circ F": "fahrenheit", r"^\circ": "degree", "'": "arcminute", '"': "arcsecond",
    r"\dollar": "dollar", r"\euro": "euro", r"\pounds": "pound_sterling", r"\yen": "yen", r"\Omega": "\u03a9",
    r"\mu": "\u00b5", r"\AA": "\u00c5", "\u2103": "celsius",
}  # fmt: skip
_COMPOUND = {
    "mph": "mile/hour", "kmph": "km/hour", "kph": "km/hour", "kmh": "km/hour", "fps": "ft/s", "cc": "cm^3",
    "mpg": "mile/gallon", "wpm": "word/minute", "bpm": "beat/minute", "rpm": "revolution/minute",
}  # fmt: skip
_PER = re.compile(r"\s*(?:(?:(?<=[\w.])\s+|^)(?:an?|every|each)\s+(?=\w)|(?<![A-Za-z])per\s+)")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_GENERIC = {"unit", "units"}
_NO_UNIT = word_set("is are not or and if when where for with only no but factorial by minus plus negative")
_ORDINAL = re.compile(r"\^?\s*(?:\{\s*)?(?:\\text\{)?\s*-?\s*(?:st|nd|rd|th)\s*\}?\s*\}?(?=\s|$)")
_BARE_WORDS = re.compile(rf"[{LATIN}\u00b5\u03bc][{LATIN}\u00b5\u03bc.'-]*")
_WORDS_AT_ONCE = 4
_LONGEST_ABBREVIATION = 6

Dimension = tuple[tuple[str, int], ...]
"""Base units with their powers, in the order of their names."""
_Measure = tuple[Dimension, Fraction]
"""Of a unit, and its factor of the base units."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts or measures.

    text: as written, in singular. words: of it. dimension: None where a word is no unit of measurement. factor: of the
    base units. scale: of the number itself, such as 10**6 for million. rest: words after a unit of measurement or a
    percent sign.
    """

    text: str = ""
    words: frozenset[str] = frozenset()
    dimension: Dimension | None = None
    factor: Fraction = Fraction(1)
    scale: int = 1
    percent: bool = False
    rest: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.words) or self.percent

    def __str__(self) -> str:
        return " ".join(["\\%", *sorted(self.rest)]) if self.percent else self.text

    def factors(self, other: Unit) -> tuple[Fraction, Fraction] | None:
        """Return what numbers of the one and of the other are to be multiplied with to be compared; None if they cannot
        be.

        What one of them leaves out is not compared: the first part of a rate, or what money is paid for.
        """
        if self.rest and other.rest and self.rest != other.rest:
            return None
        if {self.text, other.text} in _DEGREES:
            return _ALIKE
        if self.percent or other.percent:
            return _ALIKE if self.percent and other.percent else None
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
        """Return whether it is a currency alone."""
        return self.dimension is not None and len(self.dimension) == 1 and self.dimension[0] in _MONEY


_ALIKE = (Fraction(1), Fraction(1))
_DEGREES = ({"C", "celsius"}, {"F", "fahrenheit"})
"""A symbol of SI that also stands for degrees, and these."""
_MONEY = {(currency, 1) for currency in ("dollar", "euro", "gbp", "inr", "jpy")}
NONE = Unit()
PERCENT = Unit(percent=True)


@lru_cache(maxsize=1024)
def unit(text: str, blank: bool = False) -> Unit | None:
    """Return the unit that a whole text names; None where it names none. blank: a blank separates it from its
    number.
    """
    text = text.strip()
    if not text:
        return NONE
    if (percent := re.fullmatch(r"\\%(.*)", text)) and not re.search(r"[\d+*/=-]", percent[1]):
        return replace(PERCENT, rest=frozenset(map(_singular, without_text(percent[1]).split())) - _FILLERS)
    if (ordinal := _ORDINAL.match(text)) and ordinal.end() == len(text):
        return NONE
    text = re.sub(r"\b([apAP])\.\s?[mM]\b\.?", r"\1m", text)
    text = re.sub(r"\\cdot(?![a-z])", " ", text)
    bare = re.sub(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+|\^\\circ(?: ?[CF]\b)?|['\"{}]", " . ", text).split()
    for number, part in enumerate(bare):
        if not all(_may_stand_bare(word.strip("./()-"), blank, number > 0) for word in re.split(r"[/^\d-]", part)):
            return None
    for symbol, name in _SYMBOLS.items():
        text = re.sub(re.escape(symbol) + ("(?![A-Za-z])" if symbol[-1].isalpha() else ""), f" {name} ", text)
    text = without_text(text)
    text = re.sub(r"\u00b5\s+(?=[A-Za-z\u03a9])|(?<![A-Za-z])([A-Za-z])\s+(?=\u03a9)", lambda m: m[0].strip(), text)
    text = re.sub(r"\^\s*\{\s*(-?\d+)\s*\}", r"^\1", text)
    text = re.sub(r"\bdegrees?\s+(?=(?i:celsius|fahrenheit)\b)", " ", text)
    text = re.sub(r"degree\s+([CF])\b", lambda m: "celsius" if m[1] == "C" else "fahrenheit", text)
    text = _PER.sub("/", re.sub(r"\s+", " ", text))
    text = re.sub(r"(?<![A-Za-z])(?:each|apiece)(?![A-Za-z])", " ", text)
    for name, meant in _COMPOUND.items():
        text = re.sub(rf"\b{name}\b", meant, text, flags=re.IGNORECASE)
    text = re.sub(r"\s*/\s*", "/", text)
    characters = rf"[{LATIN}{FOREIGN}\u00b5\u03bc\u03a9_\s./^\d'()-]*"
    if not re.fullmatch(characters, text) or re.search(r"(?<!\^)(?<!\^-)\d", text):
        return None
    return _unit_of(text.strip(" ."))


_FILLERS = frozenset({"a", "an", "the", "of", "old"})


def _unit_of(text: str) -> Unit | None:
    words = [word.strip(".()'") for word in re.split(r"[\s/^]+|-?\d", text)]
    words = [word for word in words if word and word not in _FILLERS]
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
    shown = re.sub(r"[A-Za-z\u00b5\u03a9]+", lambda word: _singular(word[0]), " ".join(text.split()))
    tokens = text.split()
    for length in range(len(tokens), 0, -1):  # `5 feet tall` is a length
        if known := _dimension(" ".join(tokens[:length])):
            rest = frozenset(map(_singular, tokens[length:])) - _FILLERS
            return Unit(shown, names, *known, scale, rest=rest)
    return None if "below" in words else Unit(shown, names, None, Fraction(1), scale)


def _may_stand_bare(word: str, blank: bool, follows: bool) -> bool:
    """Whether a word without an upright font is a unit rather than a product of variables. follows: on another word."""
    if not word or word in _FILLERS or word == "per":
        return True
    lower = word.lower()
    if lower in (*_COMPOUND, *_POWERS, *_SCALES) or word in ("am", "pm"):
        return True
    known = measured(word) is not None
    if is_product(word) or (lower in FUNCTIONS and not known):
        return False
    if known:
        if blank or follows:
            return True
        return word.isupper() if len(word) == 1 else not (word.isupper() or word in _PRODUCTS)
    return bool(_BARE_WORDS.fullmatch(word)) and len(word) > (1 if follows else 2 if blank else _LONGEST_ABBREVIATION)


_PRODUCTS = ("cd",)


def _singular(word: str) -> str:
    """The name of a unit without its ending, or an English noun in singular; symbols keep their case."""
    if measured(word) is not None:
        lower = word.lower()
        stem = next((stem for stem in _stems(lower) if stem in _NAMES), None)
        return stem or (word if word in _SYMBOL_UNITS or _prefixed(word) else lower)
    word = word.lower()
    for ending, instead in (("ies", "y"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss")):
        if word.endswith(ending):
            return word[: -len(ending)] + instead
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _stems(word: str) -> list[str]:
    return [
        word,
        *(word[: -len(end)] + new for end, new in (("ies", "y"), ("es", ""), ("s", "")) if word.endswith(end)),
    ]


@lru_cache(maxsize=4096)
def measured(word: str) -> _Measure | None:
    """Dimension and factor of the unit that a word names: a symbol, or a name with or without its plural; else None.

    SI units have prefixes, and two symbols may stand together, as in kWh.
    """
    if found := _SYMBOL_UNITS.get(word) or _prefixed(word) or (word[0] == "K" and _prefixed("k" + word[1:])) or None:
        return found
    for cut in range(1, min(len(word), 4)):
        first, second = (_SYMBOL_UNITS.get(part) or _prefixed(part) for part in (word[:cut], word[cut:]))
        if first and second and not word.islower() and word[cut:] in _FACTORS:
            return _times(first, second, 1)
    for stem in _stems(word.lower()):
        is_symbol = stem == word.lower() or stem[0] == "k"  # kgs, kms
        if found := _NAMES.get(stem) or (is_symbol and (_SYMBOL_UNITS.get(stem) or _prefixed(stem))) or None:
            return found
        for prefix, symbol in _PREFIX_NAMES.items():
            if stem.startswith(prefix) and (named := _SI_NAMES.get(stem.removeprefix(prefix))):
                return named[0], named[1] * _PREFIXES[symbol]
    return None


_FACTORS = frozenset({"h", "m", "s"})
"""Symbols that stand directly behind another one: kWh, Nm, Ns."""


def _prefixed(symbol: str) -> _Measure | None:
    for length in (1, 2):
        if (unit_of := _SI_SYMBOLS.get(symbol[length:])) and (factor := _PREFIXES.get(symbol[:length])):
            return unit_of[0], unit_of[1] * factor
    return None


def _times(
    one: tuple[Dimension, Fraction], other: tuple[Dimension, Fraction], power: int
) -> tuple[Dimension, Fraction]:
    powers = dict(one[0])
    for name, exponent in other[0]:
        powers[name] = powers.get(name, 0) + exponent * power
    return tuple(sorted((name, exponent) for name, exponent in powers.items() if exponent)), one[1] * other[1] ** power


_ONE: _Measure = ((), Fraction(1))


def _dimension(text: str) -> _Measure | None:
    """The dimension and the factor of a unit such as `km/h`, `cm^2` or `square meters`; None with an unknown word."""
    total, sign, power = _ONE, 1, 1
    last: _Measure | None = None
    last_sign = 1
    for token in re.findall(rf"/|\^-?\d+|[{LATIN}{FOREIGN}\u00b5\u03bc\u03a9_]+", text):
        if token == "/":
            sign = -1
        elif token.startswith("^") or token.lower() in ("squared", "cubed"):
            if last is None:
                return None
            extra = (int(token[1:]) if token.startswith("^") else _POWERS[token.lower()]) - 1
            total = _times(total, last, last_sign * extra)
        elif token.lower() in _POWERS:
            power = _POWERS[token.lower()]
        elif token in _FILLERS:
            continue
        elif (known := measured(token)) is None:
            return None
        else:
            total = _times(total, known, sign * power)
            last, last_sign, power = known, sign, 1
    return total


def _table(text: str) -> tuple[dict[str, _Measure], dict[str, _Measure]]:
    """Symbols and names of units with what they measure. The first of each entry, and single letters, are symbols."""
    symbols, names = dict[str, _Measure](), dict[str, _Measure]()
    for entry in re.split(r"[|\n]", text.strip()):
        written, _, definition = entry.partition("=")
        total = _ONE
        for part in definition.split():
            if re.fullmatch(r"[\d/]+", part):
                total = (total[0], total[1] * Fraction(part))
            else:
                base, _, power = part.partition("^")
                total = _times(total, (((base, 1),), Fraction(1)), int(power or 1))
        for number, name in enumerate(written.split()):
            (names if number and len(name) > 1 else symbols)[name] = total
    return symbols, names


(_SI_SYMBOLS, _SI_NAMES), (_OTHER_SYMBOLS, _OTHER_NAMES) = _table(_SI), _table(_OTHER)
_SYMBOL_UNITS = _SI_SYMBOLS | _OTHER_SYMBOLS
_NAMES = _SI_NAMES | _OTHER_NAMES | _OTHER_SYMBOLS
