"""The commit of the code, from git. Everything is empty outside of a repository."""

from __future__ import annotations

import subprocess

#: Code on which runs depend: packages of fedpipe, and custom modules next to the studies.
RUN_CODE = (
    *(f"fedpipe/{name}" for name in ("algorithms", "core", "data", "engine", "models", "planning", "settings")),
    ":(glob)*.py",
)


def run_git(*words: str) -> str:
    """The output of git. Empty outside of a repository."""
    try:
        result = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def read_code_commit() -> str:
    """The current commit. It ends with ``-dirty`` if code on which runs depend is not committed."""
    commit = run_git("rev-parse", "--short=10", "HEAD")
    return f"{commit}-dirty" if commit and run_git("status", "--porcelain", "--", *RUN_CODE) else commit
