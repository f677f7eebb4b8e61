"""What pyproject.toml can't say: a wheel holds the files of a project, which stand in the root of the clone."""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROJECT = runpy.run_path(str(ROOT / "fedpipe/cli/scaffold/project.py"))


class WithProject(build_py):
    """Copies them into the package, so that `fedpipe init` finds them wherever it is installed."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "fedpipe" / PROJECT["BUNDLE_FOLDER"]
        shutil.rmtree(target, ignore_errors=True)
        for name in PROJECT["list_project_files"](ROOT):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


setup(cmdclass={"build_py": WithProject})
