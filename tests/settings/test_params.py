"""params.yaml: defaults, the JSON Schema, and one message for each error, which begins with its key."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.storage import files, layout
from fedpipe.planning import download, planner
from fedpipe.settings import federation, loader, methods, parser
from fedpipe.settings.params import Params
from fedpipe.settings.schema import build_json_schema
from tests import small_studies as studies
from tests.docs.page_blocks import PAGES, blocks
from tests.errors import rejects
from tests.small_studies import ROOT

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SECTIONS = ", ".join(Params.model_fields)


def list_errors(changes: dict[str, Any]) -> list[str]:
    """Return the error messages of `fedpipe plan` for the tests' study with other values at dotted keys."""
    studies.write(loader.override_settings(studies.settings(), changes), Path())
    with pytest.raises(SettingsError) as error:
        planner.make_plan(Path("params.yaml"))
    return str(error.value).split("\n")


def test_each_error_in_params_is_on_its_own_line() -> None:
    changes = {"federation.learning_rate": -1, "federation.client": 2, "datasett": {}}
    keys = [message.partition(" ")[0] for message in sorted(list_errors(changes))]
    assert keys == ["datasett:", "federation.client:", "federation.learning_rate:"]


def test_component_errors_do_not_hide_other_errors() -> None:
    changes = {
        "partition.alpha": -1,
        "model.name": "mpl",
        "dataset.name": "digit",
        "federation.clients": 0,
        "algorithms": {"fedavg": {}, "fedprox": {"muu": 1}},
    }
    keys = [line.partition(":")[0] for line in list_errors(changes)]
    assert {"partition.alpha", "model.name", "dataset.name", "federation.clients"} <= set(keys)


def test_every_error_message_contains_grid_point() -> None:
    messages = list_errors({"study.grid": {"federation.clients": [0], "federation.participation": [2]}})
    assert len(messages) == 2
    assert all("federation.clients: 0, federation.participation: 2" in message for message in messages)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "outline"),
    [
        (None, "params.yaml: the file does not exist"),
        *[
            (text, "params.yaml: not a mapping")
            for text in (b"", b"# nothing but a comment\n", b"- fedavg\n", b"fedavg\n")
        ],
        (b"federation: {clients: 10\n", "params.yaml: not valid YAML (line 2, column 1: expected ',' or '}'"),
        (b"federation: " + b"[" * 5000 + b"]" * 5000, "params.yaml: ... nested too deeply ... 100 levels"),
        (b"# caf\xe9\n", "params.yaml: not UTF-8 text (invalid continuation byte at byte 5)"),
        # PyYAML would use the last section and ignore the first.
        (b"federation: {clients: 5}\nmodel: {}\nfederation: {rounds: 2}\n", "federation: duplicate key, lines 1 and 3"),
    ],
    ids=["missing", "empty", "comment", "list", "text", "no-yaml", "deep", "not-utf-8", "duplicate-key"],
)
def test_unreadable_params_file_is_rejected(content: bytes | None, outline: str) -> None:
    if content is not None:
        Path("params.yaml").write_bytes(content)
    with rejects(outline):
        planner.make_plan(Path("params.yaml"))


def test_params_path_that_is_a_folder_is_rejected() -> None:
    Path("params.yaml").mkdir()
    with rejects("params.yaml: can't be read (Is a directory)"):
        planner.make_plan(Path("params.yaml"))


def test_yaml_merge_key_merges_parameters() -> None:
    """With a merge key, two entries can share most of their parameters."""
    text = "algorithms:\n  feddw: &dw {mu: 1.0, mode: code}\n  other: {<<: *dw, algorithm: feddw, mu: 2.0}\n"
    Path("params.yaml").write_text(text)
    algorithms = loader.read_params(Path("params.yaml"))["algorithms"]
    assert algorithms["other"] == {"algorithm": "feddw", "mu": 2.0, "mode": "code"}


def test_key_that_is_not_text_is_rejected() -> None:
    studies.write({**studies.settings(), 3: {}}, Path())  # type: ignore[dict-item]
    with rejects(f"3: unknown key ... {SECTIONS}"):
        planner.make_plan(Path("params.yaml"))


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_parser_fills_in_defaults() -> None:
    params = parser.parse_params({})
    assert params.federation == federation.Federation()
    assert (params.federation.clients, params.federation.rounds, params.federation.optimizer) == (10, 20, "sgd")
    assert params.dataset.name == "digits"
    sections = params.model_dump(mode="json")
    assert sections["partition"] == {"scheme": "dirichlet", "alpha": 0.5, "minimum": 1, "seed": None}
    cnn = {"name": "cnn", "channels": [16, 32], "hidden": 64, "batch_norm": False, "bias": True}
    assert sections["model"] == {**cnn, "weights": None, "sha256": None}
    assert params.study.algorithms == ("fedavg",)
    assert params.study.seeds == (0,)
    assert params.artifacts.keep_models == "all"
    assert params.execution.stack == "auto"


