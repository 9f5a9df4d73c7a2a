"""Learned policies: written whole, read back equal, refused when damaged or made for another job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from relaybatch import policy
from relaybatch.errors import OutputError, PolicyError
from relaybatch.forecast import EVIDENCE_NAMES, Forecaster, Sample
from relaybatch.policy import PolicyCard, TierCard
from relaybatch.profile import TierProfile

NAMES = ("chars", "digits")


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    rng = np.random.default_rng(0)
    n = 60
    x = rng.normal(size=(n, 2)).astype(np.float32)
    scores = (x[:, :1] + rng.normal(size=(n, 2)) < [[0.0, 1.0]]).astype(np.float32)
    evidence = rng.normal(size=(n, 2, len(EVIDENCE_NAMES))).astype(np.float32)
    tokens = np.full((n, 2), 5.0, np.float32)
    sample = Sample(x, NAMES, np.repeat(["a", "b"], n // 2), np.arange(n), scores, tokens, evidence)
    return Forecaster.train(sample, ("small", "large"))


def card(forecaster: Forecaster) -> PolicyCard:
    profile = TierProfile(
        seconds_per_prompt_token=1e-4,
        seconds_per_output_token=1e-3,
        seconds_per_batch=0.0,
        rows_per_batch=8,
        rows=60,
        batches=8,
    )
    tiers = [TierCard(name=t, model=f"models/{t}", fingerprint=f"f-{t}", profile=profile) for t in forecaster.tiers]
    return PolicyCard(
        created=policy.utc_now(),
        features_version=1,
        feature_names=NAMES,
        tiers=tuple(tiers),
        sample_rows=60,
        summary=forecaster.summary,
    )


def test_a_saved_policy_reads_back_and_forecasts_the_same(tmp_path: Path, forecaster: Forecaster) -> None:
    root = tmp_path / "policies" / "daily"
    assert not policy.exists(root)
    assert policy.save(root, card(forecaster), forecaster) == "v0001"
    assert policy.exists(root)
    loaded = policy.load(root)
    x = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    groups = np.array(["a", "b", "new", "a", "b"] * 10)
    before, after = forecaster.predict(x, NAMES, groups), loaded.forecaster.predict(x, NAMES, groups)
    np.testing.assert_array_equal(before.quality, after.quality)
    np.testing.assert_array_equal(before.quality_low, after.quality_low)
    np.testing.assert_array_equal(before.output_tokens, after.output_tokens)
    assert loaded.card.summary == forecaster.summary
    assert loaded.card.version == "v0001"
    assert sorted(p.name for p in root.iterdir()) == ["current", "v0001"]


def test_versions_follow_each_other_and_can_be_rolled_back(tmp_path: Path, forecaster: Forecaster) -> None:
    for version in ("v0001", "v0002"):
        assert policy.save(tmp_path, card(forecaster), forecaster) == version
    assert policy.load(tmp_path).card.version == "v0002"
    policy.activate(tmp_path, "v0001")
    assert policy.load(tmp_path).card.version == "v0001"
    assert policy.load(tmp_path, "v0002").card.version == "v0002"
    assert policy.save(tmp_path, card(forecaster), forecaster) == "v0003"
    assert policy.load(tmp_path).card.version == "v0003"
    with pytest.raises(PolicyError, match="no version `v0009`"):
        policy.activate(tmp_path, "v0009")


def test_writers_at_once_get_a_version_each(tmp_path: Path, forecaster: Forecaster) -> None:
    with ThreadPoolExecutor(6) as pool:
        names = list(pool.map(lambda _: policy.save(tmp_path, card(forecaster), forecaster), range(6)))
    assert sorted(names) == [f"v{n:04d}" for n in range(1, 7)]
    assert policy.versions(tmp_path) == sorted(names)
    assert policy.load(tmp_path).card.version in names


@pytest.mark.parametrize("file", ["policy.json", "forecast.json", "models.zip"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_file_is_named(tmp_path: Path, forecaster: Forecaster, file: str, damage: str) -> None:
    path = tmp_path / policy.save(tmp_path, card(forecaster), forecaster) / file
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.raises(PolicyError, match=file):
        policy.load(tmp_path)


def test_a_card_edited_by_hand_is_refused(tmp_path: Path, forecaster: Forecaster) -> None:
    path = tmp_path / policy.save(tmp_path, card(forecaster), forecaster) / "policy.json"
    path.write_text(path.read_text().replace('"sample_rows": 60', '"sample_rows": 99'))
    with pytest.raises(PolicyError, match=r"policy\.json: changed"):
        policy.load(tmp_path)


def test_a_broken_pointer_is_named(tmp_path: Path, forecaster: Forecaster) -> None:
    with pytest.raises(PolicyError, match="no policy has been learned"):
        policy.load(tmp_path)
    policy.save(tmp_path, card(forecaster), forecaster)
    (tmp_path / "current").write_text("../../etc")
    with pytest.raises(PolicyError, match="names no version"):
        policy.load(tmp_path)
    (tmp_path / "current").write_text("v0007\n")
    with pytest.raises(PolicyError, match="there is: v0001"):
        policy.load(tmp_path)


def test_a_policy_of_another_job_says_what_differs(tmp_path: Path, forecaster: Forecaster) -> None:
    policy.save(tmp_path, card(forecaster), forecaster)
    loaded = policy.load(tmp_path)

    def require(
        tiers: tuple[str, ...] = ("small", "large"),
        prints: tuple[str, ...] = ("f-small", "f-large"),
        version: int = 1,
        names: tuple[str, ...] = NAMES,
        grading: str | None = None,
    ) -> None:
        loaded.require(tiers=tiers, fingerprints=prints, features_version=version, feature_names=names, grading=grading)

    require()
    with pytest.raises(PolicyError, match="this job's are small, huge") as raised:
        require(tiers=("small", "huge"))
    assert "remove or rename its folder" in str(raised.value)
    with pytest.raises(PolicyError, match="tier `large`"):
        require(prints=("f-small", "other"))
    with pytest.raises(PolicyError, match="features have version 1"):
        require(version=2)
    with pytest.raises(PolicyError, match="words"):
        require(names=("chars", "words"))
    with pytest.raises(PolicyError, match="graded by"):
        require(grading='{"method":"json"}')


def test_an_unwritable_folder_is_named_and_left_clean(tmp_path: Path, forecaster: Forecaster) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="file"):
        policy.save(tmp_path / "file" / "policies", card(forecaster), forecaster)
