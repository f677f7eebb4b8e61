from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_empty_folder(in_empty_folder: Path) -> Path:
    return in_empty_folder
