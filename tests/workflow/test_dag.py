"""Functions of the Snakefile's rules, without Snakemake: exact paths for all kinds of jobs, folders, and errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from snakemake.io import is_flagged
from snakemake.iocontainers import Wildcards

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.planning import planner
from fedpipe.report import contents
from fedpipe.report.data import StudyData
from fedpipe.workflow import dag
from fedpipe.workflow import selection as study_selection
from fedpipe.workflow.dag import Dag
from fedpipe.workflow.selection import StudySelection
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")

LABELS = ("fedavg",)


def write_study(path: str = "params.yaml", labels: tuple[str, ...] = LABELS, rounds: int = 4, **sections: Any) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    studies.write(studies.settings(labels, rounds, **sections), target.parent)
    if target.name != "params.yaml":
        target.with_name("params.yaml").rename(target)
    return target


def build_dag(path: str = "params.yaml", labels: tuple[str, ...] = LABELS, rounds: int = 4, **sections: Any) -> Dag:
    target = write_study(path, labels, rounds, **sections)
    planner.write_plan(planner.make_plan(target))
    return Dag.from_selection(StudySelection(target))


def make_wildcards(**values: str) -> Wildcards:
    return Wildcards(fromdict=values)


def get_first_run(graph: Dag) -> tuple[str, dict[str, str]]:
    """Get the path of a run, and the wildcards of its jobs."""
    path, run = next(iter(graph.plan.runs.items()))
    return path, {"algorithm": run.algorithm, "key": run.key}


def list_run_input(graph: Dag, path: str) -> dict[str, str]:
    run = graph.plan.runs[path]
    return {
        "settings": f"{path}/run.yaml",
        "data": f"results/data/{run.dataset}.pt",
        "assignment": f"results/partitions/{run.partition}/assignment.parquet",
    }


def list_merged_files(path: str, rounds: str) -> list[str]:
    names = ("metrics.parquet", "matrices.parquet", "rounds.parquet", "times.json", "joined.json")
    return [f"{path}/joined/{rounds}/{name}" for name in names]


# -- kinds of jobs -----------------------------------------------------------------------------------------------------


def test_dag_has_one_job_per_run() -> None:
    graph = build_dag()
    path, names = get_first_run(graph)
    assert (graph.has_one_job_per_run, graph.participants_per_job) == (True, None)
    job_input = graph.get_segment_input(make_wildcards(**names, stop="0004"))
    assert job_input == list_run_input(graph, path)
    assert [name for name, file in job_input.items() if is_flagged(file, "ancient")] == ["settings"]
    assert graph.get_untuned_run_output() == [*list_merged_files(path, "0004"), f"{path}/segments/0004.json"]
    partition_wildcards = make_wildcards(key=graph.plan.partitions[0])
    assert graph.get_partition_input(partition_wildcards) == list_run_input(graph, path)["data"]
    assignment = list_run_input(graph, path)["assignment"]
    heterogeneity, record = assignment.replace("assignment", "heterogeneity"), assignment.replace("parquet", "json")
    assert graph.get_partition_output() == [assignment, heterogeneity, record]
    assert list_merged_files("results/runs/{algorithm}/{key}", "{stop}") == dag.MERGED_PATTERN


def test_job_of_run_that_is_no_longer_planned_is_rejected() -> None:
    """The study was edited and planned again while the job was queued."""
    path, wildcards = get_first_run(build_dag())
    edited = build_dag(labels=("fedprox",))
    with rejects(f"{path} is not in the plan of params.yaml"):
        edited.get_segment_input(make_wildcards(**wildcards, stop="0004"))
    with rejects("results/partitions/0123456789ab/assignment.parquet is not in the plan of"):
        edited.get_partition_input(make_wildcards(key="0123456789ab"))
    with pytest.raises(SettingsError, match=r"/surface-0123456789ab\.parquet is not in the plan of"):
        edited.get_diagnostic(make_wildcards(**wildcards, round="0001", diagnostic="surface-0123456789ab"))
    get_key = dag.make_partition_wildcards_function(edited.plan.plans[0], str)
    (name,) = edited.plan.plans[0].partition_names.values()
    assert get_key(make_wildcards(partition=name)) in edited.plan.partitions
    with rejects(f"partition 'iid-seed7' ... Use one of {name}"):
        get_key(make_wildcards(partition="iid-seed7"))


def test_segment_needs_previous_segment() -> None:
    """A run also stops at each number of rounds in a table, and merging waits for smaller numbers."""
    graph = build_dag(rounds=7, execution={"rounds_per_job": 3}, study={"grid": {"federation.rounds": [4, 7]}})
    path, names = get_first_run(graph)
    assert not graph.has_one_job_per_run
    assert graph.get_segment_ends(graph.plan.runs[path]) == [3, 4, 6, 7]
    assert graph.get_segment_input(make_wildcards(**names, stop="0003")) == list_run_input(graph, path)
    for stop, start in (("0004", "0003"), ("0006", "0004"), ("0007", "0006")):
        previous = {"previous": f"{path}/segments/{start}.json"}
        assert graph.get_segment_input(make_wildcards(**names, stop=stop)) == list_run_input(graph, path) | previous
    manifests = [f"{path}/segments/{stop}.json" for stop in ("0003", "0004", "0006", "0007")]
    assert graph.get_collect_input(make_wildcards(**names, stop="0004")) == manifests
    manifests += [f"{path}/joined/0004/joined.json"]
    assert graph.get_collect_input(make_wildcards(**names, stop="0007")) == manifests
    assert graph.get_untuned_run_output() == [*list_merged_files(path, "0004"), *list_merged_files(path, "0007")]


def test_single_rounds_have_blocks_of_participants() -> None:
    """Five of ten clients participate, in blocks of three and two."""
    graph = build_dag(rounds=2, execution={"rounds_per_job": 1, "clients_per_job": 3})
    path, names = get_first_run(graph)
    assert graph.participants_per_job == 3
    wildcards = make_wildcards(**names, round="0002")
    assert graph.get_round_input(wildcards) == list_run_input(graph, path) | {"state": f"{path}/rounds/0001/state.json"}
    assert graph.count_blocks(wildcards) == 2
    assert graph.get_block_input(wildcards) == [f"{path}/rounds/0002/block-{block}.pt" for block in ("0000", "0001")]
    assert graph.get_collect_input(make_wildcards(**names, stop="0002")) == [
        f"{path}/rounds/{number}/round.json" for number in ("0001", "0002")
    ]
    assert graph.get_untuned_run_output() == list_merged_files(path, "0002")


def test_job_environment_matches_execution_settings() -> None:
    graph = build_dag(execution={"stack": 4, "device": "cpu"}, artifacts={"keep_models": "last"})
    assert graph.job_environment == {
        "FEDPIPE_DEVICE": "cpu",
        "FEDPIPE_STACK": 4,
        "FEDPIPE_GRAPHS": 1,
        "FEDPIPE_KEEP_MODELS": "last",
        "FEDPIPE_CALLBACKS": "",
    }


# -- results -----------------------------------------------------------------------------------------------------------


def test_all_results_cover_files_of_study() -> None:
    graph = build_dag(labels=("fedavg", "fedprox"), study={"seeds": [0, 1]})
    (plan,) = graph.plan.plans
    runs, names = graph.plan.runs.values(), plan.partition_names.values()
    assert sorted(names) == ["dirichlet-0.3-seed0", "dirichlet-0.3-seed1"]
    partitions = [f"results/partitions/{key}" for key in plan.partitions]
    partition_files = [f"{path}/{name}.parquet" for path in partitions for name in ("assignment", "heterogeneity")]
    merged_files = [file for run in runs for file in list_merged_files(run.path, "0004")]
    assert sorted(graph.get_all_results()) == sorted(
        [
            *(f"results/data/{plan.runs[0].dataset}.{kind}" for kind in ("pt", "json")),
            *partition_files,
            *(f"{path}/assignment.json" for path in partitions),
            *merged_files,
            *(f"{run.path}/segments/0004.json" for run in runs),
            *(f"results/tables/results.{kind}" for kind in ("csv", "md", "html")),
            "results/tables/statistics.csv",
            "results/tables/times.csv",
            "results/metrics.json",
            *(f"results/plots/{name}.csv" for name in ("curves", "clients", "matrices", "partition")),
            *(f"results/keys/{label}.json" for label in ("fedavg", "fedprox")),
            *(
                f"results/figures/{name}.{kind}"
                for name in ("curves", "matrices", *(f"partition-{name}" for name in names))
                for kind in ("svg", "pdf", "png")
            ),
        ]
    )
    assert sorted(graph.get_table_input(plan)) == sorted([*merged_files, *partition_files])
    for name, file in (("curves", "metrics"), ("matrices", "matrices")):
        assert dag.get_figure_input(plan, name) == [f"{run.path}/joined/0004/{file}.parquet" for run in runs]
    assert graph.get_rule_name_suffix(plan) == ""
    key = next(key for key, name in plan.partition_names.items() if name == "dirichlet-0.3-seed1")
    assert dag.make_partition_wildcards_function(plan, str)(make_wildcards(partition="dirichlet-0.3-seed1")) == key


def test_table_output_matches_written_report_files() -> None:
    plan = studies.prepare(studies.settings(rounds=1))
    studies.finish_study(plan)
    written = contents.build_report_files(StudyData(plan))
    assert sorted(map(str, written)) == sorted(dag.get_table_output(plan))


def test_diagnostic_needs_merged_rounds() -> None:
    graph = build_dag(diagnostics={"norms": {"kind": "head-norms"}})
    ((table, diagnostic),) = graph.plan.diagnostics.items()
    path, names = get_first_run(graph)
    assert table == f"results/diagnostics/fedavg/{diagnostic.run_key}/0004/head-norms-{diagnostic.key}.parquet"
    wildcards = make_wildcards(**names, round="0004", diagnostic=f"head-norms-{diagnostic.key}")
    assert graph.get_diagnostic(wildcards) == diagnostic
    job_input = graph.get_diagnostic_input(wildcards)
    assert job_input == list_run_input(graph, path) | {
        "settings": table.replace(".parquet", ".yaml"),
        "joined": f"{path}/joined/0004/joined.json",
    }
    assert is_flagged(job_input["settings"], "ancient")
    assert is_flagged(job_input["joined"], "ancient")
    assert table in graph.get_all_results()
    assert table in graph.get_paper_pages_input()


# -- several studies ---------------------------------------------------------------------------------------------------


def plan_folder(preset: str = "full") -> StudySelection:
    selection = StudySelection(Path("studies/a"), preset)
    for path in selection.studies:
        planner.write_plan(planner.make_plan(path, preset))
    return selection


def test_rules_of_studies_with_similar_names_have_different_names() -> None:
    for name in ("a-b", "a_b", "a/b", "c"):
        write_study(f"studies/a/{name}.yaml", rounds=2)
    graph = Dag.from_selection(plan_folder())
    suffixes = [graph.get_rule_name_suffix(plan) for plan in graph.plan.plans]
    assert len({*suffixes}) == 4
    assert all(suffix.isidentifier() for suffix in suffixes)
    assert suffixes[-1] == "_results_studies_a_c"


def test_studies_in_folder_share_runs() -> None:
    """A run is computed once with the maximum number of rounds, and stops at the number of each study."""
    write_study("studies/a/short.yaml", rounds=2)
    write_study("studies/a/b/long (1).yaml", labels=("fedavg", "fedprox"), rounds=4)
    graph = Dag.from_selection(plan_folder())
    path, names = get_first_run(graph)
    assert (names["algorithm"], graph.plan.runs[path].rounds) == ("fedavg", 4)
    assert len(graph.plan.runs) == 2
    assert graph.get_segment_ends(graph.plan.runs[path]) == [2, 4]
    assert graph.get_segment_input(make_wildcards(**names, stop="0004"))["previous"] == f"{path}/segments/0002.json"
    suffixes = [graph.get_rule_name_suffix(plan) for plan in graph.plan.plans]
    assert suffixes == ["_results_studies_a_b_long__1_", "_results_studies_a_short"]
    final = graph.get_all_results()
    assert {"results/studies/a/short/tables/results.md", "results/studies/a/b/long (1)/figures/curves.svg"} <= {*final}
    assert "results/studies/a/short/tables/results.md" in graph.get_paper_pages_input()
    assert "results/studies/a/short/figures/curves.svg" not in graph.get_paper_pages_input()
    assert "`fedpipe show --params FILE`" in graph.format_done_message()


def test_dag_of_folder_ignores_unavailable_runs() -> None:
    write_study("studies/a/here.yaml")
    remote_study = write_study("studies/a/away.yaml", labels=("fedprox",))
    selection = plan_folder()
    files = selection.studies[remote_study]
    (missing,) = planner.make_plan(remote_study).runs
    files.unavailable_runs.write_text(json.dumps({str(missing.path): "data not here"}))
    graph = Dag.from_selection(selection)
    assert [run.algorithm for run in graph.plan.runs.values()] == ["fedavg"]
    assert not [path for path in graph.get_all_results() if str(missing.path) in path or "/away/" in path]
    files.unavailable_runs.unlink()
    assert len(Dag.from_selection(selection).plan.runs) == 2
    files.unavailable_runs.write_text(json.dumps({str(missing.path): "data not here"}))
    alone = Dag.from_selection(StudySelection(remote_study))
    assert list(alone.plan.runs) == [str(missing.path)], "its job reports what is missing"


def test_dag_rejects_studies_with_different_execution() -> None:
    write_study("studies/a/one.yaml")
    write_study("studies/a/two.yaml", execution={"stack": 2})
    with pytest.raises(SettingsError, match=r"^studies/a/two\.yaml: execution differs from that of studies/a/one"):
        Dag.from_selection(plan_folder())


# -- selection of studies, and their plans -----------------------------------------------------------------------------


def test_config_selects_studies() -> None:
    Path("studies/a").mkdir(parents=True)
    assert StudySelection.from_config({}) == StudySelection(Path("params.yaml"), "full")
    selection = StudySelection.from_config({"params": "studies/a", "preset": "smoke"})
    assert (selection, selection.is_folder) == (StudySelection(Path("studies/a"), "smoke"), True)
    absolute = StudySelection.from_config({"params": str(Path("studies/b.yaml").absolute())})
    assert absolute == StudySelection(Path("studies/b.yaml"))
    assert str(absolute.studies[Path("studies/b.yaml")].plan) == "results/studies/b/plan.json"
    with pytest.raises(SettingsError, match=r"^'rounds', 'seed' in --config or --configfile "):
        StudySelection.from_config({"rounds": 3, "params": "params.yaml", "seed": 1})
    with pytest.raises(SettingsError, match=r"^studies/a: .*no study"):
        _ = selection.studies
    with pytest.raises(SettingsError, match=r"^elsewhere\.yaml: .*params\.yaml"):
        _ = StudySelection(Path("elsewhere.yaml")).studies


def test_project_folder_with_colon_is_rejected() -> None:
    study_selection.require_importable_folder(Path("/home/me/study"))
    with pytest.raises(SettingsError, match=r"^/home/a:b: ':' can't be part"):
        study_selection.require_importable_folder(Path("/home/a:b"))


def test_main_process_plans_if_plan_is_missing_or_outdated() -> None:
    """A job's process plans only if there is no plan, because params.yaml may change while it runs."""
    write_study()
    selection = StudySelection(Path("params.yaml"))
    assert selection.needs_planning(is_main_process=True)
    assert selection.needs_planning(is_main_process=False)
    selection.write_plans()
    assert not selection.needs_planning(is_main_process=True)
    assert Dag.from_selection(selection).get_all_results()
    with Path("params.yaml").open("a") as file:
        file.write("# a comment\n")
    assert selection.needs_planning(is_main_process=True)
    assert not selection.needs_planning(is_main_process=False)
    Path("results/plan.json").write_text("{}")
    assert selection.needs_planning(is_main_process=True)
    with pytest.raises(ArtifactError, match=r"^results/plan\.json is not the plan of the study"):
        Dag.from_selection(selection)


