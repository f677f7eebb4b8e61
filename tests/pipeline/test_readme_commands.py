"""Commands of README, its follow-up pages, and CONTRIBUTING, run in order."""

import shlex

import pytest
import yaml

from tests import small_studies as studies
from tests.docs.page_blocks import ROOT, blocks, commands, read
from tests.pipeline.conftest import Project, count_jobs, list_stages

NOTHING = "Nothing to be done"
INSTALLATION = "tests/docs/test_readme.py::test_cpu_installation_omits_only_packages_of_cuda_build"
STUDIES = "tests/pipeline/test_several_studies.py"
WHEEL = "tests/cli/test_init.py::test_wheel_runs_study_in_empty_folder"
STORE = "tests/papers/test_stored_runs.py::test_store_command_adds_runs_and_prints_count"
STORED_CELLS = "tests/papers/test_stored_runs.py::test_pages_mark_stored_cells_and_draw_curves"
SLURM = "tests/cluster/test_slurm.py::test_readme_slurm_commands_run"

#: Commands that the tests below do not run, with the test or CI file that runs or checks them.
ELSEWHERE = {
    "make test": ".ci/run",
    "make test-all": ".ci/run",
    "make lint": ".ci/run",
    "snakemake --lint": ".ci/run",
    "pytest -q tests/report": ".ci/run",
    "pip install pre-commit && pre-commit install": (
        "tests/project/test_ci.py::test_linters_accept_project_and_reject_bad_code"
    ),
    "pip wheel --no-deps . && pip install fedpipe-*.whl": WHEEL,
    "fedpipe init ../study && cd ../study": WHEEL,
    "fedpipe init . --update": WHEEL,
    "fedpipe run --params studies/table.yaml --preset smoke": (
        f"{STUDIES}::test_other_study_and_its_preset_share_runs_and_do_not_change_main_study"
    ),
    "snakemake all --config params=studies/a preset=smoke --profile workflow/profiles/local": (
        f"{STUDIES}::test_folder_of_studies_is_one_dag"
    ),
    "fedpipe download --params studies/papers": (
        "tests/data/test_pins.py::test_download_of_folder_adds_checksums_to_all_studies"
    ),
    "fedpipe store": STORE,
    "fedpipe store --params studies/papers/pfps_lwc/table2.yaml --preset reduced": STORE,
    'git add studies/papers && git commit -m "PFPS-LWC, Table 2, Dir(0.5)"': (
        "tests/papers/test_stored_runs.py::test_git_merges_stored_runs_of_two_machines"
    ),
    "fedpipe plan --params studies/papers --preset full": STORED_CELLS,
    "fedpipe papers --preset full": STORED_CELLS,
    "fedpipe verify --stored --seed 1": (
        "tests/papers/test_stored_runs.py::test_verify_recomputes_round_of_stored_run"
    ),
    "fedpipe run --params studies/papers/pfps_lwc/readings/partition.yaml": (
        "tests/papers/test_stored_runs.py::test_readings_run_only_if_selected"
    ),
    "fedpipe store --params studies/papers/pfps_lwc/readings/partition.yaml": STORE,
    "python benchmarks/readings.py": "tests/docs/test_readings_page.py::test_readings_tables_match_stored_runs",
    "snakemake --profile slurm all": SLURM,
    "FEDPIPE_PROFILE=slurm dvc repro": SLURM,
    "python3 -m venv .venv && source .venv/bin/activate": INSTALLATION,
    "pip install torch==2.11.0 torchvision==0.26.0 --index-url INDEX": INSTALLATION,
    "pip install -r <(grep -vE '^(cuda|nvidia|triton)' requirements.lock)": INSTALLATION,
    "pip install --no-deps --no-build-isolation -e . && touch .venv/bin/.installed": INSTALLATION,
}


#: Pages whose commands are all run.
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "docs/install.md", "docs/studies.md")


def test_commands_run_elsewhere_are_on_pages_and_their_tests_exist() -> None:
    shown = {line for page in FIRST_PAGES for line in commands(page)}
    assert set(ELSEWHERE) <= shown, "a command that no page shows needs no exception"
    for place in ELSEWHERE.values():
        path, _, test = place.partition("::")
        assert (ROOT / path).is_file()
        assert not test or f"\ndef {test}(" in read(path)


