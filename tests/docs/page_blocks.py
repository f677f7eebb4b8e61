"""Blocks of code and commands in README.md and other pages."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GENERATED = {"algorithms", "cli", "datasets", "models", "partitions", "settings"}  #: pages of `fedpipe docs`
PAGES = (
    *("README.md", "CONTRIBUTING.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in GENERATED),
)
LISTINGS = ("Files and folders",)  #: sections with indented blocks that are not commands


class Block(NamedTuple):
    section: str  #: the heading above the block
    language: str  #: language of the fence, or empty if the block is indented
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """Return the fenced and indented blocks of a page, in order."""
    page_blocks: list[Block] = []
    section, fence, previous_line = "", None, ""
    for line in read(page).splitlines():
        if fence is not None:
            if line == "```":
                fence = None
            else:
                fence.lines.append(line)
        elif line.startswith("```"):
            fence = Block(section, line.removeprefix("```"), [])
            page_blocks.append(fence)
        elif line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("    "):
            if not previous_line.startswith("    "):
                page_blocks.append(Block(section, "", []))
            page_blocks[-1].lines.append(line[4:])
        previous_line = line
    assert fence is None, f"{page}: a code block has no end"
    return page_blocks


def commands(page: str) -> list[str]:
    """Return the commands of a page in order, without the comments after them."""
    shell = [block for block in blocks(page) if block.language in {"", "sh"} and block.section not in LISTINGS]
    return [re.split(r"\s{2,}#", line)[0] for block in shell for line in block.lines]


def inline(page: str, program: str) -> list[str]:
    """Return the calls of a program between backticks in the text of a page."""
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)
    return re.findall(rf"`({program} [^`]+)`", text)
