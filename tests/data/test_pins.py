"""Users' files: `fedpipe download` adds their SHA-256 to the study, and the plan rejects changed files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fedpipe.core.components import component, pinned_files, registry
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import files, layout
from fedpipe.data.assignment import Assignment
from fedpipe.planning import download as stage
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import table_notes
from fedpipe.settings import loader, parser
from tests import small_studies as studies
from tests.data.repositories import write_image
from tests.errors import rejects
from tests.small_studies import run_command

pytestmark = pytest.mark.usefixtures("in_empty_folder")

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.integers(0, 256, (90, 8, 8), dtype=np.uint8), np.arange(90) % 3
SECTION_FILES = {"dataset": "own.npz", "partition": "own.csv", "model": "start.pt"}


def write_user_files(seed: int = 0) -> None:
    """Write arrays without a test set, a partition of three clients with a column split, and weights."""
    np.savez("own.npz", x=X, y=Y)
    order = np.random.default_rng(seed).permutation(90)
    split = np.array(["train"] * 50 + ["validation"] * 10 + ["test"] * 30)
    rows = "".join(f"{sample},{row % 3},{split[row]}\n" for row, sample in enumerate(order))
    Path("own.csv").write_text(f"sample,client,split\n{rows}")
    model: Any = registry.parse_component(component.MODEL, {"name": "mlp", "hidden": [16]})
    torch.manual_seed(0)
    torch.save(model.build((1, 8, 8), 3).state_dict(), "start.pt")


def make_study(**sections: Any) -> dict[str, Any]:
    """Make a study of the user files without their SHA-256."""
    settings = studies.settings(dataset={"name": "npz", "path": "own.npz"}, model={"weights": "start.pt"}, **sections)
    return settings | {"partition": {"scheme": "file", "path": "own.csv"}} | {"federation": {"clients": 3, "rounds": 2}}


def make_declared_study(**sections: Any) -> dict[str, Any]:
    """Make a study of the user files with all SHA-256, and store its data."""
    write_user_files()
    studies.write(make_study(**sections), Path())
    run_command("download")
    return loader.read_params(Path("params.yaml"))


# -- adding the SHA-256 to a study -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "command"),
    [
        ("params.yaml", "fedpipe download"),
        ("studies/own.yaml", "fedpipe download --params studies/own.yaml"),
        ("studies/my own.yaml", "fedpipe download --params 'studies/my own.yaml'"),
    ],
)
def test_plan_lists_all_missing_checksums_and_download_adds_them(params: str, command: str) -> None:
    write_user_files()
    Path("studies").mkdir()
    path = Path(params)
    path.write_text(
        "# Mine.\n"
        "dataset:\n  name: npz  # arrays\n  path: own.npz\n"
        "partition: {scheme: file, path: own.csv}  # theirs\n"
        "model:\n  name: mlp\n  hidden: [16]\n  weights: start.pt\n\n"
        "federation: {clients: 3, rounds: 2}\n"
    )
    before = path.read_text()
    with pytest.raises(SettingsError) as error:
        run_command("plan", "--params", params)
    lines = str(error.value).splitlines()
    for line, (section, name) in zip(lines, SECTION_FILES.items(), strict=True):
        assert line.startswith(f"{section}.sha256: missing for {name}")
        assert f"`{command}`" in line
    message = run_command("download", "--params", params)
    filled = path.read_text()
    for section, name in SECTION_FILES.items():
        sha256 = files.compute_file_sha256(Path(name))
        assert yaml.safe_load(filled)[section]["sha256"] == sha256
        assert f"{params} now contains {section}.sha256: {sha256}." in message
        filled = filled.replace(f"  sha256: {sha256}\n", "").replace(f" sha256: {sha256},", "")
    assert filled == before
    run_command("plan", "--params", params)
    written = path.read_text()
    run_command("download", "--params", params)
    assert path.read_text() == written


def test_download_keeps_rest_of_study_in_any_locale() -> None:
    write_user_files()
    before = "# Größe: ±3 µm\r\ndataset: {name: npz, path: own.npz}\r\nmodel: {name: mlp}\r\n".encode()
    Path("params.yaml").write_bytes(before)
    plain = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "fedpipe", "download"]
    subprocess.run(command, env=os.environ | plain, capture_output=True, check=True)
    filled = f" sha256: {files.compute_file_sha256(Path('own.npz'))},".encode()
    assert Path("params.yaml").read_bytes().replace(filled, b"") == before


def test_missing_partition_file_error_shows_key() -> None:
    write_user_files()
    Path("own.csv").unlink()
    studies.write(make_study(), Path())
    with pytest.raises(SettingsError, match=r"(?m)^partition\.path: own\.csv"):
        run_command("plan")
    with pytest.raises(SettingsError, match=r"^partition\.path: own\.csv is missing"):
        run_command("download")


def test_missing_checksum_error_of_grid_point_contains_checksum() -> None:
    """`fedpipe download` can't write into a grid, so the error must show the SHA-256."""
    settings = make_declared_study()
    shutil.copy("own.csv", "other.csv")
    grid = {"partition": [settings["partition"], {"scheme": "file", "path": "other.csv"}]}
    studies.write(settings | {"study": {"algorithms": ["fedavg"], "seeds": [0], "grid": grid}}, Path())
    with pytest.raises(SettingsError) as error:
        run_command("plan")
    sha256 = files.compute_file_sha256(Path("other.csv"))
    assert "partition.sha256: missing for other.csv" in str(error.value)
    assert sha256 in str(error.value)
    assert "at the point" in str(error.value)


