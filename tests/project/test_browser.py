"""Tests do not wait forever for a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import browser


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Any]:
    if not browser.BROWSER:
        pytest.skip("needs Chromium")
    chromium = browser.Browser(tmp_path)
    yield chromium
    chromium.close()


def test_crashed_page_is_error(chromium: Any) -> None:
    with pytest.raises(AssertionError, match="the page has crashed"):
        chromium("Page.crash")


def test_page_without_answer_is_error(chromium: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match=r"the browser sent nothing for 0\.5 s"):
        chromium("Runtime.evaluate", expression="new Promise(() => null)", awaitPromise=True)
