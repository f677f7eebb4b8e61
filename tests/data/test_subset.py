import numpy as np
import pytest

from fedpipe.core.storage import layout
from fedpipe.data.assignment import Assignment
from fedpipe.planning import planner
from fedpipe.planning.partition import select_sample_subset
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")

LABELS = np.repeat(np.arange(4), [400, 200, 100, 100])
TEST = np.arange(800) % 4 == 0


def test_sample_subset_matches_class_and_test_proportions() -> None:
    subset = select_sample_subset(LABELS, TEST, 80)
    assert np.bincount(LABELS[subset]).tolist() == [40, 20, 10, 10]
    assert np.bincount(LABELS[subset][TEST[subset]]).tolist()[:2] == [10, 5]
    assert TEST[subset].sum() == pytest.approx(20, abs=1)
    assert (np.diff(subset) > 0).all()


def test_sample_subset_is_reproducible_and_not_a_prefix() -> None:
    assert np.array_equal(select_sample_subset(LABELS, TEST, 80), select_sample_subset(LABELS, TEST, 80))
    assert not np.array_equal(select_sample_subset(LABELS, TEST, 80)[:40], np.arange(40))
    assert np.array_equal(select_sample_subset(LABELS, TEST, 800), np.arange(800))


def test_assignment_contains_only_samples_of_subset() -> None:
    plan = studies.prepare(studies.settings(dataset={"subset": 200}))
    assignment = Assignment.read(layout.get_assignment_path(*plan.partitions))
    samples = np.concatenate([*assignment.train, *assignment.test])
    assert len(samples) == len(np.unique(samples)) == 200
    assert samples.max() > 1000
    assert np.array_equal(np.sort(np.concatenate(assignment.test)), assignment.global_test)


def test_subset_is_in_partition_settings_only_if_set() -> None:
    (plain,), (small,) = (
        planner.make_plan(settings=studies.settings(dataset=dataset)).partitions.values()
        for dataset in ({}, {"subset": 200})
    )
    assert "subset" not in plain["dataset"]
    assert small["dataset"]["subset"] == 200


def test_subset_without_test_samples_error_suggests_larger_subset() -> None:
    with rejects("dataset.split: 'official' needs a test set, but the 4 samples ... larger dataset.subset"):
        studies.prepare(studies.settings(dataset={"subset": 4}, federation={"clients": 2}))
