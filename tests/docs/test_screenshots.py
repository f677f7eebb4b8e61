"""The program that takes the screenshots of the docs, with a short study."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.page_blocks import ROOT

IMAGES = ROOT / "docs/images"
NAMES = ("status-page", "status-terminal", "snakemake-report", "dvc-plots", "papers-page")


@pytest.mark.slow
def test_screenshot_program_writes_all_images_of_docs(tmp_path: Path) -> None:
    program = [sys.executable, IMAGES / "take_screenshots.py", tmp_path, "--rounds", "2"]
    result = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert {path.stem for path in tmp_path.glob("*.png")} == set(NAMES)
    for name in NAMES:
        image, stored = Image.open(tmp_path / f"{name}.png"), Image.open(IMAGES / f"{name}.png")
        assert image.size[0] == stored.size[0]
        assert len(set(image.convert("L").getdata())) > 20, "the image is not blank"


@pytest.mark.parametrize("name", NAMES)
def test_screenshot_is_small_and_on_a_page(name: str) -> None:
    assert (IMAGES / f"{name}.png").stat().st_size < 150_000
    assert any(f"(images/{name}.png)" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
