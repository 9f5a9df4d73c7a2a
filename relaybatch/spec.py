"""The job file: its pydantic models, and loading it from YAML with every fault named by file:line.

Owns what a job may say. Does not look at the input, the models or the device: `job.check` does.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from relaybatch.errors import SpecError

MAX_NODES = 20_000  # a job file is small; aliases that unfold beyond this are an attack or a mistake
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.\-]+$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class InputSpec(_Model):
    """Where the instructions are and which column is what."""

    path: str | tuple[str, ...]
    """File, glob or folder (or a list of them) of JSONL (plain, .gz, .zst) or Parquet."""
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    """File format; `auto` goes by the file name's ending."""
    prompt: str | None = None
    """Column with the instruction's text. Default `prompt`, unless `messages` or `template` is given."""
    messages: str | None = None
    """Column with chat messages: a list of {role, content}."""
    template: str | None = None
    """Text with {column} fields, for example "Label this: {title}"; write {{ and }} for braces."""
    id: str | None = None
    """Column with the row's own id, kept byte for byte. Without it, ids row-00000001, … are made."""
    reference: str | None = None
    """Column with the right answer, used for grading only; a model never sees it."""
    tier: str | None = None
    """Column that pins a row to a tier by name (null: free)."""
    max_new_tokens: str | None = None
    """Column with the row's own limit on generated tokens."""
    conversation: str | None = None
    """Column with a conversation's id, carried through."""
    priority: str | None = None
    """Column with a whole number; higher runs first within a leg."""
    duplicates: Literal["fail", "suffix"] = "fail"
    """What to do when an id appears twice: refuse the input, or name the second `id#2`."""

    @model_validator(mode="after")
    def _one_text(self) -> InputSpec:
        if sum(x is not None for x in (self.prompt, self.messages, self.template)) > 1:
            raise ValueError("give only one of `prompt`, `messages` and `template`")
        return self


class OutputSpec(_Model):
    """The run folder."""

    path: str = Field(min_length=1)
    """Folder for results, report and journal."""
    format: Literal["parquet", "jsonl"] = "parquet"
    """File format of the results."""


class BatchSpec(_Model):
    """Bounds on the rows of one batch."""

    min: int = Field(1, ge=1, le=4096)
    """Fewest rows, unless memory forces less or the leg runs out of rows."""
    max: int = Field(16, ge=1, le=4096)
    """Most rows."""

    @model_validator(mode="after")
    def _ordered(self) -> BatchSpec:
        if self.min > self.max:
            raise ValueError(f"`min` ({self.min}) is larger than `max` ({self.max})")
        return self


class TokenPrice(_Model):
    """USD for a million tokens."""

    input: float = Field(ge=0)
    """USD for a million prompt tokens."""
    output: float = Field(ge=0)
    """USD for a million generated tokens."""


class PriceSpec(_Model):
    """What a tier costs: by the hour of its device, or by token."""

    usd_per_hour: float | None = Field(None, ge=0)
    """USD for an hour of the device; a row pays its share of its batch's measured wall time."""
    usd_per_million_tokens: TokenPrice | None = None
    """USD for a million tokens, in and out."""

    @model_validator(mode="after")
    def _one_price(self) -> PriceSpec:
        if (self.usd_per_hour is None) == (self.usd_per_million_tokens is None):
            raise ValueError("give one of `usd_per_hour` and `usd_per_million_tokens`")
        return self


class TierSpec(_Model):
    """A model at a price."""

    name: Name
    """The tier's name, used in rules, pins and reports."""
    engine: Literal["torch"] = "torch"
    """What runs the model."""
    model: str
    """Local folder, .gguf file, hub id (org/name), or package:<module>/<file> inside an installed package."""
    price: PriceSpec
    """What it costs."""
    batch: BatchSpec = BatchSpec()
    """Bounds on the rows of one batch."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights and of the arithmetic."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda:0`, …"""
    max_new_tokens: int | None = Field(None, ge=1, le=1_000_000)
    """Limit on generated tokens for this tier, in place of `generation.max_new_tokens`."""
    prompt_format: Literal["chat", "plain"] = "chat"
    """`chat` wraps the prompt in the model's chat template; `plain` sends it as it is."""
    chat_template: str | None = None
    """Jinja template (or the path of one) for models that carry none."""
    revision: str | None = None
    """Revision of a hub model."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for models you have read."""
    allow_pickle: bool = False
    """Load weights stored as pickle. They can run code: only for files you made."""
    max_rows: int | None = Field(None, ge=0)
    """Most rows this tier may answer."""
    max_share: float | None = Field(None, ge=0, le=1)
    """Most rows this tier may answer, as a share of the job."""
    max_usd: float | None = Field(None, ge=0)
    """Most USD this tier may cost."""
    max_seconds: float | None = Field(None, ge=0)
    """Most seconds this tier may run."""


