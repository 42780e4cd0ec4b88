"""Reads a written answer: which type it has, and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from ctpo_answers.layout import (
    CONSTANTS,
    FOREIGN,
    FUNCTIONS,
    LATIN,
    LONGEST,
    enclosed,
    is_product,
    lower_words,
    plain,
    split,
    without_text,
    word_set,
)
from ctpo_answers.numerals import numeral, spoken
from ctpo_answers.readings import (
    Based,
    Choice,
    Formula,
    Given,
    Named,
    Quantity,
    Reading,
    Several,
    Species,
    Wording,
)
from ctpo_answers.times import time
from ctpo_answers.units import NONE, unit

_LIST = re.compile(
    r"[,;]?\s*(?:\\text\{\s*(?:,?\s*and|,?\s*or|,)\s*\}|\\(?:lor|vee|land)(?![a-z]))\s*|[,;]?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;]"
)
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|\\(?:lor|vee)(?![a-z])")
_AND_INSIDE = re.compile(
    r"\\text\{([^{}]*?)\s(and|or)\s([^{}]*)\}|\\text\{\s*(and|or)\s([^{}]+)\}|\\text\{([^{}]+?)\s(and|or)\s*\}"
)
_IN_WORDS = re.compile(r"(?<![A-Za-z])by(?![A-Za-z])")
_BY = re.compile(r"\s*(?:\\times(?![a-z]|\s*10\s*\^)|\\text\{\s*(?:by|x)\s*\}|(?<![A-Za-z\\])(?:by|x)(?![A-Za-z]))\s*")
_CONDITION = re.compile(
    r"(.+?)\s*(?:[,;]\s*\(?|\(|(?=\\text\{))\s*(?:\\text\{[^{}]*\}|where|for|with)?\s*"
    r"((?:[A-Za-z]\s*,\s*)*[A-Za-z]\s*\\in\s*\\mathbb\{[A-Z]\}(?:\^[+*]|_\+|\^\{[+*]\})?)\s*\)?"
)
_MATRIX = re.compile(r"\\begin\{[pbv]?matrix\}(.*)\\end\{[pbv]?matrix\}")
_COLON = re.compile(r"\s*(?:\\colon(?![a-z])|:|(?<=\d )to(?= \d)|\\text\{\s*to\s*\})\s*")
_CLOCK = re.compile(r"\d{1,2}:0\d(?!\d).*")
_NAME = (
    r"(?:\\text\{[^{}=]*\}|\\?[A-Za-z]+|\|?[A-Z]{2,3}\|?|\\(?:angle|overline|vec)\s*\{?[A-Z]+\}?|\([a-z](?:,\s*[a-z])+\))"
    r"(?:_(?:\w|\{[^{}]*\}))?'*(?:(?:\^\{?-1\}?)?\((?:[^()]|\([^()]*\))*\))?"
)
_ELEMENTARY = re.compile(r"\\?(?:(?:a(?:rc)?)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|abs)(?![a-z])")
"""Functions whose value does not name an answer: `\\sin(x) = 1` is to be solved."""
_COORDINATES = frozenset("xyz")
_PRODUCT = re.compile("[a-z]{2}|abc|xyz|pqr|rst")
"""Letters that are variables next to each other rather than a name."""
_LENGTH = re.compile("[A-Z]{2,3}")
_CAPITAL = re.compile(r"(?<!\\)[A-Z]")
_NAMED = re.compile(rf"({_NAME})\s*(?:=|\\in(?![a-z]))\s*([^=<>]+)")
_LABELLED = re.compile(
    r"(?:\\text\{\s*([^{}:\d]+):\s*\}|\\text\{\s*([^{}:\d]+)\}\s*:|([A-Za-z]{2,}(?: [A-Za-z]+)*):)\s*(.+)"
)
INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![a-z])")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|equiv|subset)(?![a-z])")
_CHOICES = tuple(
    re.compile(form)
    for form in (
        r"\\text\{\s*\(?([A-J])\)?[.:]?\s*\}\s*(.*)",
        r"\\text\{\s*\(([A-J])\)\s*(.+)\}()",
        r"\(\s*(?:\\text\{)?\s*([A-J])\s*\}?\s*\)[.:]?\s*(.*)",
        r"([A-J])(?:[.)]\s*|:\s+)(.*)",
        r"([A-J])()",
        r"(?:\\text\{\s*)?(?i:option|choice|answer)[\s:]*\}?\s*(?:\\text\{)?\s*\(?([A-J])\)?\s*\}?()",
    )
)
_REMAINDER = re.compile(
    r"([+-]?\d+)\s*(?:\\text\{\s*)?\(?\s*(?i:with (?:a )?remainder(?: of)?|remainder|rem\.?|rest[eo]?|r\.?)\s*:?\s*\}?"
    r"\s*([+-]?\d+)\s*\)?"
)
_LETTERS = re.compile(r"(?:\\text\{)?([A-H]{2,8})\}?")
_BASED = re.compile(
    r"([+-]?)\s*(?:\(\s*(\w+)\s*\)|(?:\\text\{)?(\w+?)\}?)\s*_\s*(?:\{\s*\(?\s*(?:\\text\{)?([^{}()]+)\}?\s*\)?\s*\}|(\d))"
)
_PROGRAMMED = re.compile(
    r"(?:\\text\{)?\s*([+-]?)\s*0(?=x[\da-f]+\s*\}?$|b[01]+\s*\}?$|o[0-7]+\s*\}?$)([xbo])([\da-f]+)\s*\}?",
    re.IGNORECASE,
)
"""As programs write numbers: `0x1f`."""
_LARGEST_BASE = 36
_POINTED = re.compile(r"[+-]?\d+(?:\.\d+){2,}")
"""A date, or a number whose groups of digits are not of three."""
_BASES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TRAILING = re.compile(
    r"(?<=[\d})!\s])((?:\s*\\Omega|\s*\\text\s*\{[^{}]*\}\s*(?:\^\s*(?:\{\s*-?\d\s*\}|\d))?(?:\s*/(?=\s*\\text))?|\^\\circ|\\%|\\dollar)+"
    r"|\s[A-Za-z]{2,}(?:[ /][A-Za-z]+)*(?:\^(?:\{\d\}|\d))?)$"
)
_MONEY = re.compile(
    r"([+-]?)\s*(\\dollar|\\euro|\\pounds|\\yen|(?:\\text\{)?\s*(?:Rs\.?|USD|EUR)\s*\}?)\s*([+-]?)\s*(?=[\d.\\])"
)
_PRICE = re.compile(
    r"\s*(?:\\text\{)?\s*(?:(hundred|thousand|million|billion|trillion)\s*\}?\s*)?(?:\\text\{\s*)?(?:/|(?:per|an?|every|each)\s+\w)"
)
"""What money is paid for."""
_POINT, _DIVISION = re.compile(r"\.\d"), re.compile(r"/|\\[a-z]*(?:frac|overline|dots|dot)(?![a-z])|\(")
_UNIT = re.compile(
    r"(?:\\text\{[^{}]*\}|\\(?:%|dollar|euro|pounds|yen|cdot)(?![a-z])|\^\\circ(?:\s*[CF](?![a-z]))?"
    rf"|[{LATIN}\u00b5\u03bc\u03a9'\"./]|\s"
    r"|\((?:[A-Za-z\u00b5\u03a9 ]|\\cdot(?![a-z]))+\)|\\(?:Omega|mu|AA)(?![a-z])"
    r"|\^\s*(?:\{\s*(?:-?\d|\\text\{[a-z]*\}|[a-z]{2})\s*\}|-?\d|\\text\{[a-z]*\}|[a-z]{2})|-(?=[A-Za-z]))*"
)
_SET = re.compile(r"\s*[A-Za-z](?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)\s*(.+)")
_TRIGONOMETRIC = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_SHORT_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{3}(?![A-Za-z])")
_OPERATOR = re.compile(r"[=+*/<>|\\^_(]")
_WORD_ALONE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}|(?:(?<![\\A-Za-z])[A-Za-z]+ ){3}")
_SPECIES = re.compile(r"(?=.*[\d+-])(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*)+\)\d*)+\d*[+-]?")
"""Symbols of elements with counts, and a charge."""
_ALIASES = {"all real numbers": r"\mathbb{R}", "all reals": r"\mathbb{R}", "empty set": r"\emptyset"}
_DAY = re.compile(r"\d{1,2}\.\d{1,2}\.(?:\d\d){1,2}")
_MONTHS = word_set(
    "january february march april may june july august september october november december "
    "jan feb mar apr jun jul aug sep sept oct nov dec"
)


@lru_cache(maxsize=4096)
def read(answer: str) -> Reading:
    """Return what an answer says. Needs no computer algebra: takes about 0.1 ms."""
    text = plain(answer)
    return Formula(text) if len(text) > LONGEST else _read(text)


def leaves(reading: Reading) -> list[Reading]:
    """Return the parts that are compared each on its own."""
    if isinstance(reading, Several):
        return [leaf for item in reading.items for leaf in leaves(item)]
    if isinstance(reading, Named | Choice | Given) and reading.value is not None:
        return leaves(reading.value)
    return [reading]


def is_date(words: Wording) -> bool:
    """Return whether the words name a day, such as `June 20` or `20.6.2024`."""
    return bool(_DAY.fullmatch(words.text)) or not _MONTHS.isdisjoint(words.text.split())


def _read(text: str) -> Reading:
    text = text.strip()
    if enclosed(text) == "{}":
        return _read(text[1:-1])
    for reader in _READERS:
        if reading := reader(text):
            return reading
    return Formula(text)


def _choice(text: str) -> Reading | None:
    for form in _CHOICES:
        if found := form.fullmatch(text):
            if _LIST.match(found[2]):
                return None  # `(B) and (C)`
            return Choice(found[1], _read(found[2]) if found[2].strip() else None)
    letters = _LETTERS.fullmatch(text)
    if letters and list(letters[1]) == sorted(set(letters[1])):
        return Several(tuple(map(Choice, letters[1])))
    return None


def _based(text: str) -> Reading | None:
    if found := _PROGRAMMED.fullmatch(text):
        return _number_in(found[1], found[3], {"x": "16", "o": "8", "b": "2"}[found[2].lower()])
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    digits, base = found[2] or found[3], (found[4] or found[5]).strip().casefold()
    base = str(_BASES.index(base)) if base in _BASES else base
    if digits.isdecimal():
        return _number_in(found[1], digits, base)
    known = base.isdecimal() and int(base) <= _LARGEST_BASE and digits.isalnum() and digits.isascii()
    if not known or max(int(digit, 36) for digit in digits) >= int(base):
        return None
    is_name = digits.isalpha() and digits.upper() != digits  # `a_{16}` is a variable
    return None if is_name else _number_in(found[1], digits, base)


def _number_in(sign: str, digits: str, base: str) -> Based:
    digits = digits.lower().lstrip("0") or "0"
    return Based("-" * (sign == "-" and digits != "0") + digits, base)


def _divided(text: str) -> Reading | None:
    found = _REMAINDER.fullmatch(text)
    return Several((Quantity(Fraction(found[1])), Quantity(Fraction(found[2]))), "R") if found else None


def _quantities(text: str) -> Reading | None:
    """A number with its unit, one quantity in several units such as `2 kg 300 g`, or numbers with blanks between."""
    parts: list[Quantity] = []
    rest = text
    while rest:
        found = _leading(rest) if not parts or rest[0] in "0123456789.\\" else None
        if found is None:
            return None
        parts.append(found[0])
        rest = found[1]
    if len(parts) < 2:
        return parts[0] if parts else None
    if not any(part.unit for part in parts):
        return Several(tuple(parts), " ")
    return _compound(parts, text) if all(part.unit for part in parts) else None


def _leading(text: str) -> tuple[Quantity, str] | None:
    """The quantity that a text begins with, and what follows it."""
    money = _MONEY.match(text)
    sign, start = (money[1] or money[3], money.end()) if money else ("", 0)
    found = numeral(sign + text[start:])
    if found is None:
        return None
    value, end = found[0], found[1] + start - len(sign)
    named = _UNIT.match(text, end)
    after = named.end() if named else end
    written = text[end:after]
    price = _PRICE.match(written) if money else None
    if written.lstrip().startswith("\\cdot"):
        return None
    if money and price:
        per = without_text(written).strip().removeprefix(price[1]) if price[1] else written
        written = f"{price[1] or ''} {money[2]} {per}"
    what = unit(written, blank=written.startswith(" ") or after < len(text))
    if what is None or (after < len(text) and not written):
        return None
    if written.lstrip().startswith("/") and what.dimension is None:
        return None  # a formula such as `5/abcd`
    if money and not what.words:
        what = replace(unit(money[2]) or NONE, scale=what.scale)
    decimal = bool(_POINT.search(text[start:end])) and not _DIVISION.search(text[start:end])
    return Quantity(value * what.scale, replace(what, scale=1), decimal), text[after:].strip()


def _compound(parts: Sequence[Quantity], text: str) -> Several:
    """Quantities as one, if each is in a smaller unit of the same kind than the one before; else as a list."""
    units = [part.unit for part in parts]
    pairs = list(pairwise(units))
    if units[0].dimension is None or not all(a.dimension == b.dimension and a.factor > b.factor for a, b in pairs):
        return Several(tuple(parts))
    if not text.startswith("-"):
        return Several(tuple(parts), "+")
    signed = [replace(part, value=-part.value) if isinstance(part.value, Fraction) else part for part in parts[1:]]
    return Several((parts[0], *signed), "+")  # the sign belongs to the whole


def _given(text: str) -> Reading | None:
    found = _CONDITION.fullmatch(text)
    if found is None or INEQUALITY.search(found[1]):
        return None
    names = re.findall(r"[A-Za-z]", found[2].partition("\\in")[0])
    value = found[1].strip().rstrip(",;")
    if value in names or not set(names) <= set(re.sub(r"\\[A-Za-z]+", "", value)):
        return None
    return Given(_read(value), re.sub(r"\s", "", found[2]))


def _sides(text: str) -> Reading | None:
    found = sizes(text)
    items = found.items if found else ()
    measured = bool(items) and all(isinstance(item, Quantity) and item.unit for item in items)
    return found if measured or _IN_WORDS.search(text) else None


def sizes(text: str) -> Several | None:
    """Quantities with `by` or a sign of multiplication between, as the sides of a rectangle."""
    parts = split(text, _BY)
    items = tuple(map(_read, parts)) if len(parts) > 1 and all(parts) else ()
    return Several(items, "x") if items and all(isinstance(item, Quantity) for item in items) else None


def vector(text: str) -> Several | None:
    """Return the entries of a matrix with one row or one column."""
    found = _MATRIX.fullmatch(text)
    rows = [row.strip() for row in found[1].split("\\\\") if row.strip()] if found else []
    entries = [entry.strip() for row in rows for entry in row.split("&")]
    if not entries or (len(rows) > 1 and len(entries) > len(rows)) or not all(entries):
        return None
    return Several(tuple(map(_read, entries)), "()")


def _listed(text: str) -> Reading | None:
    parts = split(_AND_INSIDE.sub(_apart, text), _LIST)
    if len(parts) < 2 or not all(parts):
        return None
    items = tuple(item for part in map(_read, parts) for item in _flat(part))
    if all(isinstance(item, Quantity) for item in items):
        return _compound([item for item in items if isinstance(item, Quantity)], text)
    is_any = _OR.search(text) and any(INEQUALITY.search(str(each)) for each in items)
    return _solutions(items) or Several(items, "|" if is_any else "")


def _solutions(items: Sequence[Reading]) -> Reading | None:
    """`x = 1, 5` and `x = 1 or x = 5` as the set that x is in; `x = 1, y = 2 or x = 3, y = 4` as a set of pairs."""
    first, *others = items
    if not isinstance(first, Named):
        return None
    if not any(isinstance(each, Named | Wording) or _RELATION.search(str(each)) for each in others):
        items = (first, *(Named(first.name, other) for other in others))
    names = [each.name for each in items if isinstance(each, Named)]
    values = [each.value for each in items if isinstance(each, Named)]
    each_once = list(dict.fromkeys(names))
    if names != each_once * (len(items) // len(each_once)) or len(names) == len(each_once):
        return None
    if len(each_once) == 1:
        return Named(names[0], Several(tuple(values), "{}"))
    size = len(each_once)
    points = [point(each_once, values[start : start + size]) for start in range(0, len(values), size)]
    return Named(points[0].name, Several(tuple(each.value for each in points), "{}"))


def point(names: Sequence[str], values: Sequence[Reading]) -> Named:
    """`x = 1, y = 2` as `(x, y) = (1, 2)`; names that are no coordinates stay in their order."""
    order = sorted(range(len(names)), key=lambda index: names[index] if _COORDINATES.issuperset(names) else "")
    return Named(f"({','.join(names[i] for i in order)})", Several(tuple(values[i] for i in order), "()"))


def _flat(reading: Reading) -> tuple[Reading, ...]:
    return reading.items if isinstance(reading, Several) and reading.brackets == "" else (reading,)


def _plus_minus(text: str) -> Reading | None:
    """Both values of a text with `\\pm`."""
    if "\\pm" not in text:
        return None
    signs = (("\\pm", "\\mp"), ("\\mp", "\\pm"))
    both = [text.replace(plus, " + ").replace(minus, " - ").strip().removeprefix("+ ") for plus, minus in signs]
    name, equals, _ = text.partition("=")
    both = [each.replace(f"{name}= +", f"{name}=") for each in both] if equals else both
    values = tuple(map(_read, both))
    return _solutions(values) or Several(values)


def _apart(found: re.Match[str]) -> str:
    """`\\text{4 boys and 5 girls}` in parts."""
    before, word, after = found[1] or found[6] or "", found[2] or found[4] or found[7], found[3] or found[5] or ""
    left, right = (rf"\text{{{part}}}" if part.strip() else "" for part in (before, after))
    return rf"{left} \text{{ {word} }} {right}"


def _bracketed(text: str) -> Reading | None:
    brackets = enclosed(text)
    inner = text[1:-1]
    if text.startswith("\\{") and text.endswith("\\}"):
        brackets, inner = "{}", text[2:-2]
    if not brackets or not inner.strip():
        return None
    if brackets == "{}" and (condition := _SET.fullmatch(inner)):
        return _read(condition[1])
    parts = split(inner, _LIST)
    if not all(parts) or (brackets == "{}" and re.search(r"\\mid|\||:", inner)):
        return None
    if len(parts) > 1 or brackets == "{}":
        items = tuple(map(_read, parts))
        return (_solutions(items) if brackets == "{}" else None) or Several(items, brackets)
    return _read(inner) if brackets == "()" and not _RELATION.search(inner) else None


def _named(text: str) -> Reading | None:
    if label := _LABELLED.fullmatch(text):
        return Named((label[1] or label[2] or label[3]).strip().casefold(), _read(label[4]))
    found = _NAMED.fullmatch(text)
    if found is None or _RELATION.search(found[2]) or _PRODUCT.fullmatch(found[1]) or _ELEMENTARY.match(found[1]):
        return None
    if _LENGTH.fullmatch(found[1]) and len(_CAPITAL.findall(re.sub(r"\\text\{[^{}]*\}", "", found[2]))) > 1:
        return None  # an equation of quantities such as `PV = nRT`
    name = re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r"\1", found[1])
    return Named(name.replace(", ", ","), _read(found[2]))


def _ratio(text: str) -> Reading | None:
    parts = split(text, _COLON)
    if len(parts) < 2 or not all(re.match(r"[+-]?[\d.\\(A-Za-z]", part) for part in parts):
        return None
    return Several(tuple(map(_read, parts)), "clock" if _CLOCK.fullmatch(text) else ":")


def _measured(text: str) -> Reading | None:
    """A formula for a number with a unit after it, such as `2\\pi \\text{ cm}`."""
    found = _TRAILING.search(text)
    if found is None:
        return None
    before, what = text[: found.start()].strip(), unit(found[1], blank=True)
    if what is None or not _may_be_measured(before) or (what.percent and re.search(r".\s*[+-]", before)):
        return None
    if what.dimension is None:  # a word may be part of a sentence
        letters = re.sub(r"\\[A-Za-z]+", "", before)
        if re.search(r"[A-Za-z]", letters) or not re.search(r"\d|\\(?:pi|sqrt|frac)", before):
            return None
    return Quantity(Formula(before), what)


def _may_be_measured(text: str) -> bool:
    """Whether a formula can be a number before its unit."""
    if not text or text[-1] in "+-*/^=(" or "\\text" in text:
        return False
    return not any(pattern.search(text) for pattern in (_TRIGONOMETRIC, _RELATION, _WORD_ALONE))


def _spoken(text: str) -> Reading | None:
    """A number in words, with or without what it counts."""
    found = spoken(lower_words(text).replace(" percent", r" \%"))
    what = unit(found[1], blank=True) if found else None
    return Quantity(found[0], what) if found and what is not None else None


def _species(text: str) -> Reading | None:
    letters = re.sub(r"\\text\{\s*([^{}]*?)\s*\}|[_^{}]", r"\1", text)
    if not _SPECIES.fullmatch(letters):
        return None
    shown = len(_CAPITAL.findall(letters)) > 1 or letters[-1] in "+-" or ("\\text" in text and re.search(r"[_^]", text))
    return Species(letters) if shown else None


def _words(text: str) -> Reading | None:
    bare = without_text(text)
    candidates = _WORD.findall(bare) + ([] if _OPERATOR.search(bare) else _SHORT_WORD.findall(bare))
    alone = bare.strip().isalpha() and bare.strip() not in CONSTANTS  # no function of anything
    said = [word for word in candidates if (alone or word.lower() not in FUNCTIONS) and not is_product(word)]
    in_text = re.search(rf"\\text\s*\{{[^{{}}]*(?:[A-Za-z]{{2}}|[{FOREIGN}])[^{{}}]*\}}", text)
    phrase = re.fullmatch(r"[A-Za-z]{2,}(?: +[A-Za-z]{2,})+|(?i:no)", bare.strip())
    if not (said or in_text or phrase) or _is_formula(bare):
        return None
    if bare.strip().lower() in _ALIASES:
        return Formula(_ALIASES[bare.strip().lower()])
    words = re.sub(r"[^\w\s+*/=<>^\\{}().-]|\.(?!\d)", " ", bare).casefold().split()
    return Wording(" ".join(words[words[0] in ("a", "an", "the") :] if len(words) > 1 else words))


def _is_formula(bare: str) -> bool:
    """Whether a text with words is a formula all the same: `max(a,b)`, `3\\sin x`."""
    return bool(re.search(r"\\(?:frac|sqrt|sum|int|begin|mathbb)|[\^_]", bare))


def _fixed(text: str) -> Reading | None:
    """Dates and dots, which are compared as they are written."""
    return Wording(text) if text == "\\ldots" or _POINTED.fullmatch(text) else None


_READERS: tuple[Callable[[str], Reading | None], ...] = (
    *(time, _based, _species, _choice, _fixed, _divided, _spoken, _sides, _quantities, _given, _listed, _bracketed),
    *(_plus_minus, _named, _ratio, _measured, _words),
)
"""The first that reads a text decides its type. What none of them reads is a formula."""