def test_unstored_dataset_error_shows_download_command_of_study() -> None:
    settings = make_declared_study()
    shutil.rmtree("results")
    Path("studies").mkdir()
    Path("studies/own.yaml").write_text(yaml.safe_dump(settings))
    for command in (["plan"], ["partition", "--preview"]):
        with pytest.raises(SettingsError, match=r"is not stored.*`fedpipe download --params studies/own\.yaml`"):
            run_command(*command, "--params", "studies/own.yaml")


@pytest.mark.parametrize(
    ("section", "name", "content"),
    [
        ("partition", "own.csv", "sample,client,split\n0,0,train\n1,1,train\n2,2,train\n90,0,test\n"),
        ("model", "start.pt", ""),
    ],
)
def test_download_and_plan_reject_invalid_file_with_equal_errors(section: str, name: str, content: str) -> None:
    write_user_files()
    studies.write(make_study(), Path())
    Path(name).write_text(content)
    with pytest.raises(SettingsError) as download_error:
        run_command("download")
    assert "sha256" not in loader.read_params(Path("params.yaml"))[section]
    settings = make_study()
    for part, file in SECTION_FILES.items():
        settings[part]["sha256"] = files.compute_file_sha256(Path(file))
    studies.write(settings, Path())
    with pytest.raises(SettingsError) as plan_error:
        run_command("plan")
    assert str(plan_error.value) == str(download_error.value)


# -- a folder of studies -----------------------------------------------------------------------------------------------