class GenerationSpec(_Model):
    """How answers are generated."""

    max_new_tokens: int = Field(256, ge=1, le=1_000_000)
    """Limit on generated tokens of one answer."""
    temperature: float = Field(0.0, ge=0, le=10)
    """0 takes the most probable token each time (greedy)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most probable tokens; 0: no limit."""
    seed: int = 0
    """Seed of sampling; each row samples from (seed, row)."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer; the text before them is kept."""
    system: str | None = None
    """System message put before every prompt that has none."""


class CalibrationSpec(_Model):
    """The sample that a first run learns from."""

    rows: int = Field(300, ge=20)
    """Rows sent through every tier when there is no policy yet."""
    seed: int = 0
    """Seed of the draw."""


class GradingSpec(_Model):
    """How an answer is compared with its reference."""

    method: Literal["exact", "numeric", "contains", "regex", "choice", "json", "token_f1"] = "exact"
    """exact text, last number, reference contained, a pattern, a choice letter, JSON value, token F1."""
    ignore_case: bool = False
    """Compare without regard to case."""
    tolerance: float = Field(1e-6, ge=0)
    """Relative tolerance of `numeric`."""
    pattern: str | None = None
    """Pattern of `regex`; its first group, if any, is compared with the reference."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema that a `json` answer must meet."""
    choices: str = "ABCDEFGHIJ"
    """Letters that `choice` accepts."""

    @model_validator(mode="after")
    def _pattern(self) -> GradingSpec:
        if self.method == "regex" and self.pattern is None:
            raise ValueError("`method: regex` needs `pattern`")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"`pattern` is no regular expression: {error}") from None
        return self


class QualitySpec(_Model):
    """The quality to keep at least cost."""

    retain: float | None = Field(None, gt=0, le=1.5)
    """Share of the quality of all-on-top-tier, by forecast."""
    target: float | None = Field(None, gt=0, le=1)
    """Mean quality of the job (0..1), by forecast."""

    @model_validator(mode="after")
    def _one(self) -> QualitySpec:
        if (self.retain is None) == (self.target is None):
            raise ValueError("give one of `retain` and `target`")
        return self


class RuleSpec(_Model):
    """Rows that a condition sends to a fixed tier."""

    when: str
    """Condition over features and columns, for example `code_language == "sql"`."""
    tier: str
    """The tier these rows go to."""


class PolicySpec(_Model):
    """What was learned, kept for the next run."""

    path: str | None = None
    """Folder of policy versions. Default: `policies/<name>` beside the folder of the job file."""


