r"""Renders LaTeX equations of docstrings as plain text for a terminal, such as ``\theta_k^{t+1}`` as θₖᵗ⁺¹."""

from __future__ import annotations

import re
import unicodedata
from html.entities import html5

#: Symbols that HTML names otherwise or does not have, and functions whose names mean symbols in HTML.
SYMBOLS = {
    "to": "→",
    "sum": "Σ",
    "prod": "Π",
    "sim": "~",
    "cdot": "·",
    "infty": "∞",
    "jmath": "j",
    "ldots": "…",
    "dots": "…",
    "lVert": "‖",
    "rVert": "‖",
    "lvert": "|",
    "rvert": "|",
    "mid": "|",
    "sup": "sup",
    "Pr": "Pr",
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
IGNORED_COMMANDS = {"Bigl", "Bigr", "bigl", "bigr", "Big", "big", "left", "right", "displaystyle", "limits"}
ACCENTS = {"tilde": "\u0303", "hat": "\u0302", "bar": "\u0304"}
SUPERSCRIPTS = dict(
    zip("0123456789+-=()abcdefghijklmnoprstuvwxyzTNK*⊤'", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀᴺᴷ*ᵀ'", strict=True)
)
SUBSCRIPTS = dict(zip("0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True))
TOKEN_PATTERN = re.compile(r"\\([a-zA-Z]+|.)|([{}_^&])|(\s+)|(.)", re.S)


def render_docstring_equations(text: str) -> str:
    """Render a docstring with its equations as plain text, displayed equations on separate lines."""

    def render_displayed_equation(match: re.Match[str]) -> str:
        lines = [line.strip() for line in render_equation(match[1]).splitlines()]
        return "\n".join(f"    {line}" for line in lines if line) + "\n\n"

    text = re.sub(
        r"^ *\.\. math::((?: .*)?\n(?:(?:[ \t]+\S.*)?(?:\n|\Z))*)", render_displayed_equation, f"{text}\n", flags=re.M
    )
    text = re.sub(r":math:`([^`]+)`", lambda match: " ".join(render_equation(match[1]).split()), text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return re.sub(r"(?::\w+:)?`~?([^`\s][^`]*)`(?!`)", r"`\1`", text).rstrip("\n")


def render_equation(tex: str) -> str:
    """Render an equation as plain text."""
    text, _ = _parse_tex_sequence(list(TOKEN_PATTERN.finditer(tex)), 0, is_top_level=True)
    text = re.sub(r" {4,}", "\t", text)  # wide spaces separate formulas
    return re.sub(r" *\n *", "\n", re.sub(r" +", " ", text).replace("\t", "    "))


def _parse_tex_sequence(tokens: list[re.Match[str]], position: int, is_top_level: bool) -> tuple[str, int]:
    """Parse up to the closing brace or the end. Return the text and the position."""
    parts: list[str] = []
    while position < len(tokens):
        if tokens[position][2] == "}" and not is_top_level:
            return "".join(parts), position + 1
        part, position = _parse_tex_token(tokens, position)
        parts.append(part)
    return "".join(parts), position


def _parse_tex_token(tokens: list[re.Match[str]], position: int) -> tuple[str, int]:
    """Parse one symbol, group, or command with its arguments."""
    command, sign, space, character = tokens[position].groups()
    position += 1
    if space:
        return " ", position
    if character:
        return character, position
    if sign == "{":
        return _parse_tex_sequence(tokens, position, is_top_level=False)
    if sign in {"_", "^"}:
        argument, position = _parse_tex_argument(tokens, position)
        return _format_sub_or_superscript(sign, argument), position
    if sign:  # an alignment sign or an extra brace
        return "", position
    if command in IGNORED_COMMANDS:
        return "", position
    if command in {"frac", "tfrac", "dfrac"}:
        numerator, position = _parse_tex_argument(tokens, position)
        denominator, position = _parse_tex_argument(tokens, position)
        return f"{_add_parentheses(numerator)}/{_add_parentheses(denominator)}", position
    if command == "sqrt":
        argument, position = _parse_tex_argument(tokens, position)
        return f"√{_add_parentheses(argument)}", position
    if command in ACCENTS:
        argument, position = _parse_tex_argument(tokens, position)
        return unicodedata.normalize("NFC", argument[:1] + ACCENTS[command] + argument[1:]), position
    if command in {"mathrm", "text", "mathbf", "mathcal", "operatorname"}:
        return _parse_tex_argument(tokens, position)
    if command == "mathbb":
        argument, position = _parse_tex_argument(tokens, position)
        return {"R": "ℝ", "E": "𝔼", "1": "𝟙"}.get(argument, argument), position
    return SYMBOLS.get(command, html5.get(f"{command};", command)), position


def _parse_tex_argument(tokens: list[re.Match[str]], position: int) -> tuple[str, int]:
    while position < len(tokens) and tokens[position][3]:
        position += 1
    return _parse_tex_token(tokens, position) if position < len(tokens) else ("", position)


def _format_sub_or_superscript(sign: str, argument: str) -> str:
    """Format an index or exponent, with Unicode letters if all of them exist."""
    letters, argument = SUPERSCRIPTS if sign == "^" else SUBSCRIPTS, argument.strip()
    compact = argument.replace(" ", "")
    if all(letter in letters for letter in compact):
        return "".join(letters[letter] for letter in compact)
    return f"{sign}{argument}" if re.fullmatch(r"\w+|.", argument) else f"{sign}({argument})"


def _add_parentheses(text: str) -> str:
    text = text.strip()
    return text if re.fullmatch(r"[\w\u0300-\u036f₀-ₜ⁰-ⁿ]+", text) else f"({text})"
