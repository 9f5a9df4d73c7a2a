"""Learned policies: the versions of a forecaster on disk, checked when written and when read.

Owns the policy folder. What a forecaster holds is forecast's business; which one a job uses is relay's.

    <root>/v0001/policy.json     the card: what it was learned from and the checksum of every file
    <root>/v0001/…               the forecaster's files
    <root>/current               the name of the active version
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from relaybatch import __version__
from relaybatch.accuracy import ForecastSummary
from relaybatch.errors import OutputError, PolicyError
from relaybatch.forecast import RELEARN, Forecaster
from relaybatch.profile import TierProfile

CARD = "policy.json"
CURRENT = "current"


class TierCard(BaseModel):
    """A tier that a policy was learned on."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """The tier's name in the job."""
    model: str
    """The model as the job names it."""
    fingerprint: str
    """Hash of the model's files and of the settings that change its answers."""
    profile: TierProfile
    """Its speed on the machine that learned the policy."""
    template_tokens: float = 0.0
    """Prompt tokens that a row has beside its own text, such as the chat template's."""
    tokens_per_estimate: float = 1.0
    """Prompt tokens for each token that the features estimate."""


class PolicyCard(BaseModel):
    """What a policy was learned from, and the checksums of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: str = ""
    """Name of the version's folder, v0001 and up; given when saved."""
    created: datetime
    """When it was learned (UTC)."""
    relaybatch: str = __version__
    """Version of relaybatch that learned it."""
    features_version: int
    """Version of the features."""
    feature_names: tuple[str, ...]
    """Names of the features, in order."""
    grading: str = ""
    """The grading that scores were made with, as the job has it (JSON)."""
    tiers: tuple[TierCard, ...]
    """The ladder, cheapest first."""
    sample_rows: int
    """Rows that were sent through the tiers to learn it."""
    summary: ForecastSummary
    """How good its forecasts are, out of fold."""
    checksums: dict[str, str] = {}
    """BLAKE2b (16 bytes, hex) of every other file of the version; given when saved."""
    checksum: str = ""
    """BLAKE2b of this card's own JSON without this field; given when saved."""


@dataclass(frozen=True)
class Policy:
    """A loaded policy: its card, its forecaster and the folder of its version."""

    card: PolicyCard
    forecaster: Forecaster
    folder: Path

    def require(
        self,
        *,
        tiers: Sequence[str],
        fingerprints: Sequence[str],
        features_version: int,
        feature_names: Sequence[str],
        grading: str | None = None,
    ) -> None:
        """Nothing, if the policy was learned for these tiers, models, features and grading.

        Raises PolicyError: it was not; says what differs.
        """
        card = self.card
        faults = []
        known = [tier.name for tier in card.tiers]
        if list(tiers) != known:
            faults.append(f"its tiers are {', '.join(known)}; this job's are {', '.join(tiers)}")
        else:
            faults += [
                f"the model of tier `{tier.name}` ({tier.model}), or a setting that changes its answers, has changed"
                for tier, fingerprint in zip(card.tiers, fingerprints, strict=True)
                if tier.fingerprint != fingerprint
            ]
        if card.features_version != features_version:
            faults.append(f"its features have version {card.features_version}; this relaybatch has {features_version}")
        elif card.feature_names != tuple(feature_names):
            differing = sorted(set(card.feature_names) ^ set(feature_names))
            faults.append(f"its features differ: {', '.join(differing) or 'another order'}")
        if grading is not None and card.grading != grading:
            faults.append(f"its answers were graded by {card.grading}; this job grades by {grading}")
        if faults:
            raise PolicyError(f"{self.folder}: the policy does not fit this job: {'; '.join(faults)}", hint=RELEARN)


def utc_now() -> datetime:
    """The time for a new card's `created`."""
    return datetime.now(UTC).replace(microsecond=0)


def exists(root: Path) -> bool:
    """Whether there is an active policy under root."""
    return (root / CURRENT).is_file()


def versions(root: Path) -> list[str]:
    """Names of the versions under root, oldest first."""
    if not root.is_dir():
        return []
    found = [p.name for p in root.iterdir() if re.fullmatch(r"v\d{4,}", p.name) and p.is_dir()]
    return sorted(found, key=_number)