def test_given_value_replaces_only_its_default() -> None:
    algorithms = {"fedavg": {}, "feddw": {"mode": "code"}}
    params = parser.parse_params({"federation": {"clients": 7}, "algorithms": algorithms})
    assert params.federation == federation.Federation(clients=7)
    algorithm: Any = params.algorithms["feddw"].algorithm
    assert (algorithm.mu, algorithm.mode) == (0.1, "code")


def test_algorithm_entry_may_have_custom_name() -> None:
    entries = {"strong": {"algorithm": "fedprox", "mu": 5}}
    params = parser.parse_params({"algorithms": entries, "study": {"algorithms": ["strong"]}})
    algorithm: Any = params.algorithms["strong"].algorithm
    assert type(algorithm).__name__ == "FedProx"
    assert algorithm.mu == 5.0


def test_exponents_without_a_dot_are_numbers() -> None:
    """YAML 1.1 reads 1e-3 as text."""
    assert parser.parse_params(yaml.safe_load("federation: {learning_rate: 1e-3}")).federation.learning_rate == 0.001


# -- JSON Schema -------------------------------------------------------------------------------------------------------


def list_problems(settings: Any) -> list[Any]:
    schema = build_json_schema()
    return list(jsonschema.validators.validator_for(schema)(schema).iter_errors(settings))


def read_shipped_settings() -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    return settings


def test_shipped_study_matches_parser_and_schema() -> None:
    params = parser.parse_params(read_shipped_settings())
    assert len(params.study.algorithms) == 9
    assert params.study.seeds == (0, 1, 2)
    assert list_problems(read_shipped_settings()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda path: path.name)
def test_other_studies_match_parser_and_schema(path: Path) -> None:
    settings = yaml.safe_load(path.read_text())
    parser.parse_params(settings)
    assert list_problems(settings) == []


def test_paper_studies_and_docs_examples_match_schema() -> None:
    """Editors check them with the schema. Other tests plan these studies."""
    schema = build_json_schema()
    validator = jsonschema.validators.validator_for(schema)(schema)
    papers = [path for path in (ROOT / "studies/papers").rglob("*.yaml") if path.name != layout.DVC_YAML]
    examples = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert len(papers) > 30
    assert len(examples) > 15
    for name, text in [
        *((path, path.read_text()) for path in papers),
        *((block.section, block.text) for block in examples),
    ]:
        assert not list(validator.iter_errors(yaml.safe_load(text))), name


@pytest.mark.parametrize(
    "changes",
    [
        {"datasett": {}},
        {"federation.client": 3},
        {"federation.clients": "ten"},
        {"federation.participation": 1.5},
        {"partition.alfa": 1},
        {"partition.alpha": -1},
        {"partition.scheme": "dirichlett"},
        {"model.name": "cnn6"},
        {"model.chanels": [1, 2]},
        {"dataset.name": "digit"},
        {"evaluation.protocols": ["global-on-globel"]},
        {"algorithms.fedprox.muu": 1},
        {"algorithms.fedprox.mu": "strong"},
        {"study.seeds": 3},
        {"study.seeds": []},
        {"artifacts.keep_models": 0},
    ],
    ids=str,
)
def test_schema_rejects_invalid_settings(changes: dict[str, Any]) -> None:
    assert list_problems(loader.override_settings(read_shipped_settings(), changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithms.half": {"algorithm": "own.Half", "share": 0.25}},
        {"partition": {"scheme": "own.Scheme"}},
        {"model": {"name": "own.Model"}},
        {"dataset.name": "own.Data"},
        {"partition": {"alpha": 0.3}},  # the scheme has a default
        {"partition": {}},
        {"execution.stack": 8},
        {"study.grid": {"partition.alpha": [0.1, 0.5]}},
    ],
    ids=str,
)
def test_schema_accepts_settings_that_parser_accepts(changes: dict[str, Any]) -> None:
    assert list_problems(loader.override_settings(read_shipped_settings(), changes)) == []


