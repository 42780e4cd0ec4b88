"""Takes from a written answer what is layout, and writes what has several spellings in one."""

from __future__ import annotations

import re
from functools import lru_cache

LONGEST = 1000
"""In characters; a longer text is not an answer with several spellings."""

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys(
            "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "
        ),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u2019\u2032\u02b9", "'"),
        **dict.fromkeys("\u201c\u201d\u2033", '"'),
        **{"\u3001": ", ", "\u3002": ".", "\u2126": "\u03a9"},
        **{chr(0xFF01 + offset): chr(0x21 + offset) for offset in range(94) if offset != 12},  # full width
        **{"\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/", "\u2044": "/"},
        **{"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ", "\u00b1": r"\pm "},
        **{"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b0": r"^\circ ", "\u00ba": r"^\circ ", "\u2026": r"\ldots "},
        **{"\u00b2": "^{2}", "\u00b3": "^{3}", "\u221a": r"\sqrt ", "\u222a": r"\cup ", "\u2208": r"\in "},
        **{"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\u2153": r"\frac{1}{3}"},
        **{"\u2154": r"\frac{2}{3}", "\u2205": r"\emptyset ", "\u20ac": r"\euro ", "\u00a3": r"\pounds "},
        **{"\u00a5": r"\yen ", "\u00a2": r"\text{ cents}", "\u20b9": r"\text{Rs.} "},
    }
)
LATIN = r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
FOREIGN = r"\u0400-\u065f\u066e-\u06ef\u06fa-\u1eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
"""Letters of words that are no symbols in formulas, as Greek ones are. Digits of these scripts are among them."""
_FOREIGN_WORDS = re.compile(rf"\\text\s*\{{[^{{}}]*\}}|(?:(?!\d)[{FOREIGN}])+(?:[ /.-]?(?:(?!\d)[{FOREIGN}])+)*")
_TEXT = re.compile(r"\\(?:text(?:normal|up|rm)?|mathrm|mbox|hbox|operatorname)\s*(?=\{)|(?<=\{)\\rm\s+")
_FONT = re.compile(r"\\(?:text|math)(?:bf|it|sf|tt)|\\(?:emph|bold|bm|boldsymbol|underline|boxed|fbox|mathbf)(?![a-z])")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z%$])")
"""A backslash that a JSON or Python text has doubled."""


def _rows(found: re.Match[str]) -> str:
    """Lines of equations as a list; values with conditions stay as they are."""
    rows = [row.strip() for row in found[2].replace("&=", "=").split("\\\\")]
    return found[0] if "&" in "".join(rows) else ", ".join(row.rstrip(",.;") for row in rows if row)


def _letter(found: re.Match[str]) -> str:
    return f" {found[1] or found[2] or found[3]} "


_UNITS = r"\\text\{[^{}]*\}(?:\^\{?\d\}?|\\cdot|\\text\{[^{}]*\}|\s)*"


def _unit_over(found: re.Match[str]) -> str:
    above, below = (without_text(part).replace("\\cdot", " ") for part in found.groups())
    return rf"\text{{{above}/({below})}}" if " " in below.strip() else rf"\text{{{above.strip()}/{below.strip()}}}"


