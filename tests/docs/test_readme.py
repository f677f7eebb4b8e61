"""The studies and code of README.md and other pages run as written. tests/pipeline runs their commands."""

import importlib.metadata
import inspect
import re
import shlex
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.components import component, registry
from fedpipe.report import words
from fedpipe.settings import base, dataset, diagnostics, methods, parser
from tests import small_studies as studies
from tests.docs.page_blocks import PAGES, ROOT, blocks, commands, inline, read

GROUP: Any = get_command(app.app)
ALGORITHMS = registry.list_components(component.ALGORITHM)
STUDIES = [
    block
    for page in (
        *("README.md", "docs/custom-data.md", "docs/protocols.md", "docs/diagnostics.md", "docs/studies.md"),
        *("docs/concepts.md", "docs/switching.md", "docs/tuning.md"),
    )
    for block in blocks(page)
    if block.language == "yaml"
]
RESULTS = "benchmarks/RESULTS.md"
SVG = "{http://www.w3.org/2000/svg}"
NETWORK = """

def network(shape, classes):
    from torch import nn

    return nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes)
"""


@pytest.fixture
def folder(own_module: Path) -> Path:
    """A folder with own.py of the README, and the data of one of its studies."""
    (code,) = [block.text for block in blocks("README.md") if block.language == "python"]
    assert code.startswith("# own.py\n")
    own_module.write_text(code + NETWORK)
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (800, 12, 12)).astype(np.uint8), random.integers(0, 3, 800)
    Path("data").mkdir()
    np.savez("data/cells.npz", x_train=x[:600], y_train=y[:600], x_test=x[600:], y_test=y[600:])
    return own_module.parent