def test_schema_file_of_params_yaml_is_current() -> None:
    first = (ROOT / "params.yaml").read_text().split("\n", 1)[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    path = ROOT / match[1]
    assert path.is_file(), f"editors can't find {match[1]}"
    assert json.loads(path.read_text()) == build_json_schema(), "type `make docs`"


def test_text_model_needs_vocabulary_of_dataset() -> None:
    text = {"dataset": {"name": "imdb", "vocabulary": 10_000}, "study": {"algorithms": ["fedavg"]}}
    assert parser.parse_params(text | {"model": {"name": "bilstm", "vocabulary": 10_000}})
    with pytest.raises(SettingsError, match=r"^model\.vocabulary: 9999 .*at least 10000"):
        parser.parse_params(text | {"model": {"name": "bilstm", "vocabulary": 9_999}})


@pytest.mark.parametrize(("name", "other"), [("mlp", "bilstm, fasttext"), ("fasttext", "cnn, cnn4")])
def test_packaged_model_rejects_wrong_input_type(name: str, other: str, in_empty_folder: Path) -> None:
    np.savez("rows.npz", x=np.random.default_rng(0).random((20, 5)), y=np.arange(20) % 2)
    rows = {"name": "npz", "path": "rows.npz", "sha256": files.compute_file_sha256(Path("rows.npz")), "split": "pooled"}
    data = {"name": "imdb"} if name == "mlp" else rows
    download.load_and_save_dataset(parser.parse_dataset(rows).effective_dataset, parser.parse_dataset(rows).fetcher)
    kind = "token ids" if name == "mlp" else "numbers"
    with pytest.raises(SettingsError, match=rf"^model\.name: '{name}' .*{kind} .*{other}"):
        parser.parse_params({"dataset": data, "model": {"name": name}, "federation": {"clients": 2}})


def test_single_number_equals_list_of_one_number() -> None:
    """A number and a list of one number must have the same key."""
    number, numbers = (
        parser.parse_params({"transforms": transforms}).transforms
        for transforms in ({"mean": 0.5, "std": "2e-1"}, {"mean": [0.5], "std": [0.2]})
    )
    assert number.model_dump_json() == numbers.model_dump_json()
    for value, text in ((True, "true"), ("grey", "'grey'"), ({}, "{}")):
        with pytest.raises(SettingsError, match=rf"^transforms\.mean: {text} .* list"):
            parser.parse_params({"transforms": {"mean": value}})
    with pytest.raises(SettingsError, match=r"^transforms\.std: 0 .* greater than 0"):
        parser.parse_params({"transforms": {"std": 0}})


def test_transforms_need_images() -> None:
    text = {"dataset": {"name": "imdb"}, "model": {"name": "bilstm", "vocabulary": 10_000}}
    with pytest.raises(SettingsError, match=r"^transforms\.flip: True is for images, .*\(200,\)"):
        parser.parse_params(text | {"transforms": {"flip": True}})
    with pytest.raises(SettingsError, match=r"^transforms\.mean: \[0\.5\] .*Remove it\.$"):
        parser.parse_params(text | {"transforms": {"mean": 0.5}})
    color = {"dataset": {"name": "cifar10"}, "model": {"name": "cnn4"}}
    assert parser.parse_params(color | {"transforms": {"mean": [0.5], "std": [0.2, 0.2, 0.3]}})
    with pytest.raises(SettingsError, match=r"^transforms\.std: \[0\.2, 0\.3\] .*one number, or 3"):
        parser.parse_params(color | {"transforms": {"std": [0.2, 0.3]}})


def test_scaffold_accepts_dw() -> None:
    study = {"study": {"algorithms": ["scaffold"]}}
    parsed = parser.parse_params(study | {"algorithms": {"scaffold": {"dw": {"mu": 2.0}}}})
    assert parsed.algorithms["scaffold"].algorithm.dw.mu == 2.0
    with rejects("algorithms.scaffold.dw.mu: -1"):
        parser.parse_params(study | {"algorithms": {"scaffold": {"dw": {"mu": -1}}}})


def test_fednova_with_adam_needs_explicit_setting() -> None:
    settings = {"federation": {"optimizer": "adam"}, "study": {"algorithms": ["fednova"]}}
    assert parser.parse_params(settings | {"algorithms": {"fednova": {"adam": True}}})


def test_suggest_name_finds_algorithm_by_display_name() -> None:
    names = registry.list_components(component.ALGORITHM)
    for name in names:
        algorithm = registry.parse_component(component.ALGORITHM, {}, name)
        assert suggest_name(methods.get_algorithm_display_name(algorithm), names) == f"Did you mean '{name}'?"


def test_suggest_name_lists_all_near_names() -> None:
    names = registry.list_components(component.ALGORITHM)
    assert suggest_name("fedpr", names) == "Did you mean 'fedpvr', 'fedper' or 'fedprox'?"
    assert suggest_name("fedavgg", names) == "Did you mean 'fedavg'?"
    assert suggest_name("xyz", ["a", "b"]) == "Use one of: a, b."


def test_transforms_error_for_numeric_table_advises_standardization() -> None:
    np.savez("own.npz", x=np.ones((10, 4)), y=np.arange(10) % 2)
    dataset = {"name": "npz", "path": "own.npz", "split": "pooled"}
    sections: dict[str, Any] = {"dataset": dataset, "federation": {"clients": 2}, "transforms": {"mean": 0.5}}
    studies.write(studies.settings(**sections), Path())
    download.download_and_pin_dataset(None, Path("params.yaml"))
    with pytest.raises(SettingsError, match=r"^transforms\.mean: \[0\.5\] .*\(4,\)\. Remove it\. .*standardize them"):
        planner.make_plan(Path("params.yaml"))
