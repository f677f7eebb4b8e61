"""Docstrings, comments, messages and pages follow the language rules of CONTRIBUTING.md."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import messages
from tests.docs.page_blocks import PAGES
from tests.small_studies import ROOT

PACKAGE = ROOT / "fedpipe"
#: Phrases that the rules ban, each with what to write.
BANNED = {
    r"of (?:your|its|their|one's) own": "custom, or your",
    r"\banew\b": "recomputed",
    r"\b(?:lies|tells|told|says|stands)\b": "is in, contains, shows, prints",
    r"\bgoes on\b": "resumes, continues",
    r"\bin place of\b": "instead of",
    r"\bbut for\b": "except",
    r"\bbeside\b": "next to",
    r"\bwhat becomes of\b": "a noun",
    r"\bprint's\b": "reported",
    r"\bhence\b": "so",
    r"\bnobody\b": "a sentence about what happens",
    r"\bit should\b": "Use ..., or: It must ...",
}
#: Words without a subject, and verbs for people, in the names of tests.
BANNED_IN_NAMES = re.compile(
    r"_(?:what|who|whom|whoever|nobody|told|tells|said|says|lies|stands|refuses|refused)(?:_|$)"
)
SEMICOLONS_PER_1000_WORDS = 2
FOLDERS = [*sorted(f"fedpipe/{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")), "benchmarks", "tests"]
#: The docstrings of the other generated pages are tested.
WRITTEN_PAGES = [*PAGES, "docs/cli.md", "benchmarks/RESULTS.md"]


def read_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment, docstring and message of a module. A message has the line 0."""
    source = path.read_text()
    tree = ast.parse(source)
    yield from ((0, message) for message in messages.find_messages(tree))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            yield node.body[0].lineno, ast.get_docstring(node) or ""


def strip_code(text: str) -> str:
    return re.sub(r"``[^`]*``|`[^`]*`|\.\. math::.*?(?:\n\n|$)|:math:`[^`]*`", "", text, flags=re.S)


def require_few_semicolons(text: str) -> None:
    semicolons, words = len(re.findall(r";(?=\s)", text)), len(text.split())
    assert semicolons * 1000 <= SEMICOLONS_PER_1000_WORDS * words, f"{semicolons} in {words} words"


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_has_no_banned_phrase_and_few_semicolons(folder: str) -> None:
    """Print each match with its position and a better word."""
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    prose = [(path, line, strip_code(text)) for path in paths for line, text in read_prose(path)]
    problems = [
        f"{path.relative_to(ROOT)}:{line}: '{match.group(0)}' -> {advice}"
        for path, line, text in prose
        for pattern, advice in BANNED.items()
        for match in re.finditer(pattern, text, re.I)
    ]
    assert problems == []
    if folder.startswith("fedpipe"):
        require_few_semicolons("\n".join(text for _, _, text in prose))


def test_names_of_tests_have_no_banned_word() -> None:
    names = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert len(names) > 1000
    assert sorted(name for name in names if BANNED_IN_NAMES.search(name)) == []


def read_page(page: str) -> str:
    """Read the prose of a page, without code."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    return strip_code(re.sub(r"^ {4}.*$", "", text, flags=re.M))


@pytest.mark.parametrize("page", WRITTEN_PAGES)
def test_pages_have_no_banned_phrase_and_few_semicolons(page: str) -> None:
    text = read_page(page)
    assert [match.group(0) for pattern in BANNED for match in re.finditer(pattern, text, re.I)] == []
    require_few_semicolons(text)


def test_golden_file_contains_all_messages() -> None:
    """If this fails, run ``python tests/docs/messages.py`` and read the difference."""
    assert messages.GOLDEN.read_text() == messages.render_messages()
