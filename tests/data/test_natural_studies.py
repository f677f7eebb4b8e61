"""Run studies/natural on generated samples with the columns of the real repositories."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpipe.core.storage import files, layout
from fedpipe.data import store
from fedpipe.data.assignment import Assignment
from fedpipe.planning import download
from fedpipe.settings import loader
from tests import small_studies as studies
from tests.data.repositories import encode_image, write_repository

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("offline")]

ROWS = 120
NATURAL = studies.ROOT / "studies/natural"


def draw_images(*shape: int) -> list[dict[str, Any]]:
    images = np.random.default_rng(0).integers(0, 256, (ROWS, *shape), dtype=np.uint8)
    return [{"bytes": encode_image(pixels), "path": None} for pixels in images]


def write_femnist() -> None:
    import datasets

    columns = {
        "image": draw_images(28, 28),
        "writer_id": [f"f{row % 12:04}_14" for row in range(ROWS)],
        "hsf_id": [0] * ROWS,
        "character": [row % 62 for row in range(ROWS)],
    }
    names = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
    write_repository(columns, features={"image": datasets.Image(), "character": datasets.ClassLabel(names=names)})


def write_shakespeare() -> None:
    text = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate: " * 8
    columns = {
        "character_id": [f"THE_SONNETS_{row % 12}" for row in range(ROWS)],
        "x": [text[row : row + 80] for row in range(ROWS)],
        "y": [text[row + 80] for row in range(ROWS)],
    }
    write_repository(columns)


def write_celeba() -> None:
    import datasets

    columns = {
        "image": draw_images(218, 178, 3),
        "celeb_id": [row % 12 for row in range(ROWS)],
        "Smiling": [row % 3 == 0 for row in range(ROWS)],
        "Young": [row % 2 == 0 for row in range(ROWS)],
    }
    write_repository(columns, tests=20, features={"image": datasets.Image()})


def write_pacs() -> None:
    import datasets

    columns = {
        "image": draw_images(227, 227, 3),
        "domain": [("photo", "art_painting", "cartoon", "sketch")[row % 4] for row in range(ROWS)],
        "label": [row // 4 % 7 for row in range(ROWS)],
    }
    names = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    write_repository(columns, features={"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})


CASES = {
    "celeba": (write_celeba, (3, 64, 64), 2, ["0", "1", "10", "11"]),
    "femnist": (write_femnist, (1, 28, 28), 62, ["f0000_14", "f0001_14", "f0002_14", "f0003_14"]),
    "pacs": (write_pacs, (3, 64, 64), 7, ["art_painting 1", "cartoon 1", "photo 1", "sketch 1"]),
    "shakespeare": (write_shakespeare, (81,), 23, ["THE_SONNETS_0", "THE_SONNETS_1"]),
}


def test_cases_cover_all_natural_studies() -> None:
    assert {path.stem for path in NATURAL.glob("*.yaml")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_natural_study_trains_and_has_scores(name: str) -> None:
    """Run two rounds of the first and the last method with fewer clients, from `fedpipe download` to scores."""
    write, shape, classes, names = CASES[name]
    write()
    settings = loader.read_params(NATURAL / f"{name}.yaml")
    settings["dataset"]["path"] = "repository"
    settings["partition"] |= {"minimum": 1} if "minimum" in settings["partition"] else {}
    clients = 8 if name == "pacs" else 12
    settings["federation"] |= {"clients": clients, "participation": 0.2, "rounds": 2, "batch_size": 16}
    settings["evaluation"]["every"] = 2
    settings["study"]["algorithms"] = settings["study"]["algorithms"][:: len(settings["study"]["algorithms"]) - 1]
    studies.write(settings, Path())
    download.download_and_pin_dataset(None, Path("params.yaml"))
    plan = studies.prepare(loader.read_params(Path("params.yaml")))
    samples = store.load_samples(layout.get_dataset_path(plan.runs[0].dataset))
    assert (tuple(samples.x.shape[1:]), int(samples.y.max()) + 1, len(samples.y)) == (shape, classes, ROWS)
    (key,) = plan.partitions
    path = layout.get_assignment_path(key)
    assert {*names} <= {*Assignment.read(path, files.read_recorded_sha256(path)).names}
    for run in studies.open_runs(plan):
        studies.finish_run(run, 2, "last")
        results = studies.read_scores(run, 2, settings["evaluation"]["protocols"][1])
        assert len(results) == clients - int(settings["federation"].get("held_out", 0) * clients)
