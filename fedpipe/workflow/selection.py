"""The studies that one call of Snakemake runs, and their plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from snakemake.shell import shell

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.layout import (
    FULL_PRESET,
    PARAMS,
    StudyFiles,
    list_studies_without_readings,
    normalize_study_path,
)
from fedpipe.planning import freshness
from fedpipe.planning.combined import CombinedPlan
from fedpipe.planning.plan import Plan


@dataclass(frozen=True)
class StudySelection:
    """The studies that one call of Snakemake runs: one study, or all studies in a folder together."""

    params: Path  #: the study's file, or the folder
    preset: str = FULL_PRESET

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StudySelection:
        """Read the selection from `--config` and `--configfile`. Other keys would silently have no effect.

        Raises a SettingsError if they contain other keys.
        """
        if unknown_keys := [key for key in config if key not in ("params", "preset")]:
            keys = ", ".join(f"'{key}'" for key in unknown_keys)
            raise SettingsError(
                f"{keys} in --config or --configfile would have no effect. Set them in params.yaml, or in another "
                "study's file that you select with --config params=studies/NAME.yaml."
            )
        params = normalize_study_path(Path(str(config.get("params", PARAMS))))
        return cls(params, str(config.get("preset", FULL_PRESET)))

    @cached_property
    def is_folder(self) -> bool:
        """Whether all studies in a folder are run."""
        return self.params.is_dir()

    @cached_property
    def studies(self) -> dict[Path, StudyFiles]:
        """The files of each study.

        Raises a SettingsError if the folder contains no study, or a study has an invalid path.
        """
        return {path: StudyFiles.from_params(path, self.preset) for path in list_studies_without_readings(self.params)}

    def needs_planning(self, is_main_process: bool) -> bool:
        """Whether a study has to be planned. In the process of a job, only if it has no plan.

        The studies of a folder are always planned, because missing data may be available now.
        """
        if not is_main_process:
            return not all(files.plan.is_file() for files in self.studies.values())
        return self.is_folder or any(freshness.needs_planning(path, self.preset) for path in self.studies)

    def write_plans(self) -> None:
        """Plan all studies in a separate process, because planning imports torch. The job server forks it, if possible.

        If a study can't be planned, the reason is printed, and Snakemake ends.
        """
        try:
            shell(
                "fedpipe plan --params {params:q} --preset {preset:q} > /dev/null",
                params=str(self.params),
                preset=self.preset,
                resources={"tmpdir": tempfile.gettempdir()},  # the environment of jobs, see fedpipe/cli/job_server.py
            )
        except subprocess.CalledProcessError:
            sys.exit(2)

    def read_plans(self) -> CombinedPlan:
        """Read the plans of all studies. For a folder, omit runs whose data or weights are missing."""
        unavailable_runs: set[str] = set()
        for files in self.studies.values() if self.is_folder else ():
            with suppress(FileNotFoundError):
                unavailable_runs.update(json.loads(files.unavailable_runs.read_text()))
        return CombinedPlan(
            tuple(Plan.read(files.plan) for files in self.studies.values()), frozenset(unavailable_runs)
        )


def require_importable_folder(folder: Path) -> None:
    """Reject a folder that jobs can't import code from: it is in PYTHONPATH, which is split at colons."""
    if os.pathsep in str(folder):
        raise SettingsError(
            f"{folder}: '{os.pathsep}' can't be part of the path of a study's folder, because jobs would import other "
            "code. Rename the folder."
        )
