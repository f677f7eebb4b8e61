"""docs/studies.md: each study is planned."""

from pathlib import Path

import pytest

from fedpipe.planning import planner
from tests.docs.page_blocks import Block, blocks

STUDIES = [block for block in blocks("docs/studies.md") if block.language == "yaml"]


@pytest.mark.parametrize("block", STUDIES, ids=[f"block-{number}" for number in range(len(STUDIES))])
def test_study_of_studies_page_is_planned(block: Block, in_empty_folder: Path) -> None:
    Path("params.yaml").write_text(block.text)
    assert planner.make_plan(Path("params.yaml")).runs
