"""License, citation and versions in the files of the repository agree with the package."""

import hashlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedpipe
from tests.docs.page_blocks import ROOT, read

PROJECT = tomllib.loads(read("pyproject.toml"))["project"]
CITATION = yaml.safe_load(read("CITATION.cff"))
VERSIONS = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", read("CHANGELOG.md"), flags=re.M)


def test_version_is_equal_in_all_files() -> None:
    version_text = subprocess.run(
        [sys.executable, "-m", "fedpipe", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert version_text == f"fedpipe {fedpipe.__version__}\n"
    assert {PROJECT["version"], CITATION["version"], VERSIONS[0]} == {fedpipe.__version__}


def test_every_dependency_has_version_or_lower_bound_below_locked_one() -> None:
    """Without a bound pip keeps an older version of the user's environment, with which fedpipe may not even start."""
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", read("requirements.lock"), flags=re.M))
    extras = PROJECT["optional-dependencies"]
    names = [name for extra in extras if extra != "dev" for name in extras[extra]]
    for requirement in map(Requirement, PROJECT["dependencies"] + names):
        (specifier,) = requirement.specifier
        assert specifier.operator in {"==", ">="}, requirement.name
        version = locked.get(canonicalize_name(requirement.name))
        assert version in requirement.specifier if version else requirement.name == "dvclive"


def test_license_equals_official_apache_text() -> None:
    official = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of apache.org's LICENSE-2.0.txt
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == official
    assert PROJECT["license"] == CITATION["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]


def test_citation_has_required_fields() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type"} <= CITATION.keys()
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert all(isinstance(CITATION[key], str) for key in ("message", "title", "abstract", "version", "license"))


def test_changelog_begins_with_unreleased_section() -> None:
    headings = re.findall(r"^## (.*)$", read("CHANGELOG.md"), flags=re.M)
    assert headings[0] == "[Unreleased]"
    assert len(headings) == 1 + len(VERSIONS)
    parts = re.findall(r"^### (.*)$", read("CHANGELOG.md"), flags=re.M)
    assert set(parts) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_supported_pythons_match_workflow(minor: int) -> None:
    assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]
    assert f"3.{minor}" in read(".github/workflows/ci.yml")
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    assert all("You need Python 3.11 to 3.14, " in read(page) for page in ("README.md", "docs/install.md"))
    assert "/python-3.11%20to%203.14-blue" in read("README.md")
