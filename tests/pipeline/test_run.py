"""`fedpipe run` prints a snakemake command and executes it."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import snakemake
from snakemake.common import NOTHING_TO_BE_DONE_MSG

from snakemake_logger_plugin_fedpipe import read_records
from tests import small_studies as studies
from tests.pipeline.conftest import BIN, ENVIRONMENT, Project, count_jobs

PROFILE = "--profile workflow/profiles/local"
PROGRESS = "--logger-fedpipe-progress"
LOCAL = f"{PROFILE} {PROGRESS}"
ODD = "studies/two words (1).yaml"
SHELL = "a {b} c;touch PWN;'d'\"e\"$f`g`"  #: a folder of these characters
RAISES = """
from fedpipe.algorithms.fedavg import FedAvg


class Broken(FedAvg):
    def loss(self, client, batch):
        raise RuntimeError("as meant")
"""

INTERRUPTS = """
import os
import signal
import time
from pathlib import Path

from fedpipe.algorithms.fedavg import FedAvg


class Interrupted(FedAvg):
    def aggregate(self, server, uploads):
        first, second = Path("first"), Path("second")
        if first.exists() and not second.exists():
            second.touch()
            os.killpg(int(os.environ["GROUP"]), signal.SIGINT)
            while True:  # until the command sends the signal on. signal.pause() would miss a signal just before it
                time.sleep(0.1)
        first.touch()
        return super().aggregate(server, uploads)
