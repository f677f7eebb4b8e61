r"""Equations of docstrings for a terminal: LaTeX as the plain text nearest to it, ``\theta_k^{t+1}`` as θₖᵗ⁺¹."""

from __future__ import annotations

import re
import unicodedata

NAMES = {
    "leftarrow": "←",
    "rightarrow": "→",
    "to": "→",
    "sum": "Σ",
    "prod": "Π",
    "nabla": "∇",
    "in": "∈",
    "le": "≤",
    "ge": "≥",
    "ne": "≠",
    "approx": "≈",
    "sim": "~",
    "propto": "∝",
    "times": "×",
    "cdot": "·",
    "odot": "⊙",
    "pm": "±",
    "infty": "∞",
    "ell": "ℓ",
    "jmath": "j",
    "ldots": "…",
    "dots": "…",
    "lVert": "‖",
    "rVert": "‖",
    "Vert": "‖",
    "lvert": "|",
    "rvert": "|",
    "mid": "|",
    "langle": "⟨",
    "rangle": "⟩",
    "lfloor": "⌊",
    "rfloor": "⌋",
    "lceil": "⌈",
    "rceil": "⌉",
    "quad": "  ",
    "qquad": "    ",
    "{": "{",
    "}": "}",
    "\\": "\n",
    ",": " ",
    ";": " ",
    ":": " ",
    " ": " ",
    "!": "",
}
LEFT_OUT = {"Bigl", "Bigr", "bigl", "bigr", "Big", "big", "left", "right", "displaystyle", "limits"}
ACCENTS = {"tilde": "\u0303", "hat": "\u0302", "bar": "\u0304"}
WORDS = {"min", "max", "arg", "log", "exp", "cos", "sin", "softmax"}  #: functions, which stand off from their arguments
UP = dict(
    zip("0123456789+-=()abcdefghijklmnoprstuvwxyzTNK*⊤'", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀᴺᴷ*ᵀ'", strict=True)
)
DOWN = dict(zip("0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True))
TOKEN = re.compile(r"\\([a-zA-Z]+|.)|([{}_^&])|(\s+)|(.)", re.S)


def plain(text: str) -> str:
    """A docstring with its equations in plain text; displayed ones stand on lines of their own."""

    def displayed(found: re.Match[str]) -> str:
        lines = [line.strip() for line in equation(found[1]).splitlines()]
        return "\n".join(f"    {line}" for line in lines if line) + "\n\n"

    text = re.sub(r"^ *\.\. math::((?: .*)?\n(?:(?:[ \t]+\S.*)?(?:\n|\Z))*)", displayed, f"{text}\n", flags=re.M)
    text = re.sub(r":math:`([^`]+)`", lambda found: " ".join(equation(found[1]).split()), text)
    return re.sub(r"(?::\w+:)?`~?([^`\s][^`]*)`(?!`)", r"`\1`", text).rstrip("\n")


def equation(tex: str) -> str:
    """An equation in plain text."""
    made, _ = _sequence(list(TOKEN.finditer(tex)), 0, whole=True)
    made = re.sub(r" {4,}", "\t", made)  # what sets formulas apart
    return re.sub(r" *\n *", "\n", re.sub(r" +", " ", made).replace("\t", "    "))


def _sequence(tokens: list[re.Match[str]], place: int, whole: bool) -> tuple[str, int]:
    """What stands up to the closing brace, or to the end, and where that is."""
    made: list[str] = []
    while place < len(tokens):
        if tokens[place][2] == "}" and not whole:
            return "".join(made), place + 1
        part, place = _one(tokens, place)
        made.append(part)
    return "".join(made), place


def _one(tokens: list[re.Match[str]], place: int) -> tuple[str, int]:
    """One symbol, group or command with its arguments."""
    command, sign, space, character = tokens[place].groups()
    place += 1
    if space:
        return " ", place
    if character:
        return character, place
    if sign == "{":
        return _sequence(tokens, place, whole=False)
    if sign in {"_", "^"}:
        inside, place = _argument(tokens, place)
        return _shifted(sign, inside), place
    if sign:  # an alignment, or a brace too many
        return "", place
    if command in LEFT_OUT:
        return "", place
    if command in {"frac", "tfrac", "dfrac"}:
        above, place = _argument(tokens, place)
        below, place = _argument(tokens, place)
        return f"{_bracketed(above)}/{_bracketed(below)}", place
    if command == "sqrt":
        inside, place = _argument(tokens, place)
        return f"√{_bracketed(inside)}", place
    if command in ACCENTS:
        inside, place = _argument(tokens, place)
        return unicodedata.normalize("NFC", inside[:1] + ACCENTS[command] + inside[1:]), place
    if command in {"mathrm", "text", "mathbf", "mathcal", "operatorname"}:
        return _argument(tokens, place)
    if command == "mathbb":
        inside, place = _argument(tokens, place)
        return {"R": "ℝ", "E": "𝔼", "1": "𝟙"}.get(inside, inside), place
    if command in NAMES:
        return NAMES[command], place
    if command in WORDS:
        return command, place
    kind = "CAPITAL" if command[0].isupper() else "SMALL"
    try:
        letter = {"lambda": "lamda", "Lambda": "lamda"}.get(command, command)
        return unicodedata.lookup(f"GREEK {kind} LETTER {letter.upper()}"), place
    except KeyError:
        return command, place


def _argument(tokens: list[re.Match[str]], place: int) -> tuple[str, int]:
    while place < len(tokens) and tokens[place][3]:
        place += 1
    return _one(tokens, place) if place < len(tokens) else ("", place)


def _shifted(sign: str, inside: str) -> str:
    """An index or exponent: as small letters where there are all of them."""
    letters, inside = UP if sign == "^" else DOWN, inside.strip()
    small = inside.replace(" ", "")
    if all(letter in letters for letter in small):
        return "".join(letters[letter] for letter in small)
    return f"{sign}{inside}" if re.fullmatch(r"\w+|.", inside) else f"{sign}({inside})"


def _bracketed(text: str) -> str:
    text = text.strip()
    return text if re.fullmatch(r"[\w\u0300-\u036f₀-ₜ⁰-ⁿ]+", text) else f"({text})"
