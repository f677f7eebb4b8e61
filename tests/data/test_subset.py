import numpy as np
import pytest

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import layout
from fedpipe.data.assignment import Assignment
from fedpipe.planning.partition import select_subset
from tests import small_studies as studies

LABELS = np.repeat(np.arange(4), [400, 200, 100, 100])
TEST = np.arange(800) % 4 == 0


def test_classes_and_tests_have_their_shares() -> None:
    chosen = select_subset(LABELS, TEST, 80)
    assert np.bincount(LABELS[chosen]).tolist() == [40, 20, 10, 10]
    assert np.bincount(LABELS[chosen][TEST[chosen]]).tolist()[:2] == [10, 5]
    assert TEST[chosen].sum() == pytest.approx(20, abs=1)
    assert (np.diff(chosen) > 0).all()


def test_it_is_one_subset_and_no_prefix() -> None:
    assert np.array_equal(select_subset(LABELS, TEST, 80), select_subset(LABELS, TEST, 80))
    assert not np.array_equal(select_subset(LABELS, TEST, 80)[:40], np.arange(40))
    assert np.array_equal(select_subset(LABELS, TEST, 800), np.arange(800))


def test_a_study_of_a_subset_deals_nothing_else(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = studies.prepare(studies.settings(dataset={"subset": 200}))
    dealt = Assignment.read(layout.assignment_file(*made.partitions))
    samples = np.concatenate([*dealt.train, *dealt.test])
    assert len(samples) == len(np.unique(samples)) == 200
    assert samples.max() > 1000
    assert np.array_equal(np.sort(np.concatenate(dealt.test)), dealt.global_test)


def test_it_is_part_of_the_key_only_where_it_is_asked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (plain,), (small,) = (
        studies.prepare(studies.settings(dataset=dataset)).partitions.values() for dataset in ({}, {"subset": 200})
    )
    assert "subset" not in plain["dataset"]
    assert small["dataset"]["subset"] == 200


def test_one_without_test_samples_is_told_from_a_data_set_without_any(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as error:
        studies.prepare(studies.settings(dataset={"subset": 4}, federation={"clients": 2}))
    assert str(error.value) == (
        "dataset.split: 'official' needs a test set, and none of the 4 samples is in one; use 'pooled', or a larger "
        "dataset.subset where there is one."
    )


def test_more_than_there_are_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"^dataset\.subset: 2000 is more than there are. Use at most 1797"):
        studies.prepare(studies.settings(dataset={"subset": 2000}))
