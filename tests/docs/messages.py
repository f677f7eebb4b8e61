"""All messages of the package in one file, tests/docs/messages.txt, which you can review as prose.

    python tests/docs/messages.py        # after you changed a message; then read `git diff tests/docs/messages.txt`

A message is a text in the code of a function or setting with at least three words in a row: errors, warnings, help
texts, descriptions of settings, captions and printed lines. Docstrings are not messages.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_suffix(".txt")
PROSE = re.compile(r"(?:^|[ (])(?:[A-Za-z][\w'-]*[,:]? ){2}[A-Za-z]")  #: three words in a row


def render_text(node: ast.expr) -> str | None:
    """Return the text of a string, an f-string or their sum, with expressions in braces. None for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = render_text(node.left), render_text(node.right)
        return "".join(side or "{...}" for side in sides) if any(sides) else None
    return None


def find_messages(node: ast.AST) -> Iterator[str]:
    """Yield the messages below a node, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        text = render_text(child) if isinstance(child, ast.expr) else None
        if text is None:
            yield from find_messages(child)
        elif PROSE.search(text) and not text.lstrip().startswith(("<", "^")):  # neither HTML nor a regular expression
            yield " ".join(text.split())


def read_messages(path: Path) -> list[str]:
    """Return the different messages of a module."""
    return list(dict.fromkeys(find_messages(ast.parse(path.read_text()))))


def render_messages() -> str:
    """Return all messages, one per line, under the names of their modules."""
    paths = sorted((ROOT / "fedpipe").rglob("*.py"))
    pages = [(path.relative_to(ROOT).as_posix(), read_messages(path)) for path in paths]
    return "\n".join("\n".join([name, *(f"    {line}" for line in lines), ""]) for name, lines in pages if lines)


if __name__ == "__main__":
    GOLDEN.write_text(render_messages())