def run_fedpipe(*arguments: str) -> str:
    """Run a command in this process. Return its output."""
    result = CliRunner().invoke(app.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_code_blocks_have_known_languages() -> None:
    """Tests below select examples by language, so a new language would be skipped."""
    assert {block.language for block in blocks("README.md")} == {"", "yaml", "python", "bibtex"}
    assert {block.language for block in blocks("docs/custom-data.md")} == {"yaml"}
    assert {block.language for block in blocks("docs/architecture.md")} == {"", "mermaid"}
    assert {block.language for block in blocks("docs/protocols.md")} == {"yaml"}
    assert {block.language for block in blocks("docs/diagnostics.md")} == {"yaml"}
    assert {block.language for block in blocks("docs/studies.md")} == {"", "yaml", "latex"}
    assert {block.language for block in blocks("docs/concepts.md")} == {"yaml", "mermaid"}
    assert {block.language for block in blocks("docs/switching.md")} == {"sh", "yaml"}
    assert {block.language for block in blocks("docs/install.md")} == {""}
    assert {block.language for block in blocks("CONTRIBUTING.md")} == {"", "python"}
    assert {block.language for block in blocks("docs/tuning.md")} == {"", "yaml"}
    assert len(STUDIES) == 23


@pytest.mark.parametrize("block", STUDIES, ids=lambda block: block.section)
def test_study_of_page_is_planned_as_written(folder: Path, block: Any) -> None:
    Path("params.yaml").write_text(block.text)
    settings = yaml.safe_load(block.text)
    study = settings.get("study", {})
    if "path" in settings.get("dataset", {}):
        run_fedpipe("download")
        declared = Path("params.yaml").read_text()
        assert re.sub(r"  sha256: [0-9a-f]{64}\n", "", declared) == block.text, "the command adds only the SHA-256"
    planned = [line.split()[0] for line in run_fedpipe("plan", "--dry-run").splitlines()]
    assert list(dict.fromkeys(planned)) == study.get("algorithms", ["fedavg"])
    if "algorithms.feddw.mu" in (grid := study.get("grid", {})):
        points = len(study.get("seeds", [0])) * len(grid["partition.alpha"])
        assert planned.count("fedavg") == points, "mu does not multiply FedAvg's runs"
        assert planned.count("feddw") == points * len(grid["algorithms.feddw.mu"])


def test_method_without_entry_equals_method_with_empty_entry(folder: Path) -> None:
    Path("params.yaml").write_text("study: {algorithms: [fedavg, feddw]}\n")
    bare = run_fedpipe("plan", "--dry-run")
    Path("params.yaml").write_text("algorithms: {fedavg: {}, feddw: {}}\nstudy: {algorithms: [fedavg, feddw]}\n")
    assert run_fedpipe("plan", "--dry-run") == bare
    assert len(bare.splitlines()) == 2


# -- tables and numbers ------------------------------------------------------------------------------------------------


def read_source(algorithm: str) -> str:
    """Return the source of an algorithm from its docstring."""
    documented = inspect.getdoc(registry.find_component(component.ALGORITHM, algorithm)) or ""
    return " ".join(documented.partition("\nSource: ")[2].split())


def test_readme_lists_all_algorithms_and_each_has_source() -> None:
    section = read("README.md").partition("\n## Algorithms\n")[2].partition("\n## ")[0]
    listed = [name for line in re.findall(r"^- \*\*.*:\*\* (.*)$", section, flags=re.M) for name in line.split(", ")]
    titles = [get_title(name) for name in ALGORITHMS]
    assert sorted(listed) == sorted(titles)
    assert f"[{len(ALGORITHMS)} algorithms](#algorithms)" in read("README.md")
    assert f"| methods | {len(ALGORITHMS)} |" in read("README.md")
    for name in set(ALGORITHMS) - {"local"}:
        paper = read_source(name)
        assert re.match(r"[A-Z][\w ,]+(et al\.|and \w+), \S.* 20[12]\d", paper), f"{name}: {paper[:200]}"


def get_title(algorithm: str) -> str:
    """Return the name of an algorithm in tables."""
    return methods.get_algorithm_display_name(registry.build_component(component.ALGORITHM, algorithm, {}))


def test_readme_table_has_methods_and_columns_of_demo() -> None:
    """Accuracies depend on the processor, so the test checks only their format. `make demo` prints them."""
    lines = [line.strip("| ").split(" | ") for line in read("README.md").splitlines() if "±" in line or "(pers" in line]
    study = yaml.safe_load(read("params.yaml"))
    assert lines[0] == [
        "algorithm",
        *(words.format_metric_label(protocol) for protocol in study["evaluation"]["protocols"]),
        *("bytes down", "bytes up"),
    ]
    assert [cells[0] for cells in lines[1:]] == [get_title(label) for label in study["study"]["algorithms"]]
    assert all(re.fullmatch(r"\d\d\.\d\d ± \d\.\d\d|–", cell) for cells in lines[1:] for cell in cells[1:3])


def test_overview_picture_has_all_runs_of_demo() -> None:
    study = yaml.safe_load(read("params.yaml"))["study"]
    picture = ElementTree.fromstring(read("docs/images/overview.svg"))
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    titles = [get_title(label) for label in study["algorithms"]]
    assert all(texts.count(title) >= 2 for title in titles), "each title is next to the runs and in the table"
    runs = [box for box in picture.iter(f"{SVG}rect") if box.get("width") == "48"]
    assert len(runs) == len(titles) * len(study["seeds"])
    assert sum(box.get("class") == "run" for box in runs) == len(study["seeds"])
    assert "prefers-color-scheme: dark" in read("docs/images/overview.svg")


def test_readme_has_at_most_160_lines() -> None:
    assert len(read("README.md").splitlines()) <= 160


def test_readme_times_of_demo_and_sizes_of_environment_match_other_pages() -> None:
    readme, install, benchmarks = (" ".join(read(page).split()) for page in ("README.md", "docs/install.md", RESULTS))
    (wall_seconds,) = re.findall(r"<!-- demo -->.*?\| wall_s \| ([\d.]+) \|", benchmarks)
    seconds = round(float(wall_seconds))
    assert f"The demo takes {seconds} s on two cores" in readme
    assert f"to figures: {seconds} s on two cores" in install
    assert f"nine algorithms with three seeds, takes {seconds} s." in benchmarks
    sizes = re.search(
        r"takes ([\d.]+) GB: ([\d.]+) GB for .* ([\d.]+) GB for .* ([\d.]+) GB for the rest. .* takes ([\d.]+) GB\.",
        install,
    )
    assert sizes is not None
    complete, *parts, without_cuda = map(float, sizes.groups())
    assert complete == pytest.approx(sum(parts), abs=0.01)
    assert f"and {complete} GB, or {without_cuda} GB [without CUDA]" in readme


def read_benchmark_table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a line of benchmarks/RESULTS.md, without the header."""
    rows = read(RESULTS).partition(f"\n{heading}\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith("|")]


def test_readme_ratios_to_other_systems_match_benchmarks() -> None:
    readme, benchmarks = (" ".join(read(page).split()) for page in ("README.md", RESULTS))
    tables = [
        [row for row in read_benchmark_table(heading) if row[0] != "fedpipe"]
        for heading in (
            "MNIST, Dir(0.1), 20 clients, cnn4, batches of 10:",
            "CIFAR-10, Dir(0.5), 10 of 100 clients, ResNet-18, batches of 64:",
            "MNIST, IID, 10 of 1,000 clients, mlp, batches of 10:",
        )
    ]
    mnist, cifar, many_clients = ({row[0]: float(row[5]) for row in rows} for rows in tables)
    with_evaluation = [float(row[3]) for rows in tables[:2] for row in rows]
    assert [*mnist] == [*cifar] == [*many_clients] == ["PFLlib", "FL-bench", "fluke", "Flower"]
    (mnist_range, cifar_range, both_range) = (
        f"{min(ratios):.1f} to {max(ratios):.1f} times as long"
        for ratios in (mnist.values(), cifar.values(), [*mnist.values(), *cifar.values()])
    )
    systems = "On two CPU cores, PFLlib, FL-bench, fluke and Flower take"
    evaluation_range = f"{min(with_evaluation):.1f} to {max(with_evaluation):.1f} times with each system's evaluation"
    assert f"{systems} {both_range} to train a round of FedAvg on MNIST or CIFAR-10, and {evaluation_range}" in readme
    assert f"{systems} {mnist_range} as fedpipe" in benchmarks
    assert f"and {cifar_range} on CIFAR-10" in benchmarks
    assert f"fluke takes {many_clients['fluke']:.1f} times as long" in readme
    assert min(many_clients, key=many_clients.__getitem__) == "fluke"
    assert sorted(many_clients.values())[1] > 1, "only fluke is faster"


def test_readme_ratio_of_gpu_matches_benchmarks() -> None:
    header = next(line for line in read(RESULTS).splitlines() if line.startswith("| model | clients | clients in one"))
    lines = read(RESULTS).partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    seconds: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    case = ("", "")
    for line in lines:
        model, clients, stack, graphs, train, *_ = (cell.strip() for cell in line.split("|")[1:-1])
        case = (model, clients) if model else case
        seconds.setdefault(case, {})[stack, graphs] = float(train)
    ratios = [seconds["cnn4", clients]["1", "no"] / seconds["cnn4", clients]["32", "yes"] for clients in ("20", "100")]
    text = f"{int(min(ratios))} times as fast"
    assert f"[{text}]({RESULTS}#on-a-gpu) as one after the other" in " ".join(read("README.md").split())
    assert f"small CNN {text}](#on-a-gpu)" in read(RESULTS)
    assert f"they are {text} as the loop" in read(RESULTS)


def read_table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of a page, without the header."""
    section = read(page).partition(f"{heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def find_names(cell: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", cell)


def test_data_sets_table_matches_code() -> None:
    """The table also lists models that accept the data sets."""
    table = read_table("docs/custom-data.md", "\n## Published data sets")
    documented_names = [name for cells in table for name in find_names(cells[0])]
    assert sorted([*documented_names, dataset.GENERATED_DATASET]) == list(registry.list_components(component.DATASET))
    for datasets, samples, models in table[:-1]:
        size, shape = re.fullmatch(r"([\d,]+) (?:of ([\d×]+)|[a-z]+)", samples).groups()  # type: ignore[union-attr]
        for name in find_names(datasets):
            facts = parser.parse_dataset({"name": name}).dataset_info
            assert facts.size == int(size.replace(",", ""))
            assert shape is None or facts.shape == tuple(map(int, shape.split("×")))
            assert find_names(models)
            for model in find_names(models):
                registry.parse_component(component.MODEL, {"name": model}).check(facts.shape, facts.classes)  # type: ignore[attr-defined]
    assert table[-1][1] == "your own"


def test_diagnostics_table_matches_code() -> None:
    table = dict(read_table("docs/diagnostics.md", "\n## Kinds"))
    assert {kind.strip("`") for kind in table} == set(diagnostics.DIAGNOSTIC_KINDS)
    models = get_args(get_args(diagnostics.HeadNorms.model_fields["models"].annotation)[0])
    assert set(models) <= set(find_names(table["`head-norms`"]))


def test_protocols_page_matches_code() -> None:
    text = read("docs/protocols.md").partition("Protocols are named MODEL-on-TEST.")[2].partition("\n## ")[0]
    models = set(re.findall(r"^- `(\w+)`: ", text, flags=re.M))
    tests = text.partition("The test set is ")[2]
    protocols = set(get_args(base.Protocol))
    assert models == {protocol.partition("-on-")[0] for protocol in protocols}
    assert {f"{model}-on-{test}" for model in models for test in ("global", "local", "validation")} <= protocols
    assert {protocol for protocol in protocols if protocol.endswith("-on-train")} == set(
        re.findall(r"`(\w+-on-train)`", tests)
    )
    assert {"global", "local", "validation"} <= set(find_names(tests))


def test_cpu_installation_omits_only_packages_of_cuda_build() -> None:
    """Only torch and omitted packages need the packages that the page's pattern omits."""
    (line,) = [line for line in commands("docs/install.md") if "requirements.lock" in line]
    pattern = line.partition("grep -vE '")[2].partition("'")[0]
    locked = re.findall(r"^([\w.-]+)==(\S+)", read("requirements.lock"), flags=re.M)
    omitted = {name for name, _ in locked if re.search(pattern, name)}
    assert len(omitted) > 10
    for installed in importlib.metadata.distributions():
        name = installed.metadata["Name"].lower().replace("_", "-")
        needed = {re.split(r"[^\w.-]", text)[0].lower() for text in installed.requires or () if "extra ==" not in text}
        assert name in {"torch", *omitted} or not needed & omitted, f"{name} needs {sorted(needed & omitted)}"
    (line,) = [line for line in commands("docs/install.md") if "--index-url" in line]
    assert re.findall(r"(\w+)==(\S+)", line) == [pair for pair in locked if pair[0] in {"torch", "torchvision"}]
    assert "touch .venv/bin/.installed" in commands("docs/install.md")[-1]
    assert "$(BIN)/.installed: requirements.lock" in read("Makefile")


# -- commands and links ------------------------------------------------------------------------------------------------


def check_command(command: list[str]) -> None:
    """Fail if `fedpipe` has no such command, or the command no such option."""
    name, *arguments = command
    assert name in GROUP.commands, f"fedpipe {name}"
    options = {option for parameter in GROUP.commands[name].params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("-")} <= options, f"fedpipe {' '.join(command)}"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_fedpipe_commands_of_page_exist(page: str) -> None:
    lines = [line for line in commands(page) if line.startswith("fedpipe ")] if page in PAGES else []
    for line in [*lines, *inline(page, "fedpipe")]:
        arguments = shlex.split(line)[1:]
        if arguments[0].startswith("--"):
            assert arguments[0] in {option for parameter in GROUP.params for option in parameter.opts}, line
        else:
            check_command(arguments)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_of_page_are_valid(page: str) -> None:
    def find_anchors(text: str) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

    for target in re.findall(r"(?:\]\(|href=\")([^)\"]+)[)\"]", read(page)):
        if target.startswith(("https://", "../../actions")):  # GitHub's pages of this repository
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in find_anchors(file.read_text()), target


def test_files_and_folders_of_architecture_page_exist() -> None:
    listings = [block for block in blocks("docs/architecture.md") if block.section == "Files and folders"]
    assert len(listings) == 1
    entries = [re.split(r"\s{2,}", line)[0] for block in listings for line in block.lines if not line.startswith(" ")]
    generated = ("results/", "results/.provenance")
    for path in (path for entry in entries for path in entry.split(", ")):
        assert path.startswith(generated) or (ROOT / path).exists(), path
    assert len(entries) > 20


def test_paths_in_contributing_exist() -> None:
    examples = {block.lines[0].removeprefix("# ") for block in blocks("CONTRIBUTING.md") if block.language == "python"}
    written = {"fedpipe/algorithms/my_avg.py", "tests/algorithms/test_my_avg.py", *examples}
    for path in re.findall(r"`((?:fedpipe|tests|workflow)/[\w/.]+)`", read("CONTRIBUTING.md")):
        assert (ROOT / path).exists() or path in written, path
    assert not any((studies.ROOT / path).exists() for path in written), (
        "a file of the project has the path of an example"
    )
