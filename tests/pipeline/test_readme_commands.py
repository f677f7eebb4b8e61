"""The commands of README, of the pages that go on where it ends, and of CONTRIBUTING, typed in order as written."""

from __future__ import annotations

import shlex

import pytest
import yaml

from tests import small_studies as studies
from tests.docs.page_blocks import ROOT, blocks, commands, read
from tests.pipeline.conftest import Project, count_jobs, list_stages

NOTHING = "Nothing to be done"
INSTALLATION = "tests/docs/test_readme.py::test_the_cpu_installation_leaves_out_what_pytorchs_cuda_build_alone_needs"
STUDIES = "tests/pipeline/test_several_studies.py"
WHEEL = "tests/cli/test_init.py::test_the_wheel_runs_a_study_in_an_empty_folder"
STORE = "tests/papers/test_stored_runs.py::test_the_command_stores_and_names_what_it_added"
STORED_CELLS = "tests/papers/test_stored_runs.py::test_the_pages_mark_stored_cells_and_draw_their_curves"
SLURM = "tests/cluster/test_slurm.py::test_the_words_of_the_readme_run_on_slurm"

#: Commands that the stories below do not type, with what types or checks them instead: a test, or CI.
ELSEWHERE = {
    "make test": ".ci/run",
    "make test-all": ".ci/run",
    "make lint": ".ci/run",
    "snakemake --lint": ".ci/run",
    "pytest -q tests/report": ".ci/run",
    "pytest -q tests/algorithms -k my_avg": (
        "tests/cli/test_new_algorithm.py::test_a_new_algorithm_passes_the_contract_and_can_be_planned"
    ),
    "pip install pre-commit && pre-commit install": (
        "tests/project/test_ci.py::test_a_hook_lets_the_project_pass_and_bad_code_fail"
    ),
    "pip wheel --no-deps . && pip install fedpipe-*.whl": WHEEL,
    "fedpipe init ../study && cd ../study": WHEEL,
    "fedpipe init . --update": WHEEL,
    "fedpipe run --params studies/table.yaml --preset smoke": (
        f"{STUDIES}::test_a_preset_of_a_study_has_its_own_table_and_shares_runs"
    ),
    "snakemake all --config params=studies/a preset=smoke --profile workflow/profiles/local": (
        f"{STUDIES}::test_a_folder_of_studies_is_one_dag"
    ),
    "fedpipe store": STORE,
    "fedpipe store --params studies/papers/pfps_lwc/table2.yaml --preset reduced": STORE,
    'git add studies/papers && git commit -m "PFPS-LWC, Table 2, Dir(0.5)"': (
        "tests/papers/test_stored_runs.py::test_git_merges_what_two_machines_record"
    ),
    "fedpipe plan --params studies/papers --preset full": STORED_CELLS,
    "fedpipe papers --preset full": STORED_CELLS,
    "fedpipe verify --stored --seed 1": (
        "tests/papers/test_stored_runs.py::test_a_round_is_trained_again_without_results"
    ),
    "fedpipe run --params studies/papers/pfps_lwc/readings/partition.yaml": (
        "tests/papers/test_stored_runs.py::test_studies_of_a_folder_readings_run_only_if_it_is_selected"
    ),
    "fedpipe store --params studies/papers/pfps_lwc/readings/partition.yaml": STORE,
    "python benchmarks/readings.py": "tests/docs/test_readings_page.py::test_the_tables_are_those_of_the_stored_runs",
    "snakemake --profile slurm all": SLURM,
    "FEDPIPE_PROFILE=slurm dvc repro": SLURM,
    "python3 -m venv .venv && source .venv/bin/activate": INSTALLATION,
    "pip install torch==2.11.0 torchvision==0.26.0 --index-url ADDRESS": INSTALLATION,
    "pip install -r <(grep -vE '^(cuda|nvidia|triton)' requirements.lock)": INSTALLATION,
    "pip install --no-deps --no-build-isolation -e . && touch .venv/bin/.installed": INSTALLATION,
}


EXPERIMENTS = "dvc exp show --only-changed --drop results"

#: Pages all of whose commands are typed.
DOORS = ("README.md", "CONTRIBUTING.md", "docs/install.md", "docs/studies.md")


def test_every_command_is_typed_below_or_elsewhere() -> None:
    shown = {line for page in DOORS for line in commands(page)}
    assert set(ELSEWHERE) <= shown, "what no page shows any more needs no exception"
    for place in ELSEWHERE.values():
        path, _, test = place.partition("::")
        assert (ROOT / path).is_file()
        assert not test or f"\ndef {test}(" in read(path)


@pytest.fixture
def clone(project: Project) -> Project:
    """A clone that was installed by hand, as docs/install.md says for machines without CUDA: `make` finds all there."""
    (project.folder / ".venv/bin").mkdir(parents=True)
    project.run("bash", "-c", commands("docs/install.md")[-1].rpartition("&&")[2])
    assert "Nothing to be done for 'setup'" in project.run("make", "setup")
    return project


class Typist:
    """Types the commands of a page, one after another; says what each printed."""

    def __init__(self, project: Project, page: str) -> None:
        self.project = project
        self._left = [line for line in commands(page) if line not in ELSEWHERE]

    def next(self, line: str, run_command: str | None = None) -> str:
        """The next command, which is this one; `typed` is what stands for it where it has placeholders."""
        assert self._left.pop(0) == line
        return self.project.run("bash", "-c", run_command or line)

    def done(self) -> bool:
        return not self._left


