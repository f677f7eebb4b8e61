"""Code imports slow packages only if it needs them, because each job and each parsed Snakefile waits for imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedpipe.core import callbacks
from fedpipe.planning import planner
from tests import small_studies as studies

#: Code, and packages that it must not import
SLOW_IMPORTS = {
    "version": (
        "from fedpipe.cli.app import app; app(['--version'], standalone_mode=False)",
        {"dvc", "matplotlib", "pandas", "pydantic", "snakemake", "torch"},
    ),
    "plan": (
        "from pathlib import Path; from fedpipe.planning.plan import Plan; Plan.read(Path('results/plan.json'))",
        {"numpy", "pandas", "torch", "yaml"},
    ),
    "dag": (
        "import snakemake.io; before = {*sys.modules}; import fedpipe.workflow.dag",
        {"numpy", "pandas", "pyarrow", "torch"},
    ),
    "partition": (
        "import fedpipe.data.store, fedpipe.data.assignment, fedpipe.data.heterogeneity",
        {"sklearn", "torch"},
    ),
    "disabled-trackers": ("import fedpipe.cli.stages, fedpipe.report.callback_list", {*callbacks.TRACKERS}),
}


@pytest.mark.parametrize(("code", "packages"), SLOW_IMPORTS.values(), ids=SLOW_IMPORTS)
def test_code_imports_no_slow_packages(code: str, packages: set[str], in_empty_folder: Path) -> None:
    studies.write(studies.settings(), in_empty_folder)
    planner.write_plan(planner.make_plan())
    program = f"import sys; before = set(); {code}; print(*{packages} & ({{*sys.modules}} - before))"
    environment = os.environ | {"PYTHONPATH": str(studies.ROOT)}
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == ""