@pytest.fixture
def clone(project: Project) -> Project:
    """A clone with a manual installation, as in docs/install.md for machines without CUDA. `make` installs nothing."""
    (project.folder / ".venv/bin").mkdir(parents=True)
    project.run("bash", "-c", commands("docs/install.md")[-1].rpartition("&&")[2])
    assert "Nothing to be done for 'setup'" in project.run("make", "setup")
    return project


class Typist:
    """Runs the commands of a page in order."""

    def __init__(self, project: Project, page: str) -> None:
        self.project = project
        self._left = [line for line in commands(page) if line not in ELSEWHERE]

    def next(self, line: str, run_command: str | None = None) -> str:
        """Run the next command, which must be `line`. If it has placeholders, run `run_command` instead."""
        assert self._left.pop(0) == line
        return self.project.run("bash", "-c", run_command or line)

    def is_done(self) -> bool:
        return not self._left


@pytest.mark.slow
def test_readme_commands_run_in_order(clone: Project) -> None:
    small = studies.settings(("fedavg", "feddw"), 2, federation={"batch_size": 10})
    small["algorithms"]["feddw"] = {"mu": 1.0}
    clone.write(small)
    (clone.folder / "studies/gallery.yaml").write_text((clone.folder / "params.yaml").read_text())
    clone.commit("as shipped")
    typist = Typist(clone, "README.md")

    copy = "git clone -q . ../copy && cd ../copy && git log --oneline"
    assert "as shipped" in typist.next("git clone ADDRESS fedpipe && cd fedpipe", copy)
    assert "| FedDW" in typist.next("make demo")
    typist.next("source .venv/bin/activate", ":")  # the environment of the tests is already active
    first = clone.metrics(), clone.hash_results()
    printed = typist.next("dvc repro")
    assert list_stages(printed)[:2] == ["plan", "execute"]
    assert "train@fedavg" in printed
    assert "segment" not in count_jobs(printed), "DVC records the results of the demo"
    assert (clone.metrics(), clone.hash_results()) == first
    typist.next("git add . && git commit -m baseline")
    small["algorithms"]["feddw"] = {"mu": 10.0}
    clone.write(small)
    typist.next("$EDITOR params.yaml", "EDITOR=true; $EDITOR params.yaml")
    printed = typist.next("dvc repro")
    assert count_jobs(printed)["segment"] == 1
    assert "segment FedDW seed" in printed
    compared = typist.next("fedpipe compare")
    assert "workspace − HEAD" in compared
    assert "| algorithm.mu" in compared
    assert "feddw" in clone.run("dvc", "metrics", "diff"), "the default is HEAD, as in docs/dvc.md"
    experiments = typist.next("dvc exp show --only-changed --drop results")
    assert "algorithms.feddw.mu" in experiments
    assert "partition.alpha" not in experiments, "alpha did not change"

    trace = yaml.safe_load(typist.next("fedpipe trace results/tables/results.md feddw.global-on-global"))
    assert trace
    assert "All verified: " in typist.next("fedpipe verify")
    keys = [path.name for path in sorted((clone.folder / "results/runs").glob("*/*"))]
    assert "algorithm" in typist.next("fedpipe diff KEY KEY", shlex.join(["fedpipe", "diff", *keys[:2]]))
    assert r"\toprule" in typist.next("fedpipe show --format latex")

    printed = typist.next("fedpipe run")
    assert printed.startswith("snakemake all --profile workflow/profiles/local --logger-fedpipe-progress\n")
    assert NOTHING in printed, "the results of DVC are reused"
    base = [clone.folder / name for name in ("params.yaml", "results/tables/results.md")]
    before = [path.read_text() for path in base]
    option, derived = ("-S", "algorithms.feddw.mu=0.1,1.0"), "studies/params-feddw.mu=0.1+1.0.yaml"
    printed = typist.next("fedpipe run -S algorithms.feddw.mu=0.1,1.0")
    assert f"snakemake all --config params={derived} --profile" in printed
    assert count_jobs(printed)["segment"] == 1, "mu = 1.0 was run before the edit"
    assert [path.read_text() for path in base] == before, "the base study is unchanged"
    shown = clone.run("fedpipe", "show", *option)
    assert shown == clone.run("fedpipe", "show", "--params", derived)
    assert len([line for line in shown.splitlines() if line.startswith("| FedDW")]) == 2
    assert NOTHING in clone.run("fedpipe", "run", "-n", *option)
    assert "feddw" in typist.next("fedpipe list algorithms")
    assert "mu" in typist.next("fedpipe describe feddw")
    assert len(typist.next("fedpipe plan --dry-run").splitlines()) == 2
    assert NOTHING in typist.next("fedpipe run --profile workflow/profiles/gpu")
    assert typist.is_done()

    assert {line for line in commands("docs/install.md") if line not in ELSEWHERE} == {"make setup", "make demo"}, (
        "the fixture and the README test run them above"
    )
    typist = Typist(clone, "docs/studies.md")
    assert "segment" not in count_jobs(typist.next("fedpipe run -S algorithms.feddw.mu=0.1")), (
        "README's grid has this run"
    )
    assert "| FedDW" in typist.next("fedpipe show -S algorithms.feddw.mu=0.1")
    line = "fedpipe run -S algorithms.feddw.mu=0.1,1.0 -S federation.rounds=50"
    assert count_jobs(typist.next(line, line.replace("50", "3")))["segment"] == 3, "all runs continue"
    assert r"\toprule" in typist.next("fedpipe show --format latex")
    printed = typist.next("fedpipe run --params studies/gallery.yaml")
    assert "segment" not in count_jobs(printed), "studies share runs"
    assert "| FedDW" in typist.next("fedpipe show --params studies/gallery.yaml")
    for line, preset in (
        ("make papers", "smoke"),
        ("make papers PRESET=reduced", "reduced"),
    ):  # run by test_make_papers.py
        printed = typist.next(line, line.replace("make", "make -n"))
        assert f"snakemake papers --config preset={preset} --profile workflow/profiles/local" in printed
    assert typist.is_done()