def save(root: Path, card: PolicyCard, forecaster: Forecaster) -> str:
    """The name of the new version under root, now the active one.

    Written aside, synced to disk and renamed into place: a reader never sees a part, and of two writers at once
    each gets a version of its own. Raises OutputError: the folder cannot be written.
    """
    aside = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        aside.chmod(0o755)
        forecaster.save(aside)
        sums = {path.name: _blake2b(path.read_bytes()) for path in sorted(aside.iterdir())}
        while True:
            version = f"v{max([_number(v) for v in versions(root)], default=0) + 1:04d}"
            _write_card(aside / CARD, card.model_copy(update={"version": version, "checksums": sums}))
            for path in aside.iterdir():
                _sync(path)
            _sync(aside)
            try:
                aside.rename(root / version)
                break
            except OSError:
                # another writer took the name: a non-empty folder is never replaced
                if not (root / version).exists():
                    raise
        _sync(root)
        if not exists(root) or _number(_current(root)) < _number(version):
            activate(root, version)
        return version
    except OSError as error:
        raise OutputError(
            f"{error.filename or root}: the policy cannot be written: {error.strerror or error}",
            hint="free space or give another folder with `policy: {path: …}`",
        ) from error
    finally:
        if aside is not None and aside.exists():
            shutil.rmtree(aside, ignore_errors=True)


def activate(root: Path, version: str) -> None:
    """Make a version the active one. Raises PolicyError: there is no such version."""
    if version not in versions(root):
        raise PolicyError(f"{root}: no version `{version}`; there is: {', '.join(versions(root)) or 'none'}")
    handle, name = tempfile.mkstemp(prefix=".current-", dir=root)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(version + "\n")
        file.flush()
        os.fsync(file.fileno())
    Path(name).chmod(0o644)
    Path(name).replace(root / CURRENT)
    _sync(root)


def load(root: Path, version: str = CURRENT) -> Policy:
    """A version of the policy under root, every file checked against its checksum.

    Raises PolicyError: there is none, or a file is missing, changed or cut; names the file.
    """
    name = _current(root) if version == CURRENT else version
    folder = root / name
    if name not in versions(root):
        raise PolicyError(f"{folder}: no such policy version; there is: {', '.join(versions(root)) or 'none'}")
    card = _read_card(folder / CARD)
    for file, checksum in card.checksums.items():
        path = folder / file
        try:
            found = _blake2b(path.read_bytes())
        except OSError as error:
            raise PolicyError(f"{path}: cannot be read: {error.strerror}", hint=RELEARN) from None
        if found != checksum:
            raise PolicyError(f"{path}: changed or cut since it was written (its checksum differs)", hint=RELEARN)
    return Policy(card, Forecaster.load(folder), folder)


def _current(root: Path) -> str:
    path = root / CURRENT
    try:
        name = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise PolicyError(f"{root}: no policy has been learned here") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: cannot be read: {error}", hint=RELEARN) from None
    if not re.fullmatch(r"v\d{4,}", name):
        raise PolicyError(
            f"{path}: `{name[:40]}` names no version",
            hint=f"write one of {', '.join(versions(root)) or 'v0001'} into it",
        )
    return name


def _number(version: str) -> int:
    return int(version[1:])


def _read_card(path: Path) -> PolicyCard:
    try:
        text = path.read_bytes()
        card = PolicyCard.model_validate_json(text)
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}", hint=RELEARN) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise PolicyError(f"{path}: not a policy card: {place} {first['msg']}".rstrip(), hint=RELEARN) from None
    if _own_checksum(json.loads(text)) != card.checksum:
        raise PolicyError(f"{path}: changed since it was written (its checksum differs)", hint=RELEARN)
    return card


def _write_card(path: Path, card: PolicyCard) -> None:
    fields = card.model_dump(mode="json") | {"checksum": ""}
    fields["checksum"] = _own_checksum(fields)
    path.write_text(json.dumps(fields, ensure_ascii=False, allow_nan=False, indent=2) + "\n", encoding="utf-8")


def _own_checksum(fields: dict[str, object]) -> str:
    text = json.dumps(fields | {"checksum": ""}, ensure_ascii=False, sort_keys=True)
    return _blake2b(text.encode())


def _blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
