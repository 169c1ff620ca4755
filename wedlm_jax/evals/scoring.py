"""Answers in texts: what a completion is scored by, where the questions are your own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Literal

Match = Literal["number", "choice", "formula", "text"]

_NUMBER = re.compile(
    r"(?<![0-9.])(?P<minus>(?<!\w)-)?[$€£¥₹]?(?P<digits>(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
)
# Chat models number their headings so: "#### 1. First step".
_MARKED = re.compile(r"####[ \t*]*(?:\\boxed\{)?(?![0-9]+[.):][ \t]+\S)" + _NUMBER.pattern)
# A and I that begin or go on a sentence are words: "A train", "I think", but not "A because" and "A and not B".
# A small one counts in brackets, but not as the i of a list nor as an argument: (b), not (i) and f(b). An apostrophe ends a
# letter as a quotation mark alone: 'B', but not I'm and A's.
_LETTER = (
    r"(?<![\w'\u2019])(?:[B-HJ]|A(?= (?:and|but|not)\b)|[AI](?!['\u2019]| (?!because\b|since\b|as\b|is\b)[a-z]))(?![\w'\u2019])"
    r"|(?<=[(\[])(?<!\w[(\[])[a-hj](?=[)\]])"
    r"|(?<=['\u2018])(?<!\w['\u2018])[A-J](?=['\u2019](?!\w))"
)
_OPENED = r"(?:\s|\\boxed\{|\\(?:text|math)(?:bf|rm)?\{|\\\(|\\\[|[(\[*\"'\u2018\u201c$])*"
_IS = r"(?:(?i:\s+is)\s*[:=]?|\s*\**[:=])"
_ANSWER = re.compile(rf"\b(?i:answer)(?:{_IS}(?i:\s*(?:choice|option))?)?{_OPENED}({_LETTER})")
_CHOSEN = re.compile(rf"\b(?i:choice|option){_IS}{_OPENED}({_LETTER})")
_OPTION = re.compile(rf"\b(?i:choice|option){_OPENED}({_LETTER})")
_FIRST = re.compile(rf"{_OPENED}({_LETTER})")
_ALONE = re.compile(r"\W*([a-jA-J])\W*")
# The power of a unit, as the 2 of cm^2, is no number.
_POWER = re.compile(r"(?<=[a-zA-Z}])\^(?:-?[0-9]+|\{-?[0-9]+\})")
_MINUS = str.maketrans("\N{MINUS SIGN}\N{EN DASH}", "--")

_BOX = re.compile(r"\\f?box(?:ed)?\s*(?:(?=\{)|(?<=\s)([0-9]+|[a-zA-Z]\b))")
_TOLD = re.compile(r"\b(?i:answer)\s+is\s*:?\s*\$([^$]+)\$")
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_WORDS = r"\\(?:text|math)?(?:text|mbox|rm|bf|it)\{([^{}]*)\}"
_PLAIN = r"\{([0-9a-zA-Z.]+)\}"
# What `one_form` replaces, one after the other.
_ONE_FORM = (
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
    (r"\\([lgn]e)q(?![a-zA-Z])", r"\\\1"),
    (r"\\[!,;:$%]|[$%~]", ""),
    (r"(?<!\\)\\\s|\s", ""),
    (r"[.,]+$", ""),
    (r"\^\\circ|\^\{\\circ\}", ""),  # degrees
    (rf"(?<=.){_WORDS}(?:\^\{{?[0-9]\}}?)?$", ""),  # a unit
    (_WORDS, r"\1"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"^\+", ""),
    (r"^\\frac\{-(?=[0-9a-zA-Z.]+\})", r"-\\frac{"),
    (r"\\(frac|sqrt)([0-9a-zA-Z])", r"\\\1{\2}"),
    (rf"(\\frac{_GROUP})([0-9a-zA-Z])", r"\1{\2}"),
    (rf"(?<![\w}}.)])\\frac{_PLAIN}{_PLAIN}(?![\w{{(\\.])", r"\1/\2"),
    (r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2"),
    (r"^[a-zA-Z]=(?=[^=]+$)", ""),  # x = 5
)


def number(text: str) -> str | None:
    """The number behind the first `####` that has one, as GSM8K writes its answers; else the last one in the last `\\boxed{...}`
    that has one; else the last number of the text.

    It is written in one form, without signs of currencies, commas between thousands, exponents and zeros that change no value:
    `-$1,200.50` is -1200.5.
    """
    text = _without_latex(text)
    found = _MARKED.search(text)
    if found is None:
        numbers = [number for part in (text, *_boxes(text)) for number in _NUMBER.finditer(part)]
        if not numbers:
            return None
        found = numbers[-1]
    whole, _, decimals = f"{Decimal(found['digits'].replace(',', '')):f}".partition(".")
    value = f"{whole.lstrip('0') or '0'}.{decimals.rstrip('0')}".rstrip(".")
    return f"-{value}" if found["minus"] and value != "0" else value


def only_number(text: str) -> str | None:
    """`number` of an answer to score by: the only one in it, or, where one is marked, in that line, or else in its last box. 1/2
    and 8:30 have none."""
    text = _without_latex(text)
    marked = _MARKED.search(text)
    counted = [text, *_boxes(text)][-1] if marked is None else text[marked.start() :].partition("\n")[0]
    return number(text) if len(_NUMBER.findall(counted)) == 1 else None


def _without_latex(text: str) -> str:
    """With plain signs for minus, for dollars and for the comma between thousands, `{,}`, and no powers of units."""
    return _POWER.sub("", text.translate(_MINUS).replace("{,}", ",").replace(r"\$", "$"))


def choice(text: str) -> str | None:
    """A letter A to J: the first that is named the answer, as in "the answer is (C)", else the choice, as in "Option: C", else
    the only one of which the text speaks as of an option; else one that it begins with; else the last one that stands alone. A
    small one counts too in brackets, or where there is nothing else."""
    if (alone := _ALONE.fullmatch(text)) is not None:
        return alone[1].upper()
    if (named := _ANSWER.search(text) or _CHOSEN.search(text)) is not None:
        return named[1].upper()
    # They may be weighed one by one before the answer.
    options = {letter.upper() for letter in _OPTION.findall(text)}
    if len(options) == 1:
        return options.pop()
    if (first := _FIRST.match(text)) is not None:
        return first[1].upper()
    return next((letter.upper() for letter in reversed(re.findall(_LETTER, text))), None)


def formula(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` or `\\boxed 5`, as MATH writes its answers; where there is none, between the dollars
    behind the last "answer is". In one form (`one_form`)."""
    told = _boxes(text) or _TOLD.findall(text)
    return one_form(told[-1]) if told else None


