"""What README.md and other pages show: blocks of code, and the commands in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "docs/dvc.md", "docs/cluster.md", "docs/pfllib.md", "docs/callbacks.md"),
    *("docs/studies.md", "docs/papers.md", "docs/tutorial.md", "docs/python.md", "docs/architecture.md"),
    *("docs/install.md", "docs/protocols.md", "docs/diagnostics.md", "docs/own-model.md", "docs/own-algorithm.md"),
)
LISTINGS = ("Where things lie",)  #: sections whose indented blocks are no commands


class Block(NamedTuple):
    section: str  #: the heading above it
    language: str  #: as its fence says; empty where it is indented
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """The fenced and indented blocks of a page, in order."""
    found: list[Block] = []
    section, fence, above = "", None, ""
    for line in read(page).splitlines():
        if fence is not None:
            if line == "```":
                fence = None
            else:
                fence.lines.append(line)
        elif line.startswith("```"):
            fence = Block(section, line.removeprefix("```"), [])
            found.append(fence)
        elif line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("    "):
            if not above.startswith("    "):
                found.append(Block(section, "", []))
            found[-1].lines.append(line[4:])
        above = line
    assert fence is None, f"{page}: a fence is open"
    return found


def commands(page: str) -> list[str]:
    """The lines that a page asks to type, in order, without the comments behind them."""
    shell = [block for block in blocks(page) if block.language in {"", "sh"} and block.section not in LISTINGS]
    return [re.split(r"\s{2,}#", line)[0] for block in shell for line in block.lines]


def inline(page: str, program: str) -> list[str]:
    """The calls of a program in a page's running text, between backquotes."""
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)
    return re.findall(rf"`({program} [^`]+)`", text)