@pytest.mark.slow
def test_the_readme_from_top_to_bottom(clone: Project) -> None:
    small = studies.settings(("fedavg", "feddw"), 2, federation={"batch_size": 10})
    small["algorithms"]["feddw"] = {"mu": 1.0}
    studies.write(small, clone.folder)
    (clone.folder / "studies/gallery.yaml").write_text((clone.folder / "params.yaml").read_text())
    clone.commit("as shipped")
    typist = Typist(clone, "README.md")

    copy = "git clone -q . ../copy && cd ../copy && git log --oneline"
    assert "as shipped" in typist.next("git clone ADDRESS fedpipe && cd fedpipe", copy)
    assert "| FedDW" in typist.next("make demo")
    typist.next("source .venv/bin/activate", ":")  # the tests' own environment is the active one
    first = clone.metrics()
    assert list_stages(typist.next("dvc repro"))[:2] == ["plan", "execute"]
    assert clone.metrics() == first
    typist.next("git add . && git commit -m baseline")
    small["algorithms"]["feddw"] = {"mu": 10.0}
    studies.write(small, clone.folder)
    typist.next("$EDITOR params.yaml", "EDITOR=true; $EDITOR params.yaml")
    printed = typist.next("dvc repro")
    assert count_jobs(printed)["segment"] == 1
    assert "segment FedDW seed" in printed
    compared = typist.next("fedpipe compare")
    assert "workspace − HEAD" in compared
    assert "| algorithm.mu" in compared
    assert "feddw" in clone.run("dvc", "metrics", "diff"), "with HEAD, as docs/dvc.md says"
    experiments = typist.next(EXPERIMENTS)
    assert "algorithms.feddw.mu" in experiments
    assert "partition.alpha" not in experiments, "it did not change"

    trace = yaml.safe_load(typist.next("fedpipe trace results/tables/results.md feddw.global-on-global"))
    assert trace
    assert "All verified: " in typist.next("fedpipe verify")
    keys = [path.name for path in sorted((clone.folder / "results/runs").glob("*/*"))]
    assert "algorithm" in typist.next("fedpipe diff KEY KEY", shlex.join(["fedpipe", "diff", *keys[:2]]))
    assert r"\toprule" in typist.next("fedpipe show --format latex")
    assert "Nothing to remove" in clone.run("fedpipe", "prune")

    printed = typist.next("fedpipe run")
    assert printed.startswith("snakemake all --profile workflow/profiles/local --logger-fedpipe-progress\n")
    assert NOTHING in printed, "DVC's results are found"
    printed = typist.next("fedpipe run -S algorithms.feddw.mu=0.1,1.0")
    assert count_jobs(printed)["segment"] == 1, "mu = 1.0 was run before the edit"
    assert "feddw" in typist.next("fedpipe list algorithms")
    assert "mu" in typist.next("fedpipe describe feddw")
    assert len(typist.next("fedpipe plan --dry-run").splitlines()) == 2
    assert NOTHING in typist.next("fedpipe run --profile workflow/profiles/gpu")
    assert typist.done()

    assert {line for line in commands("docs/install.md") if line not in ELSEWHERE} == {"make demo"}, "typed above"
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
    assert typist.done()


@pytest.mark.slow
def test_an_experiment_is_one_line_that_fits_a_terminal(project: Project) -> None:
    """All methods of the shipped study and an edit that changes all of them."""
    study = yaml.safe_load((ROOT / "params.yaml").read_text())
    study["federation"]["rounds"], study["study"]["seeds"] = 1, [0]
    studies.write(study, project.folder)
    project.run("dvc", "repro")
    project.commit("baseline")
    project.run("dvc", "exp", "run", "-n", "alpha-1", "-S", "partition.alpha=1.0")
    lines = project.run("env", "COLUMNS=160", *shlex.split(EXPERIMENTS)).splitlines()
    assert max(map(len, lines)) <= 160
    assert not [line for line in lines if "…" in line], "nothing is cut off"
    (experiment,) = [line for line in lines if "[alpha-1]" in line]
    (head,) = [line for line in lines if "Experiment" in line]
    first, second, *methods, last = head.split()
    assert (first, second, last) == ("Experiment", "Created", "partition.alpha")
    # DVC hides a method whose accuracy is the same in both.
    assert len(methods) > 4
    assert set(methods) <= set(study["study"]["algorithms"])
    assert experiment.split()[-1] == "1"


@pytest.mark.slow
def test_contributing_from_top_to_bottom(clone: Project) -> None:
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
    assert "my_avg" in typist.next("fedpipe new-algorithm my_avg")
    typist.next("make docs")
    assert "\n## my_avg\n" in (clone.folder / "docs/algorithms.md").read_text()
    assert "is stored" in typist.next("fedpipe download wine")
    typist.next("make docs")
    assert '"const": "wine"' in (clone.folder / "params.schema.json").read_text()
    params = {
        "dataset": {"name": "wine"},
        "partition": {"scheme": "slices"},
        "model": {"name": "two_nn"},
        "federation": {"clients": 5, "rounds": 2},
        "study": {"algorithms": ["fedavg", "my_avg"]},
    }
    studies.write(params, clone.folder)
    assert "wine" in typist.next("fedpipe partition --preview")
    assert " passed" in typist.next("pytest -q tests/models -k two_nn")
    typist.next("make docs")
    assert typist.done()

    clone.run("fedpipe", "run")
    assert set(clone.metrics()) == {"fedavg", "my_avg"}
    for check in ("ruff check", "ruff format --check"):
        clone.run(*check.split())