def only_formula(text: str) -> str | None:
    """`formula` of an answer to score by, which may also be a formula alone, on one line."""
    return formula(text) or (None if "\n" in text.strip() else one_form(text))


def one_form(latex: str) -> str | None:
    """A formula without what changes no value: white space, `\\left` and `\\right`, dollars, units, degrees, a variable before
    `=`, braces round a single sign. A fraction of two numbers or letters is a/b, a number as `number` writes it; nothing is
    computed, so 2/4 is not 1/2. None if nothing is left."""
    latex = latex.translate(_MINUS).replace("{,}", ",")
    for pattern, replacement in _ONE_FORM:
        latex = re.sub(pattern, replacement, latex)
    return number(latex) if _NUMBER.fullmatch(latex) else latex or None


def _boxes(text: str) -> list[str]:
    """What stands in each `\\boxed{...}` or `\\boxed 5` that closes."""
    return [inside for box in _BOX.finditer(text) if (inside := box[1] or _in_braces(text[box.end() :])) is not None]


def _in_braces(text: str) -> str | None:
    """What stands in the braces with which the text begins; None if they do not close. `\\{` and `\\}` are signs of the text."""
    depth = 0
    for sign in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(sign[0], 0)
        if depth == 0:
            return text[1 : sign.start()]
    return None


def behind_thinking(completion: str, begun: bool = False) -> str:
    """What a model says once it has thought, as far as `</think>`: nothing where it has not come that far.

    Args:
      begun: whether its thinking began in the prompt.
    """
    _, end, answer = completion.rpartition("</think>")
    begun = begun or completion.lstrip().startswith("<think>")
    return answer if end or not begun else ""


def whole(text: str) -> str | None:
    """All of it, without white space around it; None where nothing is left."""
    return text.strip() or None


# What a completion says, and what an answer to score by has to say.
ANSWER: Mapping[Match, Callable[[str], str | None]] = {
    "number": number,
    "choice": choice,
    "formula": formula,
    "text": whole,
}
EXPECTED: Mapping[Match, Callable[[str], str | None]] = {**ANSWER, "number": only_number, "formula": only_formula}
