"""Partitions by a column of the data set: natural clients and domains, from each file format to the results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import fedpipe
from fedpipe.cli import app
from fedpipe.core.components import component, registry
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files, layout
from fedpipe.data import store
from fedpipe.data.assignment import Assignment, assign_samples
from fedpipe.data.partitions.base import ColumnScheme
from fedpipe.data.partitions.by_domain import ByDomain
from fedpipe.data.partitions.natural import Natural
from fedpipe.data.samples import Column
from fedpipe.planning import download, planner
from tests import small_studies as studies
from tests.data.repositories import encode_image, write_image
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")

Split = Literal["official", "pooled"]
DIGITS = load_digits()
PIXELS, LABELS = DIGITS.data[:600], DIGITS.target[:600].astype(np.int64)
IMAGES = (DIGITS.images[:600] * 15).astype(np.uint8)
WRITERS = np.array([f"w{number:02}" for number in np.random.default_rng(0).integers(0, 17, len(LABELS))])
WRITERS[:3] = "few"
FEDERATION = {"clients": 6, "rounds": 1, "participation": 1.0, "batch_size": 40, "learning_rate": 0.1}


def write_study(dataset: dict[str, Any], partition: dict[str, Any], **sections: Any) -> None:
    base = studies.settings(dataset=dataset, federation=FEDERATION, **sections)
    studies.write(base | {"partition": partition}, Path())


def declare_dataset(dataset: dict[str, Any], partition: dict[str, Any], **sections: Any) -> None:
    """Write a study, store its data set and add the SHA-256, like `fedpipe download`."""
    write_study({"split": "pooled", **dataset}, partition, **sections)
    download.download_and_pin_dataset(None, Path("params.yaml"))


def read_assignment(plan: planner.NewPlan) -> Assignment:
    (key,) = plan.partitions
    path = layout.get_assignment_path(key)
    return Assignment.read(path, files.read_recorded_sha256(path))


def write_npz() -> dict[str, Any]:
    np.savez("own.npz", x=PIXELS / 16, y=LABELS, writer=WRITERS)
    return {"name": "npz", "path": "own.npz"}


def write_split_npz() -> dict[str, Any]:
    """Write training and test arrays, and bytes instead of texts."""
    x, writer = PIXELS / 16, WRITERS.astype("S")
    parts = {"x_train": x[:450], "y_train": LABELS[:450], "x_test": x[450:], "y_test": LABELS[450:]}
    np.savez("own.npz", **parts, writer_train=writer[:450], writer_test=writer[450:], other_train=np.arange(3))
    return {"name": "npz", "path": "own.npz"}


def write_images() -> dict[str, Any]:
    """Write a table as Hugging Face does: images as structs, class names in the metadata."""
    cells = [{"bytes": encode_image(pixels), "path": None} for pixels in IMAGES]
    table = pa.table({"image": cells, "label": LABELS, "writer": WRITERS})
    features = {"label": {"names": [f"digit {number}" for number in range(10)], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    files.write_parquet(Path("own.parquet"), table.replace_schema_metadata(metadata))
    return {"name": "parquet", "path": "own.parquet"}


def write_features() -> dict[str, Any]:
    frame = pd.DataFrame(PIXELS, columns=[f"p{column}" for column in range(64)])
    frame.assign(digit=LABELS, writer=pd.Categorical(WRITERS)).to_parquet("own.parquet")
    return {"name": "parquet", "path": "own.parquet", "input": [*frame.columns], "label": "digit"}


def write_folder() -> dict[str, Any]:
    for row, (pixels, label, writer) in enumerate(zip(IMAGES, LABELS, WRITERS, strict=True)):
        write_image(f"pictures/{writer}/{label}/{row:04}.png", pixels)
    return {"name": "folder", "path": "pictures", "levels": ["writer", "label"]}


@pytest.mark.parametrize("write", [write_npz, write_split_npz, write_images, write_features, write_folder])
def test_natural_partition_assigns_each_writer_its_samples(write: Callable[[], dict[str, Any]]) -> None:
    partition = {"scheme": "natural", "column": "writer", "minimum": 20}
    declare_dataset(write(), partition, model={"name": "mlp", "hidden": [16]})
    plan = studies.prepare(planner.loader.read_params(Path("params.yaml")))
    assignment = read_assignment(plan)
    samples = store.load_samples(layout.get_dataset_path(plan.runs[0].dataset))
    assert [*assignment.names] == sorted(assignment.names)
    assert set(assignment.names) < {*WRITERS} - {"few"}
    assert len(assignment.names) == 6
    column = samples.columns["writer"]
    for name, train, test in zip(assignment.names, assignment.train, assignment.test, strict=True):
        owned = np.sort(np.concatenate([train, test]))
        assert np.array_equal(owned, np.flatnonzero(column.codes == column.names.index(name)))
        assert len(owned) == (name == WRITERS).sum()  # type: ignore[attr-defined]
        assert sorted(samples.y[owned].tolist()) == sorted(LABELS[name == WRITERS].tolist())


# -- columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "names", "codes"),
    [
        (np.array([10, 9, 10, 2]), ("2", "9", "10"), [2, 1, 2, 0]),
        (["b", None, "a", "b"], ("a", "b"), [1, -1, 0, 1]),
        (np.array([1.5, np.nan, -1.0, 1.5]), ("-1.0", "1.5"), [1, -1, 0, 1]),
        (np.array([True, False]), ("False", "True"), [1, 0]),
        (pa.chunked_array([["x"], ["y", "x"]]), ("x", "y"), [0, 1, 0]),
        (pd.Categorical(["y", "x", None], categories=["y", "z", "x"]), ("x", "y", "z"), [1, 0, -1]),
        (np.array([None, None], dtype=object), (), [-1, -1]),
        (pa.chunked_array([[1.0, np.nan], [2.0, None, np.nan]]), ("1.0", "2.0"), [0, -1, 1, -1, -1]),
        (pa.array([2.0, np.nan, -1.0, 2.0]).dictionary_encode(), ("-1.0", "2.0"), [1, -1, 0, 1]),
    ],
    ids=[
        *("integers", "texts", "floats", "booleans", "chunks", "categories", "missing"),
        *("arrow-floats", "float-categories"),
    ],
)
def test_column_codes_follow_sorted_values(values: Any, names: tuple[str, ...], codes: list[int]) -> None:
    column = Column.from_values(values)
    assert column.names == names
    assert column.codes.tolist() == codes


def get_stored_path() -> Path:
    """Path of the stored data set of the study in params.yaml."""
    (run,) = planner.make_plan(Path("params.yaml")).runs
    return layout.get_dataset_path(run.dataset)


def test_npz_arrays_of_other_shapes_are_not_columns() -> None:
    """A scalar, and an array of another length, with two axes or of Python objects, are ignored."""
    other = np.array([{"a": 1}, None], dtype=object)
    arrays = {"x": PIXELS, "y": LABELS, "pixels": IMAGES, "few": np.arange(3), "thing": other, "version": np.array(3)}
    np.savez("own.npz", **arrays)
    declare_dataset({"name": "npz", "path": "own.npz"}, {"scheme": "iid"})
    assert not store.load_samples(get_stored_path()).columns
    assert files.read_pt(get_stored_path()).keys() == {"x", "y", "test"}, "the stored file has no columns"
    np.savez("own.npz", **arrays, writer=WRITERS)
    declare_dataset({"name": "npz", "path": "own.npz"}, {"scheme": "natural", "column": "writer"})
    assert [*store.load_samples(get_stored_path()).columns] == ["writer"]


def test_pandas_index_is_not_a_column() -> None:
    """`to_parquet` writes the index after a shuffle. The only other column is that of the clients."""
    frame = pd.DataFrame(PIXELS, columns=[f"p{column}" for column in range(64)])
    frame.assign(digit=LABELS, writer=WRITERS).sample(frac=1, random_state=0).to_parquet("own.parquet")
    dataset = {"name": "parquet", "path": "own.parquet", "input": [*frame.columns], "label": "digit"}
    declare_dataset(dataset, {"scheme": "natural", "minimum": 10})
    assert [*store.load_samples(get_stored_path()).columns] == ["writer"]


def test_folder_levels_contain_split_label_and_writer() -> None:
    rows = {"train/cat/ann/1.png": 1, "train/dog/bob/old/1.png": 2, "test/dog/ann/1.png": 3}
    for name, row in rows.items():
        write_image(f"pictures/{name}", IMAGES[row])
    settings = {"name": "folder", "path": "pictures", "levels": ["split", "label", "writer"]}
    source: Any = registry.parse_component(component.DATASET, settings)
    samples = source._read(Path("pictures"))
    assert np.array_equal(samples.x[:, 0], IMAGES[[3, 1, 2]])
    assert samples.y.tolist() == [1, 0, 1]
    assert samples.test.tolist() == [True, False, False]
    assert samples.columns["writer"].names == ("ann", "bob")
    assert samples.columns["writer"].codes.tolist() == [0, 0, 1]
    write_image("pictures/train/cat/2.png", IMAGES[0])
    with pytest.raises(ArtifactError, match=r"^dataset\.levels: pictures/train/cat/2\.png is not in 3 folders"):
        source._read(Path("pictures"))
    with pytest.raises(SettingsError, match=r"^dataset\.levels: \[domain\] can't be used"):
        registry.parse_component(component.DATASET, settings | {"levels": ["domain"]})
    write_image("others/val/cat/ann/1.png", IMAGES[1])
    with pytest.raises(ArtifactError, match=r"^others: the folder of split 'val' can't be used"):
        source._read(Path("others"))
    Path("others/val/cat/ann/1.png").unlink()
    with pytest.raises(ArtifactError, match=r"^others contains no images\. .*\(split/label/writer\)"):
        source._read(Path("others"))


# -- schemes -----------------------------------------------------------------------------------------------------------


def assign_writers(
    scheme: ColumnScheme, clients: int, split: Split = "pooled", seed: int = 0, values: Any = WRITERS
) -> Assignment:
    test, columns = np.arange(len(WRITERS)) % 4 == 0, {"writer": Column.from_values(values)}
    return Assignment.from_table(assign_samples(scheme, LABELS, test, clients, split, 0.25, seed, columns=columns))


def test_natural_partition_draws_clients_with_seed() -> None:
    drawn = {assign_writers(Natural(), 5, seed=seed).names for seed in range(5)}
    assert len(drawn) == 5
    assert assign_writers(Natural(), 5, seed=3).names in drawn
    assert len({assign_writers(Natural(seed=1), 5, seed=seed).names for seed in range(5)}) == 1
    client_names = {assign_writers(Natural(), 18, seed=seed).names for seed in range(3)}
    assert client_names == {tuple(sorted({*WRITERS}))}


def test_natural_partition_assigns_official_test_samples_to_writers() -> None:
    assignment = assign_writers(Natural(minimum=20), 6, "official")
    for name, train, test in zip(assignment.names, assignment.train, assignment.test, strict=True):
        (own,) = (name == WRITERS).nonzero()  # type: ignore[attr-defined]
        assert np.array_equal(train, own[own % 4 != 0])
        assert np.array_equal(test, own[own % 4 == 0])
    assert np.array_equal(assignment.global_test, np.arange(0, len(WRITERS), 4)), (
        "the global test set includes writers that are not clients"
    )


@pytest.mark.parametrize("split", ["pooled", "official"])
def test_by_domain_clients_have_samples_of_one_domain(split: Split) -> None:
    domains = np.array(["sketch", "photo", "art"])[np.arange(len(WRITERS)) % 3]
    scheme = ByDomain(alpha=0.1, minimum=5)
    first, again, other = (assign_writers(scheme, 6, split, seed, domains) for seed in (0, 0, 1))
    assert first.names == ("art 1", "art 2", "photo 1", "photo 2", "sketch 1", "sketch 2")
    for name, train, own_test in zip(first.names, first.train, first.test, strict=True):
        assert {*domains[np.concatenate([train, own_test])]} == {name.split()[0]}
        assert len(train) + len(own_test) * (split == "pooled") >= 5
    owned = np.concatenate([*first.train, *first.test])
    assert np.array_equal(np.sort(owned), np.arange(len(WRITERS)))
    assert np.array_equal(first.class_counts, again.class_counts)
    assert not np.array_equal(first.class_counts, other.class_counts)
    assert first.class_counts[0].argmax() != first.class_counts[1].argmax(), (
        "alpha 0.1 gives different classes to the two clients"
    )


def test_by_domain_with_one_client_per_domain_keeps_names() -> None:
    assert assign_writers(ByDomain(), 18).names == tuple(sorted({*WRITERS}))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "clients", "problem"),
    [
        (Natural(column="wrter"), 3, "partition.column: 'wrter' is not a column of the data set, which has writer."),
        (Natural(), 19, "federation.clients: 19 is more than the 18 clients of the data set. Use at most 18."),
        (
            Natural(minimum=20),
            18,
            "federation.clients: 18 is more than the 17 clients of the data set (1 have fewer than partition.minimum:",
        ),
        (ByDomain(), 20, "federation.clients: 20 can't be divided by the 18 domains of the data set. Use 18 or 36."),
        (ByDomain(), 4, "federation.clients: 4 can't be divided by the 18 domains of the data set. Use 18."),
        (ByDomain(minimum=2), 36, "partition.minimum: 2 for each of 2 clients is more than the 3 samples"),
    ],
)
def test_column_scheme_rejects_invalid_settings(scheme: ColumnScheme, clients: int, problem: str) -> None:
    with rejects(problem):
        assign_writers(scheme, clients)


@pytest.mark.parametrize(
    ("arrays", "partition", "problem"),
    [
        ({}, {"column": "writer"}, "partition.column: 'writer' is not in the stored data set, which has only inputs"),
        ({}, {}, "partition.column: missing, because it is not in the stored data set"),
        (
            {"writer": WRITERS, "age": np.arange(len(WRITERS))},
            {},
            "partition.column: missing, but the data set has several columns. Use one of: age, writer.",
        ),
        (
            {"age": np.where(WRITERS == "few", np.nan, 1.0)},
            {},
            "partition.column: 'age' has no value for 3 of 600 samples, first for sample 0.",
        ),
        ({"writer": WRITERS}, {"minimum": 200}, "federation.clients: 6 is more than the 0 clients"),
    ],
)
def test_plan_rejects_invalid_column_in_one_line(
    arrays: dict[str, Any], partition: dict[str, Any], problem: str
) -> None:
    np.savez("own.npz", x=PIXELS, y=LABELS, **arrays)
    declare_dataset({"name": "npz", "path": "own.npz"}, {"scheme": "natural", **partition})
    with rejects(problem):
        planner.make_plan(Path("params.yaml"))


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        (
            {"writer": WRITERS.astype(object)},
            "the array writer contains Python objects, or bytes that are not UTF-8. Save",
        ),
        ({"writer": WRITERS.astype(object), "age": LABELS}, "the array writer contains Python objects"),
        ({"writer": WRITERS[1:]}, "the array writer has dtype <U3 and shape (599,), but there are 600 samples. Save"),
        ({"writer_train": WRITERS[1:]}, "the array writer_train has dtype <U3 and shape (599,), but there are"),
        ({"writer": LABELS * 1j}, "the array writer has dtype complex128 and shape (600,)"),
    ],
)
def test_plan_explains_why_npz_array_is_not_a_column(arrays: dict[str, Any], problem: str) -> None:
    np.savez("own.npz", x=PIXELS, y=LABELS, **arrays)
    declare_dataset({"name": "npz", "path": "own.npz"}, {"scheme": "natural", "column": "writer"})
    partitions: list[dict[str, Any]] = [{"column": "writer"}, *([] if "age" in arrays else [{}])]
    for partition in partitions:
        with rejects(f"partition.column: 'writer' is not in the stored data set, because {problem}") as error:
            make_plan({"scheme": "natural", "column": None} | partition)
        assert str(error.value).endswith(", and run `fedpipe download`.")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([[writer] for writer in WRITERS], "is not in the stored data set, because it contains list<"),
        (np.where(WRITERS == "few", np.nan, LABELS % 2), "has no value for 3 of 600 samples, first for"),
    ],
    ids=["lists", "nan"],
)
def test_plan_rejects_invalid_parquet_column(values: Any, problem: str) -> None:
    """Only nulls are missing values of Arrow, but pandas, Polars and NumPy write NaN."""
    files.write_parquet(Path("own.parquet"), pa.table({"pixel": PIXELS[:, 1], "label": LABELS, "writer": values}))
    dataset = {"name": "parquet", "path": "own.parquet", "input": ["pixel"]}
    declare_dataset(dataset, {"scheme": "natural", "column": "writer"})
    with rejects(f"partition.column: 'writer' {problem}"):
        planner.make_plan(Path("params.yaml"))


def test_error_about_unknown_column_lists_columns_once() -> None:
    with rejects("partition.column: 'label' is not ... Inputs and labels can't be used") as error:
        Natural(column="label").find_column({"writer": Column.from_values(WRITERS)})
    assert str(error.value).count("writer") == 1


def test_natural_partition_rejects_dataset_without_columns() -> None:
    write_study({"name": "digits"}, {"scheme": "natural", "column": "writer"})
    with pytest.raises(SettingsError, match=r"^dataset\.name: 'digits' is not stored yet"):
        planner.make_plan(Path("params.yaml"))
    download.download_and_pin_dataset(None, Path("params.yaml"))
    with pytest.raises(SettingsError, match=r"^partition\.column: 'writer' is not in the stored data set"):
        planner.make_plan(Path("params.yaml"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"input": ["p0", "nothing"]}, "own.parquet has no column 'nothing'. ... p63"),
        ({"input": ["p0", "writer"]}, "dataset.input: column 'writer' of own.parquet contains"),
        ({"input": ["p0", "p0"]}, "dataset.input: p0, p0 contains a column twice"),
        ({"input": None}, "own.parquet has the columns p0, p1, ... p63"),
    ],
)
def test_dataset_input_rejects_invalid_columns(settings: dict[str, Any], problem: str) -> None:
    with rejects(problem, ArtifactError) as error:
        declare_dataset(write_features() | settings, {"scheme": "natural"})
    assert str(error.value).count("p63") == ("p63" in problem), "other columns are listed once"


# -- names -------------------------------------------------------------------------------------------------------------


def test_preview_warning_and_results_contain_client_names() -> None:
    """One client has three samples and no test sample."""
    dataset = write_npz() | {"test_fraction": 0.3}
    declare_dataset(dataset, {"scheme": "natural"}, algorithms={"fedavg": {}})
    text = Path("params.yaml").read_text().replace("clients: 6", "clients: 18")
    Path("params.yaml").write_text(text)
    preview = CliRunner().invoke(app.app, ["partition", "--preview"], catch_exceptions=False)
    assert "\n   few " in preview.output
    assert "\n   w07 " in preview.output
    assert "1 of 18 clients have no test sample" in preview.stderr
    assert preview.stderr.strip().endswith(": few.")
    plan = studies.prepare(planner.loader.read_params(Path("params.yaml")))
    assert any(warning.endswith(": few.") for warning in plan.warnings)
    studies.finish_study(plan)
    results = fedpipe.load()
    names = dict(zip(results.clients["client"], results.clients["client_name"], strict=True))
    assert names == {-1: "server"} | dict(enumerate(sorted({*WRITERS})))
    owned = results.partitions.query("client_name == 'w07'")["sample"]
    assert np.array_equal(np.sort(owned), np.flatnonzero(WRITERS == "w07"))


def test_warning_counts_clients_below_minimum() -> None:
    """The preview, the plan and the partition job print the warning. The assignment file contains the counts."""
    declare_dataset(write_npz(), {"scheme": "natural", "minimum": 30})
    warning = "warning: partition.minimum: 30 leaves out 4 of the data set's 18 clients, with 86 of 600 samples"
    plan = studies.prepare(planner.loader.read_params(Path("params.yaml")))
    (key,) = plan.partitions
    for command in ("partition --preview", "plan", f"partition {key}"):
        assert warning in CliRunner().invoke(app.app, command.split(), catch_exceptions=False).stderr, command
    assert read_assignment(plan).dropped_clients == (4, 86, 18, 600)


# -- names and the number of clients in params.yaml --------------------------------------------------------------------


def make_plan(partition: dict[str, Any] | None = None, **sections: Any) -> planner.NewPlan:
    """Plan the study of params.yaml with other settings. A value of None removes the key."""
    settings = planner.loader.read_params(Path("params.yaml"))
    for name, section in ({"partition": partition or {}} | sections).items():
        merged = settings.get(name, {}) | section
        settings[name] = {key: value for key, value in merged.items() if value is not None}
    return planner.make_plan(settings=settings)


@pytest.mark.parametrize(
    ("write", "dataset", "minimum"),
    [(write_npz, {}, 1), (write_npz, {"subset": 300}, 15), (write_split_npz, {"split": "official"}, 25)],
    ids=["all", "subset", "training-samples"],
)
def test_number_of_clients_defaults_to_number_of_writers(
    write: Callable[[], dict[str, Any]], dataset: dict[str, Any], minimum: int
) -> None:
    declare_dataset(write() | dataset, {"scheme": "natural", "column": "writer", "minimum": minimum})
    plan = make_plan(federation={"clients": None})
    (clients,) = {settings["clients"] for settings in plan.partitions.values()}
    assert clients == 18 if minimum == 1 else 6 < clients < 18
    assert make_plan(federation={"clients": clients}).runs[0].key == plan.runs[0].key
    with pytest.raises(SettingsError, match=rf"^federation\.clients: {clients + 1} is more than the {clients} clients"):
        make_plan(federation={"clients": clients + 1})
    with pytest.raises(SettingsError, match=r"^partition\.minimum: no client .* 500 samples"):
        make_plan({"minimum": 500}, federation={"clients": None})


def test_settings_with_names_and_numbers_have_equal_keys() -> None:
    declare_dataset(write_images(), {"scheme": "natural"}, model={"name": "mlp", "hidden": [16]})
    names = sorted({*WRITERS})
    named = {
        "held_out": ["w03", "few", names[5]],
        "drift": {"round": 1, "clients": ["w01"], "label_map": {"digit 1": 7, "digit 7": "digit 1"}},
    }
    numbers = {
        "held_out": [names.index("w03"), 0, 5],
        "drift": {"round": 1, "clients": [names.index("w01")], "label_map": {1: 7, 7: 1}},
    }
    plans = [make_plan(federation={"clients": None} | part) for part in (named, numbers)]
    assert plans[0].runs[0].key == plans[1].runs[0].key
    (note,) = plans[1].drift_notes
    assert note.endswith("permuted classes (digit 1 to digit 7, digit 7 to digit 1).")


def test_held_out_domain_covers_all_clients_of_domain() -> None:
    domains = np.array(["photo", "sketch"])[np.arange(len(LABELS)) % 2]
    np.savez("own.npz", x=PIXELS, y=LABELS, domain=domains)
    declare_dataset({"name": "npz", "path": "own.npz"}, {"scheme": "by-domain"})
    study = {"seeds": [0, 1]}
    expected = make_plan(federation={"held_out": [0, 1, 2, 4]}, study=study).runs[0].key
    assert make_plan(federation={"held_out": ["photo", "sketch 2"]}, study=study).runs[0].key == expected


def test_number_that_is_name_of_other_client_or_class_is_rejected() -> None:
    """The columns contain the numbers 1 to 3 and the classes 1 to 2, whose positions are 0 to 2 and 0 to 1."""
    hospitals, labels = np.arange(len(LABELS)) % 3 + 1, np.array(["1", "2"])[np.arange(len(LABELS)) % 2]
    np.savez("own.npz", x=PIXELS, y=labels, hospital=hospitals)
    declare_dataset({"name": "npz", "path": "own.npz"}, {"scheme": "natural", "column": "hospital"})
    expected = make_plan(federation={"clients": None, "held_out": [0]}).runs[0].key
    assert make_plan(federation={"clients": None, "held_out": ["1"]}).runs[0].key == expected
    for section, problem in (
        ({"held_out": [2]}, r"held_out: 2 is also a name, of number 1\. Put names into quotes, as in '2'"),
        ({"held_out": [3]}, "held_out: 3 is also a name"),
        ({"clients": 2, "held_out": [1]}, "held_out: 1 is also a name"),
        ({"drift": {"round": 1, "clients": [1]}}, r"drift\.clients: 1 is also a name, of number 0"),
        ({"drift": {"round": 1, "label_map": {0: 1, 1: 0}}}, r"drift\.label_map: 1 is also a name, of number 0"),
    ):
        with pytest.raises(SettingsError, match=rf"^federation\.{problem}"):
            make_plan(federation={"clients": None} | section)
    drift = {"round": 1, "label_map": {"1": "2", "2": "1"}}
    assert make_plan(federation={"clients": None, "drift": drift}).drift_notes


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"federation": {"held_out": ["w33"]}}, "federation.held_out: 'w33' is not a client. Did you mean"),
        (
            {"federation": {"clients": 6, "held_out": ["w03"]}, "study": {"seeds": [0, 1]}},
            "federation.held_out: names can't be used, because the seeds draw different clients. Set partition.seed",
        ),
        (
            {
                "federation": {"clients": 6, "held_out": ["w03"]},
                "tune": {"over": {"federation.learning_rate": {"log": [0.01, 0.1]}}, "draws": 2, "seeds": [1]},
            },
            "federation.held_out: names can't be used, because the seeds draw different clients. Set partition.seed",
        ),
        (
            {"federation": {"drift": {"round": 1, "label_map": {"digit": "digit 1"}}}},
            "federation.drift.label_map: 'digit' is not a class. Did you mean",
        ),
        (
            {"partition": {"scheme": "iid"}, "federation": {"drift": {"round": 1, "clients": ["w03"]}}},
            "federation.drift.clients: 'w03' can't be used, because only clients of the partitions natural and",
        ),
        (
            {"dataset": {"sha256": "0" * 64}, "federation": {"held_out": ["w03"]}},
            f"dataset.sha256: {'0' * 64} is declared, but own.parquet has the SHA-256",
        ),
        ({"federation": {"clients": 0, "held_out": ["w03"]}}, "federation.clients: 0 can't be used."),
        (
            {"partition": {"minimum": 4}, "federation": {"held_out": ["few"]}},
            "federation.held_out: 'few' is not a client. It has 3 samples, but partition.minimum is 4. Use at most 3,",
        ),
        (
            {"partition": {"seed": 1}, "federation": {"clients": 6, "held_out": sorted({*WRITERS})}},
            "federation.held_out: 'few' is not a client. The seed has drawn other clients.",
        ),
    ],
)
def test_plan_rejects_invalid_client_and_class_names_in_one_line(sections: dict[str, Any], problem: str) -> None:
    declare_dataset(write_images(), {"scheme": "natural"}, model={"name": "mlp", "hidden": [16]})
    partition = sections.pop("partition", None)
    sections["federation"] = {"clients": None} | sections["federation"]
    with rejects(problem):
        make_plan(partition, **sections)