class JobSpec(_Model):
    """A job: instructions, a ladder of tiers, and what to keep."""

    name: Name
    """The job's name."""
    input: InputSpec
    output: OutputSpec
    tiers: tuple[TierSpec, ...] = Field(min_length=1, max_length=16)
    """The ladder, cheapest first; the last is the top tier, the baseline of the bill."""
    quality: QualitySpec | None = None
    """Least cost at this quality. Without it and without `budget_usd`: retain 0.98."""
    budget_usd: float | None = Field(None, gt=0)
    """Most USD for the run. Without `quality`: most quality for this budget."""
    generation: GenerationSpec = GenerationSpec()
    grading: GradingSpec = GradingSpec()
    calibration: CalibrationSpec = CalibrationSpec()
    policy: PolicySpec = PolicySpec()
    rules: tuple[RuleSpec, ...] = ()
    """Conditions that send rows to a fixed tier; the first that holds counts, a pin counts before it."""
    escalate: bool = True
    """Assign rows again after each leg, with the evidence of their answers."""
    overlength: Literal["next_tier", "error", "truncate"] = "next_tier"
    """A prompt longer than a tier's context: try the next tier, fail the row, or cut its middle out."""
    on_error: Literal["record", "fail"] = "record"
    """A line that cannot be read: record it in rejects.jsonl, or refuse the input before any model loads."""
    max_failed: int = Field(0, ge=0)
    """Failed rows (rejects among them) that still end with exit code 0."""

    @field_validator("tiers")
    @classmethod
    def _names_differ(cls, tiers: tuple[TierSpec, ...]) -> tuple[TierSpec, ...]:
        names = [tier.name for tier in tiers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tier name `{twice[0]}` stands twice")
        return tiers

    @model_validator(mode="after")
    def _rules_name_tiers(self) -> JobSpec:
        names = [tier.name for tier in self.tiers]
        if self.quality is not None and len(names) == 1:
            raise ValueError("quality: one tier leaves nothing to choose; add a tier, or take `quality` out")
        for i, rule in enumerate(self.rules):
            if rule.tier not in names:
                raise ValueError(f"rules.{i}.tier: no tier `{rule.tier}`{nearest(rule.tier, names)}")
        return self


class Job:
    """A loaded job: `spec` as written, and its paths resolved against the job file's folder.

    `identity` hashes what decides the results, so that a changed job never resumes another job's run.
    """

    def __init__(self, spec: JobSpec, file: Path, where: Mapping[tuple[str | int, ...], int]) -> None:
        self.spec = spec
        self.file = file
        self._where = where
        self.folder = file.parent
        paths = spec.input.path
        self.input_paths = tuple(self.resolve(p) for p in ((paths,) if isinstance(paths, str) else paths))
        self.output = Path(self.resolve(spec.output.path))
        default = self.folder.parent / "policies" / spec.name
        self.policy_root = Path(self.resolve(spec.policy.path)) if spec.policy.path else default
        self.top = len(spec.tiers) - 1

    def resolve(self, path: str) -> str:
        """An absolute path; relative ones start at the job file's folder."""
        expanded = Path(path).expanduser()
        return str(expanded if expanded.is_absolute() else (self.folder / expanded).resolve())

    def at(self, *loc: str | int) -> str:
        """`file:line` of a key of the job file, for messages."""
        for n in range(len(loc), -1, -1):
            if loc[:n] in self._where:
                return f"{self.file}:{self._where[loc[:n]]}"
        return str(self.file)

    @property
    def identity(self) -> str:
        text = json.dumps(self.spec.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load(file: str | Path, *, variables: Mapping[str, str] | None = None, changes: Sequence[str] = ()) -> Job:
    """The job in a YAML file, with `--var` values put into its paths and `--set key.path=value` applied.

    Raises SpecError: the file is missing or not YAML, or the job is wrong; names every fault with file:line.
    """
    path = Path(file).absolute()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"{file}: no such job file", hint=_job_files(path)) from None
    except IsADirectoryError:
        raise SpecError(f"{file}: is a folder, not a job file", hint=_job_files(path / "x")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: cannot be read: {error}") from None
    shown = str(file)
    data, where, faults = _parse(text, shown)
    for change in changes:
        _apply(data, change)
    if not isinstance(data, dict):
        raise SpecError(f"{shown}:1: a job file holds keys such as `name:`, `input:` and `tiers:`")
    _fill_paths(data, dict(variables or {}), shown, where, faults)
    try:
        spec = JobSpec.model_validate_json(json.dumps(data))
    except ValidationError as error:
        faults += _explain(error, shown, where)
        raise SpecError(faults) from None
    if faults:
        raise SpecError(faults)
    return Job(spec, path, where)


def schema() -> dict[str, Any]:
    """The job file's JSON Schema, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | JobSpec.model_json_schema()


def _job_files(path: Path) -> str:
    found = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return f"in that folder there is: {', '.join(found[:10])}" if found else "give the path of a YAML job file"


Where = dict[tuple[str | int, ...], int]


def _parse(text: str, shown: str) -> tuple[Any, Where, list[str]]:
    """Plain data, the line of every key, and the duplicate keys, from YAML 1.2 text."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

    try:
        root = YAML(typ="safe", pure=True).compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SpecError(f"{shown}{line}: not valid YAML: {error.problem or error.context}") from None
    except (YAMLError, RecursionError, ValueError) as error:
        raise SpecError(f"{shown}: not valid YAML: {str(error).splitlines()[0]}") from None
    where: Where = {}
    faults: list[str] = []
    count = 0

    def build(node: Node, loc: tuple[str | int, ...]) -> Any:
        nonlocal count
        count += 1
        if count > MAX_NODES or len(loc) > 50:
            raise SpecError(
                f"{shown}: the file unfolds to more than {MAX_NODES} values or 50 levels",
                hint="write the values out instead of using aliases (&name, *name)",
            )
        where.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                line = key_node.start_mark.line + 1
                if not isinstance(key_node, ScalarNode):
                    faults.append(f"{shown}:{line}: a key must be plain text")
                    continue
                key = str(key_node.value)
                if key in result:
                    first = where[(*loc, key)]
                    faults.append(f"{shown}:{line}: key `{_dotted((*loc, key))}` stands twice (first on line {first})")
                    continue
                where[(*loc, key)] = line
                result[key] = build(value_node, (*loc, key))
            return result
        if isinstance(node, SequenceNode):
            return [build(child, (*loc, i)) for i, child in enumerate(node.value)]
        return _scalar(str(node.value), str(node.tag), f"{shown}:{node.start_mark.line + 1}", faults)

    return (build(root, ()) if root is not None else {}), where, faults


def _scalar(value: str, tag: str, place: str, faults: list[str]) -> Any:
    kind = tag.rpartition(":")[2]
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return value.lower() == "true"
        if kind == "int":
            return int(value.replace("_", ""), 0 if value.lstrip("+-").lower().startswith(("0x", "0o")) else 10)
        if kind == "float":
            number = float(value.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
            if not math.isfinite(number):
                faults.append(f"{place}: `{value}` is not a usable number")
                return 0.0
            return number
    except ValueError:
        faults.append(f"{place}: `{value[:40]}` is not a usable number")
        return 0
    if kind in ("str", "timestamp"):
        return value
    faults.append(f"{place}: YAML tag `{tag}` is not allowed")
    return value


def _apply(data: Any, change: str) -> None:
    """Set one `key.path=value`; the value is read as YAML."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise SpecError(f"--set {change}: write --set key.path=value")
    value, _, faults = _parse(text, f"--set {key}")
    if faults:
        raise SpecError(faults)
    if value == {} and not text.strip().startswith("{"):
        value = None
    node = data
    parts = key.split(".")
    for i, part in enumerate(parts):
        index: str | int = int(part) if isinstance(node, list) and part.isdigit() else part
        if isinstance(node, list) and isinstance(index, str):
            names = [x.get("name") if isinstance(x, dict) else None for x in node]
            if part not in names:
                raise SpecError(f"--set {key}: `{part}` is neither a number nor a name in `{'.'.join(parts[:i])}`")
            index = names.index(part)
        if not isinstance(node, (dict, list)) or (isinstance(index, int) and index >= len(node)):
            raise SpecError(f"--set {key}: there is no `{'.'.join(parts[: i + 1])}` to set")
        if i == len(parts) - 1:
            node[index] = value  # type: ignore[index]
        else:
            if isinstance(node, dict) and not isinstance(node.get(str(index)), (dict, list)):
                node[str(index)] = {}
            node = node[index]


_VARIABLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _fill_paths(data: dict[str, Any], variables: dict[str, str], shown: str, where: Where, faults: list[str]) -> None:
    """Put variables into the paths of the job; a value may not lead out of the output folder."""
    now = datetime.now(UTC)
    known = {"date": now.strftime("%Y-%m-%d"), "run": now.strftime("%Y%m%dT%H%M%SZ")} | variables

    def fill(text: Any, loc: tuple[str | int, ...], inside: bool) -> Any:
        if isinstance(text, list):
            return [fill(t, (*loc, i), inside) for i, t in enumerate(text)]
        if not isinstance(text, str):
            return text
        place = f"{shown}:{where.get(loc, 1)}"

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name not in known:
                faults.append(
                    f"{place}: `{_dotted(loc)}` uses the variable {{{name}}}, which is not set"
                    f" (known: {', '.join(sorted(known))}) → give it with --var {name}=…"
                )
                return ""
            if inside and (known[name] in ("", ".", "..") or re.search(r"[/\\\0]", known[name])):
                faults.append(
                    f"{place}: the value of {{{name}}} (`{known[name]}`) would lead out of `{_dotted(loc)}`"
                    " → use letters, digits, `.`, `_` and `-`"
                )
            return known[name]

        return _VARIABLE.sub(value, text)

    for section, key, inside in (
        ("input", "path", False),
        ("output", "path", True),
        ("policy", "path", True),
    ):
        block = data.get(section)
        if isinstance(block, dict) and key in block:
            block[key] = fill(block[key], (section, key), inside)
    for i, tier in enumerate(data.get("tiers") or [] if isinstance(data.get("tiers"), list) else []):
        if isinstance(tier, dict) and "model" in tier:
            tier["model"] = fill(tier["model"], ("tiers", i, "model"), False)


def _dotted(loc: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in loc)


def nearest(word: str, candidates: Sequence[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; nearest: `{close[0]}`" if close else f"; known: {', '.join(candidates)}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, tuple, list, Annotated):
        for inner in get_args(annotation):
            yield from _models(inner)


def _model_at(loc: Sequence[str | int]) -> type[BaseModel]:
    model: type[BaseModel] = JobSpec
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models(model.model_fields[part].annotation), model)
    return model


def _homes(key: str, model: type[BaseModel] = JobSpec, path: str = "") -> Iterator[str]:
    """Dotted paths of the blocks in which `key` is a valid key."""
    for name, field in model.model_fields.items():
        if name == key:
            yield path or "the top level"
        for inner in _models(field.annotation):
            yield from _homes(key, inner, f"{path}.{name}".lstrip("."))


def _valid_key(key: str, fields: list[str]) -> str:
    """The nearest valid key, or the block in which the key would be valid."""
    close = difflib.get_close_matches(key, fields, n=1, cutoff=0.75)
    if close:
        return f"nearest: `{close[0]}`"
    everywhere = difflib.get_close_matches(key, list(_all_keys()), n=1, cutoff=0.8)
    if everywhere:
        homes = dict.fromkeys(_homes(everywhere[0]))
        return f"`{everywhere[0]}` belongs under {' or '.join(f'`{home}`' for home in homes)}"
    return nearest(key, fields).lstrip("; ")


def _all_keys(model: type[BaseModel] = JobSpec) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for inner in _models(field.annotation):
            yield from _all_keys(inner)


def _explain(error: ValidationError, shown: str, where: Where) -> list[str]:
    """One line a fault: file:line, the full key path, what is wrong, the nearest valid key."""
    faults = []
    found = error.errors(include_url=False)
    for fault in found:
        # a list whose every item is wrong is also called too short: the items' own faults say more
        if fault["type"] == "too_short" and any(
            len(f["loc"]) > len(fault["loc"]) and f["loc"][: len(fault["loc"])] == fault["loc"] for f in found
        ):
            continue
        loc = tuple(part for part in fault["loc"] if not (isinstance(part, str) and part in ("str", "tuple[str, ...]")))
        known = next(loc[:n] for n in range(len(loc), -1, -1) if loc[:n] in where or n == 0)
        place = f"{shown}:{where.get(known, 1)}"
        dotted = _dotted(loc)
        if fault["type"] == "extra_forbidden":
            key, fields = str(loc[-1]), list(_model_at(loc[:-1]).model_fields)
            text = f"unknown key `{dotted}`; {_valid_key(key, fields)}"
        elif fault["type"] == "missing":
            text = f"`{dotted}` is missing"
        elif fault["type"] == "value_error":
            text = str(fault["ctx"]["error"])
            # a check over the whole job names the key itself
            named = tuple(int(part) if part.isdigit() else part for part in text.partition(": ")[0].split("."))
            if not dotted and named in where:
                place = f"{shown}:{where[named]}"
            elif dotted:
                text = f"`{dotted}`: {text}"
        else:
            given = fault.get("input")
            value = (
                f" (given: {json.dumps(given, ensure_ascii=False)[:80]})" if not isinstance(given, (dict, list)) else ""
            )
            text = f"`{dotted}`: {fault['msg'][0].lower()}{fault['msg'][1:]}{value}"
        faults.append(f"{place}: {text}")
    return list(dict.fromkeys(faults))