def test_main_process_always_plans_folder() -> None:
    """Missing data of omitted runs may be available now."""
    write_study("studies/a/one.yaml")
    selection = plan_folder()
    assert selection.needs_planning(is_main_process=True)
    assert not selection.needs_planning(is_main_process=False)


def test_invalid_study_ends_snakemake_with_reason(capfd: pytest.CaptureFixture[str]) -> None:
    Path("params.yaml").write_text("study: {seeds: []}\n")
    with pytest.raises(SystemExit) as system_exit:
        StudySelection(Path("params.yaml")).write_plans()
    assert system_exit.value.code == 2
    assert "fedpipe: " in capfd.readouterr().err


# -- messages and the shell --------------------------------------------------------------------------------------------


def test_messages_contain_command_of_study(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build_dag("studies/two words.yaml")
    arguments = ["all", "--config", "params=studies/two words.yaml"]
    assert dag.format_resume_advice(arguments).endswith(":\n    snakemake all --config 'params=studies/two words.yaml'")
    assert dag.format_resume_advice(["all", dag.PROGRESS_OPTION]).endswith(" the same command again.")
    monkeypatch.setenv("DVC_EXP_NAME", "louder")
    assert "`dvc repro`, then `dvc exp save -n louder -I results/keys`" in dag.format_resume_advice(
        ["all", dag.PROGRESS_OPTION]
    )
    temporary_folder = Path(".dvc/tmp/exps/tmp0")
    temporary_folder.mkdir(parents=True)
    monkeypatch.chdir(temporary_folder)
    assert "dvc repro" not in dag.format_resume_advice(["all", dag.PROGRESS_OPTION])
    assert "`fedpipe show --params 'studies/two words.yaml'`" in graph.format_done_message()
    assert " results/studies/two words/tables/results.md," in graph.format_done_message()


def test_describe_job_shows_name_of_run() -> None:
    graph = build_dag(study={"grid": {"federation.learning_rate": [0.1, 0.2]}})
    _, run = get_first_run(graph)
    (partition,) = graph.plan.partitions
    assert graph.describe_remaining_runs() == "2 of 2 runs to do"
    assert graph.describe_job("segment", run | {"stop": "0004"}) == "segment FedAvg learning_rate=0.1 seed 0"
    diagnostic = run | {"round": "0004", "diagnostic": "drift-0123456789ab"}
    message = "diagnostic FedAvg learning_rate=0.1 seed 0, round 4, drift"
    assert graph.describe_job("diagnostic", diagnostic) == message
    assert graph.describe_job("partition", {"key": partition}) == "partition dirichlet-0.3-seed0"
    assert graph.describe_job("partition_figure", {"partition": "iid-seed0"}) == "partition_figure iid-seed0"
    assert graph.describe_job("download", {"dataset": "own.data-0123456789ab"}) == "download own.data"
    assert graph.describe_job("table", {}) == "table"
    split = build_dag(execution={"rounds_per_job": 1, "clients_per_job": 2})
    _, run = get_first_run(split)
    block = run | {"round": "0003", "block": "0001"}
    assert split.describe_job("train", block) == "train FedAvg seed 0, round 3, block 1"
    assert split.describe_job("collect", run | {"stop": "0004"}) == "collect FedAvg seed 0, round 4"


def test_shell_prefix_sets_environment_of_jobs(tmp_path: Path) -> None:
    prefix = dag.format_shell_prefix({"FEDPIPE_CALLBACKS": "a {b} 'c'", "FEDPIPE_STACK": 4})
    command = prefix.format() + ' echo "$FEDPIPE_CALLBACKS|$FEDPIPE_STACK|$PYTHONPATH|${PATH%%:*}"'
    environment = os.environ | {"PYTHONPATH": "x"}
    result = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert result.stdout == f"a {{b}} 'c'|4|{tmp_path.resolve()}:x|{Path(sys.executable).parent}\n"


@pytest.mark.parametrize(
    "name", ["papers/published.csv", "papers/pages.py", "report/contrasts.py", "report/figures/panels.py"]
)
def test_hash_of_page_sources_depends_on_numbers_and_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of any of these files changes the hash."""
    before, read_bytes = dag.hash_paper_pages_sources(), Path.read_bytes
    edited = Path(dag.__file__).parents[1] / name
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"\n" * (path == edited))
    assert dag.hash_paper_pages_sources() != before
