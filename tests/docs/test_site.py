"""The site that `make docs-site` builds from the documentation has all pages and valid links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import small_studies as studies

pytestmark = pytest.mark.slow


def build_site(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of the Makefile with another folder for the site."""
    recipe = re.search(r"^docs-site: setup\n\t(.*) site$", (folder / "Makefile").read_text(), flags=re.M)
    assert recipe
    program, *arguments = recipe[1].split()
    command = [sys.executable, "-m", {"sphinx-build": "sphinx"}[program], *arguments, str(site)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_docs_index_links_to_all_pages_and_valid_headings() -> None:
    """Sphinx does not build docs/README.md, because the site has its own table of contents."""
    docs = studies.ROOT / "docs"
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", (docs / "README.md").read_text())
    assert {path.name for path in docs.glob("*.md")} - {"README.md"} <= {name for name, _ in links}
    for name, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (docs / name).read_text(), flags=re.M)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{name}#{anchor}"


def test_site_has_all_pages_and_rejects_broken_links(tmp_path: Path) -> None:
    folder = studies.copy_project(tmp_path / "clone")
    result = build_site(folder, tmp_path / "site")
    assert (result.returncode, result.stderr) == (0, "")
    first = (tmp_path / "site/index.html").read_text()
    for page in set((folder / "docs").glob("*.md")) - {folder / "docs/README.md"}:
        assert (tmp_path / f"site/docs/{page.stem}.html").is_file()
        assert f'href="docs/{page.stem}.html"' in first, f"{page.name} is not in the table of contents"
    python = (tmp_path / "site/docs/python.html").read_text()
    for name in (
        "fedpipe.load",
        "fedpipe.analysis.load.Results.to_target",
        "fedpipe.algorithms.base.Algorithm.local_passes",
    ):
        assert f'id="{name}"' in python
    papers = (tmp_path / "site/docs/papers.html").read_text()
    linked = set(re.findall(r'href="(papers/[^"]+\.html)"', papers))
    reduced = {f"papers/reduced/{path.name}" for path in folder.glob("docs/papers/reduced/*.html")}
    assert len(reduced) == 5
    assert linked >= {*reduced, "papers/full/index.html"}
    assert all((tmp_path / "site/docs" / page).is_file() for page in linked)
    assert "$`" not in (tmp_path / "site/docs/algorithms.html").read_text(), "GitHub's mathematics remains"

    page = folder / "docs/studies.md"
    page.write_text(page.read_text() + "\n[no such page](none.md), [no such part](dvc.md#none)\n")
    broken = build_site(folder, tmp_path / "site")
    assert broken.returncode == 1
    assert "none.md" in broken.stderr
    assert "dvc.md#none" in broken.stderr or "'none'" in broken.stderr