@pytest.mark.slow
def test_contributing_commands_run_in_order(clone: Project) -> None:
    for block in blocks("CONTRIBUTING.md"):
        if block.language == "python":
            (clone.folder / block.lines[0].removeprefix("# ")).write_text(block.text)
    stacks = clone.folder / "tests/models/test_stacking.py"
    (line,) = [text for text in read("CONTRIBUTING.md").split("`") if text.startswith('"two_nn": ')]
    text = stacks.read_text()
    head = next(row for row in text.splitlines() if row.startswith("SMALL"))
    stacks.write_text(text.replace(head, f"{head}\n    {line},"))
    typist = Typist(clone, "CONTRIBUTING.md")

    typist.next("make setup && source .venv/bin/activate", "make setup")
    printed = typist.next("fedpipe new-algorithm my_avg")
    files = ("fedpipe/algorithms/my_avg.py", "tests/algorithms/test_my_avg.py")
    assert all(name in printed for name in files)
    assert "class MyAvg(FedAvg)" in (clone.folder / files[0]).read_text()
    assert not [name for name in files if "emplate" in (clone.folder / name).read_text()]
    assert " passed" in typist.next("pytest -q tests/algorithms -k my_avg")
    typist.next("make docs", "make -n docs")  # the second `make docs` writes all components
    assert "is stored" in typist.next("fedpipe download wine")
    typist.next("make docs")
    assert "\n## my_avg\n" in (clone.folder / "docs/algorithms.md").read_text()
    assert '"const": "wine"' in (clone.folder / "params.schema.json").read_text()
    params = {
        "dataset": {"name": "wine"},
        "partition": {"scheme": "slices"},
        "model": {"name": "two_nn"},
        "federation": {"clients": 5, "rounds": 2},
        "study": {"algorithms": ["fedavg", "my_avg"]},
    }
    clone.write(params)
    assert "wine" in typist.next("fedpipe partition --preview")
    assert " passed" in typist.next("pytest -q tests/models -k two_nn")
    typist.next("make docs", "make -n docs")
    assert typist.is_done()

    clone.run("fedpipe", "run")
    assert set(clone.metrics()) == {"fedavg", "my_avg"}
    for check in ("ruff check", "ruff format --check"):
        clone.run(*check.split())
