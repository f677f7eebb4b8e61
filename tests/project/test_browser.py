"""Tests do not wait forever for a page."""

from typing import Any

import pytest

from tests import browser as browser_module


def test_page_that_is_silent_or_crashes_is_error(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_module, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match=r"the browser sent nothing for 0\.5 s"):
        browser("Runtime.evaluate", expression="new Promise(() => null)", awaitPromise=True)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="the page has crashed"):
        browser("Page.crash")
