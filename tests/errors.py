"""Check the message of an error."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedpipe.core.errors import SettingsError, UserError


@contextmanager
def rejects(outline: str, kind: type[UserError] = SettingsError) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Require an error of one line that begins with the outline, in which `` ... `` matches any words."""
    with pytest.raises(kind) as error:
        yield error
    message = str(error.value)
    assert re.fullmatch(".*".join(map(re.escape, outline.split(" ... "))) + ".*", message), message
