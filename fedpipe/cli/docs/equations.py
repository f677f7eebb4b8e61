r"""Renders LaTeX equations of docstrings as plain text for a terminal, such as ``\theta_k^{t+1}`` as θₖᵗ⁺¹."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from html.entities import html5

#: Symbols that HTML names otherwise or does not have, and functions whose names mean symbols in HTML.
SYMBOLS = {
    **{"to": "→", "sum": "Σ", "prod": "Π", "sim": "~", "cdot": "·", "infty": "∞", "ldots": "…", "dots": "…"},
    **{"lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "mid": "|", "{": "{", "}": "}"},
    **{"jmath": "j", "sup": "sup", "Pr": "Pr"},
    **{"quad": "  ", "qquad": "    ", "\\": "\n", ",": " ", ";": " ", ":": " ", " ": " ", "!": ""},
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
    text = _render_tex_sequence(deque(TOKEN_PATTERN.finditer(tex)), is_group=False)
    text = re.sub(r" {4,}", "\t", text)  # wide spaces separate formulas
    return re.sub(r" *\n *", "\n", re.sub(r" +", " ", text).replace("\t", "    "))


def _render_tex_sequence(tokens: deque[re.Match[str]], is_group: bool) -> str:
    """Take all tokens from a queue, or those up to the closing brace of a group, and render them."""
    parts: list[str] = []
    while tokens:
        if is_group and tokens[0][2] == "}":
            tokens.popleft()
            break
        parts.append(_render_tex_token(tokens))
    return "".join(parts)


def _render_tex_token(tokens: deque[re.Match[str]]) -> str:
    """Take one symbol, group, or command with its arguments from a queue, and render it."""
    command, sign, space, character = tokens.popleft().groups()
    if space:
        return " "
    if character:
        return str(character)
    if sign == "{":
        return _render_tex_sequence(tokens, is_group=True)
    if sign in {"_", "^"}:
        return _format_sub_or_superscript(sign, _render_tex_argument(tokens))
    if sign or command in IGNORED_COMMANDS:  # the sign is an alignment sign or an extra brace
        return ""
    if command in {"frac", "tfrac", "dfrac"}:
        numerator, denominator = _render_tex_argument(tokens), _render_tex_argument(tokens)
        return f"{_add_parentheses(numerator)}/{_add_parentheses(denominator)}"
    if command == "sqrt":
        return f"√{_add_parentheses(_render_tex_argument(tokens))}"
    if command in ACCENTS:
        argument = _render_tex_argument(tokens)
        return unicodedata.normalize("NFC", argument[:1] + ACCENTS[command] + argument[1:])
    if command in {"mathrm", "text", "mathbf", "mathcal", "operatorname"}:
        return _render_tex_argument(tokens)
    if command == "mathbb":
        argument = _render_tex_argument(tokens)
        return {"R": "ℝ", "E": "𝔼", "1": "𝟙"}.get(argument, argument)
    return SYMBOLS.get(command, html5.get(f"{command};", command))


def _render_tex_argument(tokens: deque[re.Match[str]]) -> str:
    while tokens and tokens[0][3]:  # a space
        tokens.popleft()
    return _render_tex_token(tokens) if tokens else ""


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