@pytest.fixture
def checksums(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The SHA-256 of small substitutes for published images, which a mirror contains."""
    monkeypatch.setenv("FEDPIPE_MIRROR", "mirror")
    Path("mirror").mkdir()
    for num_classes in (10, 100):
        random, labels = np.random.default_rng(num_classes), np.arange(4 * num_classes) % num_classes
        x = random.integers(0, 256, (5 * num_classes, 32, 32, 3), dtype=np.uint8)
        test = {"x_test": x[len(labels) :], "y_test": labels[:num_classes]}
        np.savez(f"mirror/cifar{num_classes}.npz", x_train=x[: len(labels)], y_train=labels, **test)
    return {path.stem: files.compute_file_sha256(path) for path in Path("mirror").iterdir()}


def test_download_of_folder_adds_checksums_to_all_studies(
    checksums: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SHA-256 is added in sections, axes and presets. Each data set is read once, and comments are kept."""
    Path("studies/a").mkdir(parents=True)
    rest = "model: {name: mlp}\nfederation: {clients: 2, rounds: 1}\n"
    texts = {
        "studies/a/one.yaml": f"dataset: {{name: cifar10}}  # ten\n{rest}",
        "studies/a/two.yaml": f"""# Two data sets, and a third of no file.
dataset:
  name: cifar10  # ten
{rest}study:
  grid:
    data:
      TEN: {{}}
      HUNDRED: {{dataset.name: cifar100}}
      ALL:
        dataset: {{name: cifar100, split: pooled}}
      DIGITS: {{dataset: {{name: digits}}}}
presets:
  smoke:
    dataset.name: cifar100  # a hundred
    study.grid: {{}}
""",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    obtained: list[Any] = []
    real = stage.load_and_save_dataset
    monkeypatch.setattr(stage, "load_and_save_dataset", lambda data, *rest: obtained.append(data) or real(data, *rest))
    with pytest.raises(SettingsError, match=r"dataset\.sha256: missing.*'cifar10'"):
        run_command("plan", "--params", "studies/a")
    output = run_command("download", "--params", "studies/a")
    assert len(obtained) == len({str(data) for data in obtained}) == 2, output
    one, two = (loader.read_params(Path(f"studies/a/{name}.yaml")) for name in ("one", "two"))
    assert one["dataset"]["sha256"] == two["dataset"]["sha256"] == checksums["cifar10"]
    axis = two["study"]["grid"]["data"]
    assert axis["HUNDRED"]["dataset.sha256"] == axis["ALL"]["dataset"]["sha256"] == checksums["cifar100"]
    assert axis["DIGITS"] == {"dataset": {"name": "digits"}}
    assert two["presets"]["smoke"]["dataset.sha256"] == checksums["cifar100"]
    for name, text in texts.items():
        stripped = re.sub(r", (dataset\.)?sha256: \w+|(?m:^ *(dataset\.)?sha256: \w+\n)", "", Path(name).read_text())
        assert stripped == text
    run_command("plan", "--params", "studies/a")
    run_command("plan", "--params", "studies/a/two.yaml", "--preset", "smoke")
    before = Path("studies/a/two.yaml").read_text()
    run_command("download", "--params", "studies/a")
    assert Path("studies/a/two.yaml").read_text() == before


def test_download_adds_checksum_once_to_anchored_mapping(checksums: dict[str, str]) -> None:
    path = Path("studies/anchors.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text("""dataset: {name: cifar10}
model: {name: mlp}
federation: {clients: 2, rounds: 1}
study:
  grid:
    data:
      TEN: {}
      HUNDRED: &hundred
        dataset.name: cifar100
        federation.batch_size: 8
presets:
  smoke:
    study.grid.data:
      HUNDRED: *hundred
""")
    run_command("download", "--params", str(path))
    study = loader.read_params(path)
    assert study["dataset"]["sha256"] == checksums["cifar10"]
    assert study["study"]["grid"]["data"]["HUNDRED"]["dataset.sha256"] == checksums["cifar100"]
    assert study["presets"]["smoke"]["study.grid.data"]["HUNDRED"]["dataset.sha256"] == checksums["cifar100"]
    assert path.read_text().count(checksums["cifar100"]) == 1
    run_command("plan", "--params", str(path))
    run_command("plan", "--params", str(path), "--preset", "smoke")


def test_download_of_folder_continues_after_failed_study(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("studies/a").mkdir(parents=True)
    Path("studies/a/bad.yaml").write_text("dataset: {name: npz, path: nowhere.npz}\n")
    write_user_files()
    Path("studies/a/good.yaml").write_text("dataset: {name: npz, path: own.npz, split: pooled}\n")
    with pytest.raises(ArtifactError, match=r"^studies/a/bad\.yaml: dataset\.path: nowhere\.npz is missing"):
        run_command("download", "--params", "studies/a")
    sha256 = loader.read_params(Path("studies/a/good.yaml"))["dataset"]["sha256"]
    assert sha256 == files.compute_file_sha256(Path("own.npz"))


# -- changed files -----------------------------------------------------------------------------------------------------


def change_file(name: str) -> None:
    """Change a file, but not its size and time."""
    path = Path(name)
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(("section", "name"), SECTION_FILES.items())
def test_plan_rejects_changed_file_and_shows_both_checksums(section: str, name: str) -> None:
    settings = make_declared_study()
    run_command("plan")
    change_file(name)
    declared, actual = settings[section]["sha256"], files.compute_file_sha256(Path(name))
    with rejects(f"{section}.sha256: {declared} is declared, but {name} ... {actual}"):
        run_command("plan")


def test_plan_accepts_touched_and_deleted_files() -> None:
    make_declared_study()
    Path("own.npz").touch()
    Path("start.pt").touch()
    run_command("plan")
    Path("own.npz").unlink()
    Path("start.pt").unlink()
    run_command("plan")


def test_plan_rejects_changed_folder() -> None:
    for part in ("train", "test"):
        for row in range(12):
            write_image(f"pictures/{part}/{'ab'[row % 2]}/{row}.png", X[row])
    settings = studies.settings(dataset={"name": "folder", "path": "pictures"}, federation={"clients": 2})
    studies.write(settings, Path())
    run_command("download")
    run_command("plan")
    write_image("pictures/train/a/0.png", X[20])
    with pytest.raises(SettingsError, match=r"^dataset\.sha256: .* is declared, but pictures "):
        run_command("plan")


def test_unchanged_file_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("large").write_bytes(b"1")
    hashed: list[Path] = []
    real = files.compute_file_sha256
    monkeypatch.setattr(files, "compute_file_sha256", lambda path: hashed.append(path) or real(path))
    first = [pinned_files.compute_content_sha256(Path("large")) for _ in range(3)]
    assert len(set(first)) == len(hashed) == 1
    change_file("large")
    assert pinned_files.compute_content_sha256(Path("large")) != first[0]


# -- a partition with a column split -----------------------------------------------------------------------------------


def read_run_settings(settings: dict[str, Any], seed: int = 0) -> RunSettings:
    return RunSettings.from_params(parser.parse_params(settings), "fedavg", seed)


def test_key_ignores_split_settings_if_file_has_split_column() -> None:
    settings = make_declared_study()
    original = read_run_settings(settings)
    assert not {"split", "test_fraction", "stratified", "validation_fraction"} & set(original.dataset)
    for changes in (
        {"split": "official"},  # the data set has no official test set
        {"split": "pooled", "test_fraction": 0.4, "validation_fraction": 0.2, "stratified": True},
    ):
        assert read_run_settings(settings | {"dataset": settings["dataset"] | changes}).key == original.key
    assert read_run_settings(settings | {"partition": settings["partition"] | {"seed": 3}}).key == original.key


def test_file_with_split_column_has_one_key_for_all_seeds_and_paths() -> None:
    settings = make_declared_study(study={"seeds": [0, 1, 2]})
    plan = studies.prepare(settings)
    assert len({run.key for run in plan.runs}) == 3
    (key,) = plan.partitions
    assert "path" not in plan.partitions[key]["partition"]
    Path("moved").mkdir()
    shutil.move("own.csv", "moved/theirs.csv")
    moved = studies.prepare(settings | {"partition": settings["partition"] | {"path": "moved/theirs.csv"}})
    assert [run.key for run in moved.runs] == [run.key for run in plan.runs]
    place = layout.get_assignment_path(key).with_name("partition.yaml")
    assert yaml.safe_load(place.read_text())["origin"] == {"path": "moved/theirs.csv"}


def test_assignment_and_preview_match_partition_file() -> None:
    plan = studies.prepare(make_declared_study())
    ((key, settings),) = plan.partitions.items()
    table = files.read_parquet(layout.get_assignment_path(key))
    table_row_keys = sorted(zip(*(table[name].to_pylist() for name in ("sample", "client", "split")), strict=True))
    rows = [line.split(",") for line in Path("own.csv").read_text().splitlines()[1:]]
    assert table_row_keys == sorted((int(sample), int(client), split) for sample, client, split in rows)
    sha256 = files.compute_file_sha256(Path("own.csv"))
    description = table_notes.describe_partition(settings)
    assert f"partition file (sha256={sha256[:12]}…)" in description
    assert run_command("partition", "--preview").startswith(f"{description}, all seeds: {key}\n")
    run_command("figure", "partition", key)
    (run,) = plan.runs
    run_command("segment", str(run.path), "--stop", "2")
    assert run.files.list_complete_rounds() == [0, 1, 2]
    assert [len(own) for own in Assignment.from_table(table).validation] == [3, 3, 4]


def test_key_depends_on_split_and_seed_without_split_column() -> None:
    settings = make_declared_study() | {"partition": {"scheme": "file", "path": "plain.csv"}}
    Path("plain.csv").write_text("sample,client\n" + "".join(f"{row},{row % 3}\n" for row in range(90)))
    settings["partition"]["sha256"] = files.compute_file_sha256(Path("plain.csv"))
    with pytest.raises(SettingsError, match=r"^dataset\.split: 'official' needs a test set"):
        parser.parse_params(settings)
    settings["dataset"]["split"] = "pooled"
    runs = [read_run_settings(settings, seed) for seed in (0, 1)]
    assert len({compute_json_digest(run.partition_settings) for run in runs}) == 2
    assert read_run_settings(settings | {"dataset": settings["dataset"] | {"test_fraction": 0.4}}).key != runs[0].key


def test_parser_rejects_subset_with_partition_file() -> None:
    settings = make_declared_study()
    settings["dataset"] |= {"subset": 60, "split": "pooled"}
    Path("plain.csv").write_text("sample,client\n0,0\n1,1\n2,2\n")
    for path in ("own.csv", "plain.csv"):
        settings["partition"] = {"scheme": "file", "path": path, "sha256": files.compute_file_sha256(Path(path))}
        with pytest.raises(SettingsError, match=r"^dataset\.subset: 60 .* partition from a file"):
            parser.parse_params(settings)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("90,0,train", "sample 90 of own.csv is not in the data set. Use 0 to 89."),
        ("-1,0,train", "sample -1 of own.csv can't be used."),
        ("3,0,train\n3,1,test", "sample 3 of own.csv is in split test and in another split."),
        ("3,0,validation\n3,-1,test", "sample 3 of own.csv is in split test and in another split."),
        ("", "own.csv has no test sample."),
        ("3,0,train\n3,1,validation", "sample 3 of own.csv is in split validation and in another split."),
    ],
)
def test_parser_rejects_invalid_rows_of_partition_file(rows: str, problem: str) -> None:
    settings = make_declared_study()
    Path("own.csv").write_text(f"sample,client,split\n0,0,train\n1,1,train\n2,2,train\n{rows}\n")
    settings["partition"]["sha256"] = files.compute_file_sha256(Path("own.csv"))
    with rejects(f"partition.path: {problem}"):
        parser.parse_params(settings)
