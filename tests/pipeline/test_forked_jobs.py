"""Jobs of a local snakemake are forks of one server process with imported modules, and end with snakemake."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedpipe.cli import job_server
from fedpipe.core.storage.layout import RunFiles
from tests import small_studies as studies
from tests.cli.test_job_server import OWN, list_processes, wait_for_end
from tests.pipeline.conftest import ENVIRONMENT, LOCAL, Project, count_jobs
from tests.pipeline.test_snakemake import NOTHING, wait_for_round

#: Code that runs a shell in a terminal, which closes if the process is killed.
TERMINAL = """
import os, pty, signal
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # in case nohup runs the tests
    os.execvp("bash", ["bash", "-c", "echo $$ > shell; fedpipe run; exit"])
while os.read(terminal, 4096):
    pass
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="fork servers need Linux")


@pytest.fixture(autouse=True)
def _no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job servers start as they do for users."""
    monkeypatch.delitem(ENVIRONMENT, "FEDPIPE_TEMPLATE")


@pytest.mark.slow
def test_forked_jobs_equal_manually_typed_commands_bit_for_bit(project: Project) -> None:
    (project.folder / "witness.py").write_text(OWN)
    params = studies.settings(("fedavg", "own"), 2, algorithms={"own": {"algorithm": "witness.Own"}})
    project.write(params)
    ran = count_jobs(project.snakemake("runs"))
    assert (ran["segment"], ran["collect"]) == (2, 0)
    message = [json.loads(path.read_text()) for path in project.folder.glob("like-*.json")]
    (job,) = (like for like in message if like["arguments"][:1] == ["segment"])
    assert job_server.SERVER_CODE in job["parent"]
    assert job["threads"] == 1
    wait_for_end(list_processes(int(job["environment"][job_server.SNAKEMAKE_PID_VARIABLE])))
    once = project.hash_results()
    logs = {path: path.read_text() for path in project.folder.rglob("results/logs/segment/*")}
    made_by = [json.loads(path.read_text())["made_by"] for path in sorted(project.folder.rglob("joined/*/times.json"))]
    for run in project.folder.glob("results/runs/*/*"):
        studies.delete_rounds(run)
        project.run("rm", "-r", f"{run}/joined")
        command = ["segment", str(run.relative_to(project.folder)), "--stop", "2", "--collect"]
        output = project.run("env", "OMP_NUM_THREADS=1", sys.executable, "-m", "fedpipe", *command)
        assert output in logs.values()
    assert project.hash_results() == once
    again = [json.loads(path.read_text())["made_by"] for path in sorted(project.folder.rglob("joined/*/times.json"))]
    assert again == made_by
    assert NOTHING in project.snakemake("-n", "runs")
    assert not list_processes(int(job["environment"][job_server.SNAKEMAKE_PID_VARIABLE]))


@pytest.mark.slow
def test_plan_and_all_jobs_are_forks_of_one_server(project: Project) -> None:
    """The server needs the environment of jobs. Otherwise the jobs would start another server. This includes `-j`."""
    (project.folder / "sitecustomize.py").write_text(
        "import sys\n"
        "is_served = 'job_server.main' in str(sys.orig_argv)\n"
        "if is_served or sys.argv[1:2] == ['plan']:\n"
        "    open('begun', 'a').write('serves\\n' if is_served else 'plans\\n')\n"
    )
    (project.folder / "witness.py").write_text(OWN)
    params = studies.settings(("scaffold", "own"), 1, algorithms={"own": {"algorithm": "witness.Own"}})
    project.write(params)
    project.snakemake("-n", "runs")
    assert (project.folder / "begun").read_text() == "plans\n", "a dry run starts no server"
    project.run("bash", "-c", "rm like-*.json")
    project.edit(federation={"rounds": 2})
    ran = count_jobs(project.snakemake("-j", "2", "runs"))
    assert (ran["download"], ran["partition"], ran["segment"]) == (1, 1, 2)
    assert sorted((project.folder / "begun").read_text().split()) == ["plans", "plans", "serves"]
    processes = [json.loads(path.read_text()) for path in project.folder.glob("like-*.json")]
    assert {"plan", "segment"} <= {process["arguments"][0] for process in processes}
    assert all(job_server.SERVER_CODE in process["parent"] for process in processes)


@pytest.mark.slow
def test_demo_benchmark_writes_consistent_measurements(tmp_path: Path) -> None:
    """Run the benchmark at a tiny size."""
    small, written = ("--algorithms", "1", "--seeds", "1", "--rounds", "2"), tmp_path / "figures.json"
    command = [sys.executable, str(studies.ROOT / "benchmarks/demo.py"), *small, "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert 0 < found["compute_core_s"] < found["wall_s"] * found["cores"]
    assert found["ratio"] == found["wall_s"] * found["cores"] / found["compute_core_s"]
    assert found["cpu_core_s"] > 1, "the measurement includes the server of local jobs"
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_jobs_end_with_snakemake_and_same_command_resumes(project: Project, tmp_path: Path, how: str) -> None:
    project.write(studies.settings(("fedavg", "scaffold"), 4000))
    errors = project.folder / "stderr.txt"
    command = ("snakemake", "runs", *LOCAL)
    with project.start_command(*command, stdout=subprocess.DEVNULL, stderr=errors.open("w")) as running:
        wait_for_round(project, 2, running)
        mine = list_processes(running.pid)
        assert len(mine) >= 2
        if how == "SIGKILL":
            running.kill()
        else:
            os.killpg(running.pid, signal.SIGINT)  # like Ctrl+C
        wait_for_end(mine)
        assert running.wait() != 0
    if how == "SIGINT":
        advice = "Complete rounds are kept. To continue after them, type:\n    snakemake runs --profile workflow"
        assert errors.read_text().count(advice) == 1
    complete = find_last_rounds(project)
    assert 2 <= max(complete.values()) < 4000, "the jobs finished before they could end with snakemake"
    total = max(complete.values()) + 1
    params = studies.settings(("fedavg", "scaffold"), total)
    project.write(params)
    if how == "SIGKILL":
        assert "--unlock" in project.snakemake("runs", check=False)
        project.snakemake("runs", "--unlock")
    project.snakemake("runs")
    for run, rounds in complete.items():
        (log,) = project.folder.glob(f"results/logs/segment/{run.parent.name}-*-{total:04d}.log")
        assert f"{rounds} of {total} rounds are complete" in log.read_text()
    expected = studies.compute_reference(params, tmp_path / "reference")
    assert studies.hash_results(project.folder / "results/runs") == expected


@pytest.mark.slow
def test_closed_terminal_ends_jobs_and_new_command_resumes(project: Project) -> None:
    project.write(studies.settings(("fedavg", "scaffold"), 4000))
    with project.start_command(sys.executable, "-c", TERMINAL) as terminal:
        wait_for_round(project, 2, terminal)
        shell = (project.folder / "shell").read_text().strip()
        (snakemake,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        processes = list_processes(int(snakemake))
        assert len(processes) >= 2
        terminal.kill()
        wait_for_end(processes)
    last_round = max(find_last_rounds(project).values())
    assert 2 <= last_round < 4000
    assert "(2 stopped)" in project.fedpipe("status")
    project.edit(federation={"rounds": last_round + 1})
    project.snakemake("runs")


def find_last_rounds(project: Project) -> dict[Path, int]:
    """Return the last complete round of each run that has one."""
    rounds = {run: RunFiles(run).list_complete_rounds() for run in project.folder.glob("results/runs/*/*/")}
    return {run: numbers[-1] for run, numbers in rounds.items() if numbers}