_RULES = (
    (r"\{\\rm\s+([^{}]*)\}", r"\\text{\1}"),
    (
        r"\\(?:text)?color\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}|\\(?:bf|it|large|Large|small|normalsize)(?![a-z])",
        "",
    ),
    (
        r"\\(?:display|text|script)style(?![a-z])|\\(?:limits|checkmark|blacksquare)(?![a-z])|\\!\s*|\\(?:left|right)\.",
        "",
    ),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-z])\s*", ""),
    (r"\\(?:quad|qquad|thinspace|enspace|space|nobreakspace)(?![a-z])|(?<!\\)\\[,;: \n]|(?<!\\)~", " "),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"[\[(]\s*\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{pmatrix}"),
    (r"\\end\{array\}\s*[\])]", r"\\end{pmatrix}"),
    (
        r"\\(?:wide)?hat\s*\{*\s*\\?([ijk])(?:math)?(?![A-Za-z])\s*\}*|\\(?:vec|overrightarrow)(?:\s*\{+([A-Za-z])\}+|\s+([A-Za-z]))",
        _letter,
    ),
    (r"\\in\s*\{?([NZQRC])\}?(?![A-Za-z])", r"\\in \\mathbb{\1}"),
    (r"\\lg(?![a-z])", r"\\log_{10}"),
    (r"(?:\\\{\s*)?\\begin\{(cases|aligned|gathered|array)\}(?:\{[lcr| ]*\})?(.*?)\\end\{\1\}", _rows),
    (r"\\langle(?![a-z])", "("),
    (r"\\rangle(?![a-z])", ")"),
    (r"\\lbrace(?![a-z])", r"\\{"),
    (r"\\rbrace(?![a-z])", r"\\}"),
    (r"\\leq(?:slant)?(?![a-z])", r"\\le"),
    (r"\\geq(?:slant)?(?![a-z])", r"\\ge"),
    (r"\\varnothing(?![a-z])", r"\\emptyset"),
    (r"(?<=\s)!=", r"\\ne "),
    (r"\bo ?' ?clock\b", "oclock"),
    (r"(?<![A-Za-z])(?:\\text\{\s*abs\s*\}|\\?abs)\s*\(([^()]*)\)", r"|\1|"),
    (r"(^|[<>=(+-]|\\[lg]e )\s*\\mid(?![a-z])([^|=<>{}]*?)\\mid(?![a-z])", r"\1|\2|"),
    (rf"(?<=[\d}}\s])\\frac\s*\{{\s*({_UNITS})\}}\s*\{{\s*({_UNITS})\}}", _unit_over),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\(?:lt|gt)(?![a-z])", lambda m: " < " if m[0] == r"\lt" else " > "),
    (r"(?<![A-Za-z\\])([A-Za-z])_\{(\w)\}(?!\w)", r"\1_\2"),
    (r"\\log\s*_e(?![a-z])", r"\\ln "),
    (r"\\text\{\s*(?:\u6216\u8005?|\u6216\u662f)\s*\}", r"\\text{ or }"),
    (r"\\text\{\s*[\u548c\u4e0e\u53ca\u4e14]\s*\}", r"\\text{ and }"),
    (r"\^\s*\\text\{o\}|\^\s*\{\s*\\text\{o\}\s*\}", r"^\\circ "),
    (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)(?![a-z])|\\(?:degree|circ)(?![a-z])", r"^\\circ "),
    (r"\^\s*\{\s*\\prime\s*\\prime\s*\}|\^\s*\\prime\s*\\prime(?![a-z])|''", '"'),
    (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime(?![a-z])", "'"),
    (r"\\?%|\\text\{\s*(?:\\?%|per ?cent(?:age)?|pct)\s*\}|(?<=[\d}\s])(?:per ?cent(?:age)?|pct)\b", r"\\%"),
    (r"\\(?:overline|bar)\s*(?=[\d{])", r"\\overline"),
    (r"\\d?[lc]?dots[bcmio]?(?![a-z])|\.\.\.", r"\\ldots "),
    (r"\\text\{\s*\}|\*\*", " "),
    (r"\\text\{\s*\\dollar\s*\}", r"\\dollar "),
    (r"\\text\{([^{}]*),\s*\}", r"\\text{\1}, "),
    (r"\\text\{\s*([^{}]+?)\s+by\s*\}", r"\\text{\1} by "),
    (r"\\text\{\s*((?:\\(?:dollar|euro|pounds|yen)\s*)?[+-]?\d[^{}]*)\}", r"\1"),
    (r"(?<=\d)\s+\(\s*([A-Za-z][A-Za-z'. -]{2,}|[mgslhL]|[ckm]m|k?g|ml|ft|in)\)", r" \\text{\1}"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"(?<=\\text)\{([^{}]*)\^\s*\{\s*(-?\d)\s*\}([^{}]*)\}", r"{\1^\2\3}"),
    (r"(?<![\\A-Za-z])(?:infinity|infty|inf)(?![A-Za-z])", r"\\infty"),
    (r"\\mathrm\{([ie])\}|\\text\{([ie])\}", lambda m: f" {m[1] or m[2]} "),
    (r"\\text\{d\}(?=\s*(?:[A-Za-z]|\\[a-z]))", "d"),
    (r"\\frac\s*(\d|\\[a-zA-Z]+|(?<=\s)[A-Za-z])(?=\s*[\w\\{])", r"\\frac{\1}"),
    (r"(\\frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*(\d|\\[a-zA-Z]+|[A-Za-z])", r"\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
)
_COMPILED = tuple((re.compile(pattern), replacement) for pattern, replacement in _RULES)
_BEFORE = re.compile(
    r"\s*(?:\\(?:approx|simeq|sim|therefore|#)(?![a-z])|[#=]"
    r"|(?:\\text\{)?\s*(?:approximately|approx\.?|about|(?i:(?:the )?(?:final )?answer\s*(?:is|:|=)))"
    r"\s*\}?(?![a-z]))\s*"
)
_GROUPED = re.compile(
    r"(?<![\d.,])(?<!\{,\})(?<!\d )(?!0)(?:\d{1,3}(?:(?:\{,\}|(?<=\d)[ '](?=\d{3})|_)\d{3})+"
    r"|\d{1,2}(?:\{,\}\d{2})+\{,\}\d{3}|\d{1,3}(?:\.\d{3}){2,}(?!\.\d|,\d))(?!\d)"
)
"""Two groups after dots cannot be the places of a decimal. With a comma after them, it can be a decimal one."""
_COMMAS = re.compile(r"(?<![\d.,])(?!0)(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?![\d,])")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,}])(\d+)\{,\}(?=\d+(?![\d.,{]))")
"""The braces take the blank of a list away."""
_PRICED = re.compile(r"(?:Rs\.?\s*\}?|\\(?:dollar|euro|pounds|yen)|\$)\s*[+-]?\s*$")
_RUPEES = re.compile(r"\s*(?:\\text\{\s*)?(?:[Rr]upees?|Rs|INR)(?![a-z])")
_SEVERAL_OR_ONE = re.compile(
    r"(?<![\d.,])(?!0)(?:(?P<whole>\d{1,3}(?P<mark>[. '_])\d{3}(?:(?P=mark)\d{3})*),(?P<places>\d+)"
    r"|(?P<indian>\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?))(?![\d,]|\.\d)"
)
"""`1 234,5` and `12,34,567`: one number, or several with a comma between."""
_DECIMALS = re.compile(r"(?<=\d)\.\d{3}(?: \d{3})*(?: \d{1,3})(?!\d)")
_OPENING, _CLOSING = "([{", ")]}"


@lru_cache(maxsize=4096)
def plain(answer: str) -> str:
    """Return the answer without fonts, colours, dollar signs of formulas, blanks that mean nothing and a full stop.

    Digits in groups become one number, a percentage ends with `\\%`, degrees with `^\\circ`, words in any upright font
    stand in `\\text{}`.
    """
    text = answer.strip()
    if len(text) > LONGEST:
        return text
    text = _dollars(text.translate(_CHARACTERS))
    for command, replacement in ((_TEXT, r"\\text"), (_FONT, _font)):
        text = command.sub(replacement, text)
    text = text.replace("{\\text ", "{\\rm ")
    if "\\begin" not in text:  # of a matrix, which has them between rows
        text = _DOUBLED.sub(r"\\", text)
    text = _FOREIGN_WORDS.sub(lambda words: words[0] if words[0][0] == "\\" else rf"\text{{{words[0]}}}", text)
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip()
    while (shorter := _ends_stripped(text)) != text:
        text = shorter
    return _joined(text)


def as_one_number(answer: str) -> str:
    """Return an answer in which a comma can stand in a number as well as between two, with the number; "" for any other
    one.

    `1 234,5` and `1.234,5` are 1234.5; `12,34,567` is 1234567, as digits are grouped in India.
    """
    text = re.sub(r"\\[,;: ]|~", " ", answer.strip().translate(_CHARACTERS))
    found = _SEVERAL_OR_ONE.search(text)
    if found is None or re.search(r"[(\[]|\\\{", text) or ",0" in (found["indian"] or ""):
        return ""
    if found["indian"] and _is_price(text, found.start(), found.end()):
        return ""  # that is one already
    whole = re.sub(r"\D", "", found["whole"]) if found["whole"] else found["indian"].replace(",", "")
    return text[: found.start()] + whole + (f".{found['places']}" if found["places"] else "") + text[found.end() :]


def without_text(answer: str) -> str:
    """Return the answer with what stands in `\\text{}` as bare words."""
    return re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", answer)


def lower_words(answer: str) -> str:
    """Its words in lower case with single blanks between."""
    return " ".join(without_text(answer).casefold().split())


def word_set(text: str, separator: str = " ") -> frozenset[str]:
    """Return the words, or phrases, of a text."""
    return frozenset(text.split(separator))


FUNCTIONS = word_set(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arcsinh arccosh arctanh asin acos atan log ln lg "
    "exp sqrt cbrt abs max min sup mod gcd lcm det dim deg arg ker floor ceil sgn sign frac"
) | (CONSTANTS := word_set("pi infty infinity"))
"""Names of functions and constants, which are no words before an argument."""
_FAMILIES = tuple(map(frozenset, ("abcd", "mnk", "pqrs", "uvw", "xyz")))


def is_product(word: str) -> bool:
    """Return whether three or more letters in a row are variables of one family, such as `abc` and `xyz`."""
    return len(word) > 2 and any(family.issuperset(word) for family in _FAMILIES)


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Return the parts of a text between separators that stand in no bracket."""
    parts, start, depths = [], 0, _depths(text)
    for found in separator.finditer(text):
        if depths[found.start()] == 0 and found.start() >= start:
            parts.append(text[start : found.start()])
            start = found.end()
    return [part.strip() for part in (*parts, text[start:])]


def enclosed(text: str) -> str:
    """Return the brackets around a whole text, such as `()` or `[)`; "" without them."""
    if len(text) < 2 or text[0] not in _OPENING or text[-1] not in _CLOSING or text[-2:-1] == "\\":
        return ""
    return text[0] + text[-1] if all(depth > 0 for depth in _depths(text)[1:-1]) and _depths(text)[-1] == 1 else ""


def _depths(text: str) -> list[int]:
    """How many brackets are open before each character."""
    depths, depth = [], 0
    for character in text:
        depths.append(depth)
        depth += (character in _OPENING) - (character in _CLOSING)
    return depths


def _font(found: re.Match[str]) -> str:
    return r"\text" if found[0].startswith(("\\text", "\\emph")) else ""


def _dollars(text: str) -> str:
    """Without the dollar signs around formulas; one that is left over is money."""
    bare = text.replace("\\$", "\\dollar ")
    if bare.count("$") % 2 == 0:
        return bare.replace("$", "")
    return bare.replace("$", "\\dollar ")


def _ends_stripped(text: str) -> str:
    text = _BEFORE.sub("", text, count=1) if _BEFORE.match(text) else text
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[2:-2]
    if enclosed(text) == "{}":
        text = text[1:-1]
    if text.endswith(("\\ldots", "\\ldots ")):
        return text.strip()
    return text.strip().rstrip(".,;").rstrip("\\" if text.rstrip(".,;").endswith("\\ ") else "").strip()


def _joined(text: str) -> str:
    """The text with the digits of each number together."""
    text = _GROUPED.sub(_ungrouped, text)
    text = _DECIMAL_COMMA.sub(r"\1.", text)
    text = _DECIMALS.sub(lambda found: found[0].replace(" ", ""), text)

    def one(found: re.Match[str]) -> str:
        if any(
            text[i] in "([" or (text[i : i + 1] == "{" and text[i - 1 : i] == "\\") for i in _open(text, found.start())
        ):
            return found[0]
        is_list = ",0" not in found[0] and not re.fullmatch(r"\d{1,3}(?:,\d{3})+", found[0])
        is_list = is_list and not _is_price(text, found.start(), found.end())
        return found[0] if is_list else found[0].replace(",", "")

    return _COMMAS.sub(one, text).replace("{,}", ",")


def _is_price(text: str, start: int, end: int) -> bool:
    return bool(_PRICED.search(text, 0, start) or _RUPEES.match(text, end))


def _ungrouped(found: re.Match[str]) -> str:
    mixed = re.compile(r"/(\d+)").match(found.string, found.end())
    if mixed and re.fullmatch(r"\d+ \d+", found[0]) and int(found[0][-3:]) < int(mixed[1]):
        return found[0]  # `3 233/250` is 3 and a proper fraction
    return re.sub(r"\D", "", found[0])


def _open(text: str, end: int) -> list[int]:
    """Where the brackets begin that are open at `end`."""
    found: list[int] = []
    for index, character in enumerate(text[:end]):
        if character in _OPENING:
            found.append(index)
        elif character in _CLOSING and found:
            found.pop()
    return found