"""


def list_segments(project: Project) -> list[Path]:
    return sorted((project.folder / "results/runs").glob("*/*/segments/*.json"))


def test_fedpipe_run_prints_equivalent_snakemake_command(project: Project) -> None:
    project.write(studies.settings(rounds=1), ODD)
    dry = project.capture("fedpipe", "run", "--params", ODD, "-n", "-j", "2", "--quiet", "host")
    assert dry.returncode == 0, dry.stderr
    line = dry.stderr.splitlines()[0]
    assert line == f"snakemake all --config 'params={ODD}' {LOCAL} -n --cores 2 --quiet host"
    assert count_jobs(dry.stdout)["segment"] == 1
    assert not list_segments(project), "-n runs nothing"
    again = project.capture("bash", "-c", line)
    assert count_jobs(again.stdout) == count_jobs(dry.stdout)


@pytest.mark.slow
def test_study_with_space_runs_in_clone_with_shell_characters_in_path(tmp_path: Path) -> None:
    """Run from plan to figures, with a virtual environment in the clone, which is not active.

    Only a complete run suggests a command. A dry run, a single target and a run with nothing to do do not.
    """
    project = Project(studies.copy_project(tmp_path / SHELL))
    (project.folder / ".venv").unlink(missing_ok=True)
    (project.folder / ".venv").symlink_to(sys.prefix)
    project.write(studies.settings(rounds=1), ODD)
    missing = project.capture("fedpipe", "show", "--params", ODD).stderr
    command = shlex.split(missing.split("`")[1])
    assert command == ["fedpipe", "run", "--params", ODD]
    bare = os.pathsep.join(part for part in ENVIRONMENT["PATH"].split(os.pathsep) if part != str(BIN))
    python = str(project.folder / ".venv/bin/python")
    done = project.capture(python, "-m", *command, "-j", "1", "-v", PATH=bare)
    output = done.stderr
    assert done.returncode == 0, output
    snakemake_command = [str(project.folder / ".venv/bin/snakemake"), "all", "--config", f"params={ODD}"]
    assert shlex.split(output.splitlines()[0]) == [*snakemake_command, *PROFILE.split(), "--cores", "1"]
    assert "Provided cores: 1\n" in output.replace(" (use --cores to define parallelism)", ""), "-v prints all"
    assert len(list_segments(project)) == 1
    (line,) = (line for line in output.splitlines() if line.startswith("fedpipe: "))
    table = "results/studies/two words (1)/tables/results.md"
    show = f"fedpipe show --params '{ODD}'"
    assert f"`{show}`" in line
    assert f" {table}," in line
    shown = project.capture(*shlex.split(show))
    assert shown.stdout.startswith((project.folder / table).read_text())
    assert "1 done" in project.fedpipe("status", "--params", ODD)
    assert "are as recorded" in project.fedpipe("verify", "--rerun", "0", "--params", ODD)
    curves = project.folder / table.replace("tables/results.md", "figures/curves.svg")
    curves.unlink()
    other = ("--config", f"params={ODD}", *PROFILE.split())
    part = project.capture("snakemake", str(curves.relative_to(project.folder)), *other)
    assert curves.is_file()
    for done in (
        part,
        project.capture("fedpipe", "run", "--params", ODD),
        project.capture("snakemake", *other, "-n"),
    ):
        assert done.returncode == 0
        assert "fedpipe: " not in done.stderr
    assert "Nothing to be done" in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("PWN*") if path != project.folder]


def run_in_terminal(project: Project, *command: str) -> list[str]:
    """Run a command in a terminal. Return the lines that it prints."""
    code = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    return project.capture(sys.executable, "-c", code, *command).stdout.splitlines()


@pytest.mark.slow
def test_fedpipe_run_prints_one_line_per_job_and_error_in_last_line(project: Project) -> None:
    (project.folder / "own.py").write_text(RAISES)
    study = studies.settings(("broken", "fedavg"), 1, algorithms={"broken": {"algorithm": "own.Broken"}})
    project.write(study)
    planned = project.capture("fedpipe", "run", "-n").stdout.splitlines()
    assert planned[0] == "2 of 2 runs to do, 8 jobs"
    work = sorted(line.split("  ")[1] for line in planned[1:])
    assert work == [
        *("curves", "download digits", "matrices", "partition dirichlet-0.3-seed0"),
        *("partition_figure dirichlet-0.3-seed0", "segment FedAvg seed 0", "segment broken seed 0", "table"),
    ]
    (project.folder / "params.yaml").write_text((project.folder / "params.yaml").read_text() + "\nhonest: 1\n")
    rejected = project.capture("fedpipe", "run")
    assert (rejected.returncode, rejected.stdout) == (2, "")
    assert rejected.stderr.splitlines()[-1].startswith("fedpipe: honest: ")
    (project.folder / "params.yaml").write_text((project.folder / "params.yaml").read_text()[: -len("honest: 1\n")])

    failed = project.capture("fedpipe", "run")
    assert (failed.returncode, failed.stdout) == (1, "")
    lines = failed.stderr.splitlines()
    assert lines[0] == f"snakemake all {LOCAL}"
    assert lines[2] == planned[0]
    assert "failed  segment broken seed 0" in lines
    assert len(count_jobs(failed.stderr)) == 4, "the failed run has no table, curves or matrices"
    assert all(re.fullmatch(r"[1-4] of 8  [\w. -]+ \([\w ,]+\)", line) for line in lines[3:-4] if " of 8 " in line)
    assert len(lines) == 3 + 5 + 4, failed.stderr
    assert lines[-4].endswith("Complete rounds are kept. To continue after them, type the same command again.")
    assert lines[-1].startswith("ERROR segment broken seed 0: own.Broken.loss (own.py, line 7): ")
    assert "as meant" in lines[-1]
    log_of_job = lines[-2].removeprefix("Log of the failed job: ")
    assert "as meant" in (project.folder / log_of_job).read_text()
    complete = (project.folder / lines[-3].removeprefix("1 job failed. Complete log: ")).read_text()
    assert count_jobs(complete)["segment"] == 2
    assert "Error in rule segment" in complete
    row = check_show_of_failed_run(project, project.folder / log_of_job)

    project.edit(study={"algorithms": ["fedavg"]})
    lines = run_in_terminal(project, "fedpipe", "run")
    assert lines[2] == "0 of 1 run to do, 3 jobs"
    assert [line.split(" (")[0] for line in lines[3:-1]] == [
        f"{number} of 3  {line.split('  ')[1].split(' (')[0]}" for number, line in enumerate(lines[3:-1], 1)
    ]
    assert lines[-1].startswith("fedpipe: done. "), lines
    assert row in project.fedpipe("show").splitlines(), "a study without the failed algorithm shows the same row"
    assert run_in_terminal(project, "fedpipe", "run")[2:] == [NOTHING_TO_BE_DONE_MSG]
    verbose = project.capture("fedpipe", "run", "-v", "-n", "--forcerun", "table")
    assert verbose.stderr.splitlines()[0] == f"snakemake all {PROFILE} -n --forcerun table"
    assert "rule table:" in verbose.stdout

    project.edit(study={"algorithms": ["fedavg", "broken"]})
    assert project.capture("fedpipe", "run").returncode == 1
    shown = project.fedpipe("show", check=False)
    assert "PARTIAL" in shown
    assert "results/tables/results.md is outdated, because runs are missing. Type `fedpipe run`" in shown


def check_show_of_failed_run(project: Project, log: Path) -> str:
    """Check that `status` and `show` print the error of the failed run. Return the row of the complete run."""

    def list_written_files() -> list[Path]:
        return sorted(path for path in project.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)

    output = project.fedpipe("status")
    assert "RuntimeError: as meant" in output
    assert "2 runs (1 done, 1 failed)" in output, "an independent run continues"
    before = list_written_files()
    shown = project.fedpipe("show", check=False)
    (row,) = (line for line in shown.splitlines() if line.startswith("| FedAvg"))
    assert ": 2 runs (1 done, 1 failed)" in shown
    assert "| broken" not in shown
    (message,) = (line for line in shown.splitlines() if line.startswith("broken seed 0: segment failed: "))
    assert "(RuntimeError: as meant)" in message
    assert message.endswith(f" ({log.relative_to(project.folder)})")
    last_line = shown.splitlines()[-1]
    assert last_line.startswith("fedpipe: results/tables/results.md is missing")
    assert "`fedpipe run`" in last_line
    assert list_written_files() == before
    return row


@pytest.mark.slow
def test_fedpipe_run_unlocks_folder(project: Project) -> None:
    unlocked = project.capture("fedpipe", "run", "--unlock")
    assert unlocked.returncode == 0
    assert unlocked.stderr.splitlines()[-1] == "Unlocked working directory."


@pytest.mark.slow
def test_ctrl_c_stops_fedpipe_run_and_same_command_resumes(project: Project) -> None:
    """The algorithm sends SIGINT to all processes of the command after its second round, like a terminal."""
    (project.folder / "own.py").write_text(INTERRUPTS)
    study = studies.settings(algorithms={"fedavg": {"algorithm": "own.Interrupted"}}, rounds=3)
    project.write(study)
    command = ("bash", "-c", "GROUP=$$ exec fedpipe run")
    with project.start_command(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        _, errors = running.communicate()
    assert running.returncode == 1, errors
    assert "Terminating processes on user request" in errors
    assert "fedpipe: Snakemake ended before all jobs were done" in errors
    assert "failed" not in errors
    assert "ERROR" not in errors
    stopped = project.fedpipe("status")
    assert stopped.startswith("1 run (1 stopped), 1 of 3 rounds"), stopped
    assert "failed" not in stopped
    (records,) = (project.folder / ".snakemake/fedpipe/jobs").glob("*.jsonl")
    segments = [record for record in read_records(records) if record.get("rule") == "segment"]
    assert [(record["event"], record.get("interrupted")) for record in segments] == [
        ("job_info", None),
        ("job_error", True),
    ]
    project.run("fedpipe", "run")
    assert project.fedpipe("status").startswith("1 run (1 done), 3 of 3 rounds")


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        pytest.param((), f"all {LOCAL}", marks=pytest.mark.slow),
        pytest.param(("-j", "3"), f"all {LOCAL} --cores 3", marks=pytest.mark.slow),
        (("--profile", "slurm", "-j", "3"), f"all --profile slurm {PROGRESS} --jobs 3"),
        pytest.param(
            ("--profile", "workflow/profiles/gpu", "-j3"),
            f"all --profile workflow/profiles/gpu {PROGRESS} --cores 3",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--profile", "a b"), f"all --profile 'a b' {PROGRESS}", marks=pytest.mark.slow),
        (("--jobname", "a; {jobid}"), f"all {LOCAL} --jobname 'a; {{jobid}}'"),
        # The progress would hide what these options print.
        pytest.param(("--lint",), "all --profile workflow/profiles/local --lint", marks=pytest.mark.slow),
        pytest.param(
            ("--report=page.html",), "all --profile workflow/profiles/local --report=page.html", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--set-threads", "segment=2", "-np"), f"all {LOCAL} -n --set-threads segment=2 -p", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--params", "studies/gallery.yaml"),
            f"all --config params=studies/gallery.yaml {LOCAL}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fedpipe_run_converts_options_to_snakemake_command(
    project: Project, arguments: tuple[str, ...], printed: str
) -> None:
    done = project.capture("fedpipe", "run", *arguments, "--version")
    assert (done.returncode, done.stdout) == (0, f"{snakemake.__version__}\n"), done.stderr
    assert done.stderr == f"snakemake {printed} --version\n"


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--params", "none.yaml"), "none.yaml: the file does not exist"),
        (("--params", "mine.yaml"), "mine.yaml: .*params.yaml.*studies"),
        (
            ("studies/gallery.yaml",),
            "'studies/gallery.yaml' .*`snakemake studies/gallery.yaml --profile workflow/profiles/local`.*--params",
        ),
        (("--config", "params=studies/gallery.yaml"), "--config can't be used.*--params"),
        (
            ("-n", "--set-", "segment=3"),
            r".*'--set- segment=3' \(ambiguous option: --set- could match --set-threads,.*params.yaml",
        ),
        (("--cores", "many"), r".*'--cores many' \(.*cores.*\).*params.yaml"),
        (("--no-such-option",), r".*'--no-such-option' \(unrecognized arguments: --no-such-option\).*params.yaml"),
    ],
)
def test_fedpipe_run_rejects_invalid_options_and_runs_nothing(
    project: Project, arguments: tuple[str, ...], pattern: str
) -> None:
    (project.folder / "mine.yaml").write_text("{}\n")
    done = project.capture("fedpipe", "run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"fedpipe: {pattern}.*\n", done.stderr)
    assert not (project.folder / ".snakemake").exists()


def test_fedpipe_run_without_snakefile_suggests_fedpipe_init(project: Project) -> None:
    (project.folder / "Snakefile").unlink()
    done = project.capture("fedpipe", "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("fedpipe: Snakefile: .*`fedpipe init .`, which keeps your params.yaml.\n", done.stderr)


def test_fedpipe_run_with_unusable_home_prints_one_error(project: Project) -> None:
    (project.folder / "file").touch()
    home = str(project.folder / "file/home")
    done = project.capture("fedpipe", "run", "-n", HOME=home, XDG_CACHE_HOME="")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"fedpipe: HOME: .*{home}/.cache. Set XDG_CACHE_HOME .*\n", done.stderr)


def test_fedpipe_run_of_user_without_name_prints_one_error(project: Project) -> None:
    """As in a container: `docker run --user 1234`."""
    code = "import pwd, fedpipe.__main__ as f; pwd.getpwuid = {}.__getitem__; f.main()"
    names = dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME"), "")
    done = project.capture(sys.executable, "-c", code, "run", "-n", **names)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"fedpipe: LOGNAME: user {os.getuid()} has no name .* Set LOGNAME .*\n", done.stderr)


def test_fedpipe_run_without_snakemake_prints_one_error(project: Project, tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    libraries = os.pathsep.join([".", sysconfig.get_path("purelib")])
    done = project.capture(str(python), "-m", "fedpipe", "run", PATH="/nowhere", PYTHONPATH=libraries)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("fedpipe: snakemake is not installed.*`make setup`.*\n", done.stderr)
