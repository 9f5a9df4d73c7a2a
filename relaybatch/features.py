"""Features: what a prompt looks like, counted in vectorised passes over its characters; request frame in, frames out.

Owns the lists of features and labels and their version. References are never read. The twelve families are those of
published prompt-difficulty models: length, sentences, rare words, lexical diversity, numbers, punctuation, code,
script, nesting (a stand-in for syntactic depth), instruction type, domain, and the length of the answer asked for.

A chunk of prompts becomes one array of code points. Every character has a kind (a set of signs below), every word
and pair of neighbouring words may stand in the lexicon; what is counted is how often a row has each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint64]
Kind = NDArray[np.uint8]
Counts = dict[str, NDArray[Any]]

FEATURES_VERSION = 2
LONGEST = 20_000  # characters of a prompt that are looked at; the full length is a feature of its own
CHUNK = 1 << 17  # characters at a time: arrays that stay in a core's cache
OTHER = 0xFFFF  # stands for all code points above the basic plane that are no ideographs
BASE = 0x9E3779B97F4A7C15  # of words' keys, polynomials in their characters modulo 2^64
SPREAD, PAIR, NUMBER = np.uint64(0xD1B54A32D192ED03), np.uint64(0x2545F4914F6CDD1D), np.uint64(0x5851F42D4C957F2D)
SLOT_BITS = 18  # of the table that finds a phrase by its key
ZERO, BLANK, LINE_END = ord("0"), ord(" "), ord("\n")

COMMON_WORDS = (
    "the of and to a in is it you that he was for on are with as i his they be at one have this from or had by"
    " hot but some what there we can out other were all your when up use word how said an each she which do their"
    " time if will way about many then them would write like so these her long make thing see him two has look"
    " more day could go come did my sound no most number who over know water than call first people may down side"
    " been now find any new work part take get place made live where after back little only round man year came"
    " show every good me give our under name very through just form much great think say help low line before turn"
    " cause same mean differ move right boy old too does tell sentence set three want air well also play small end"
    " put home read hand port large spell add even land here must big high such follow act why ask men change went"
    " light kind off need house picture try us again animal point mother world near build self earth father head"
    " stand own page should country found answer school grow study still learn plant cover food sun four thought"
    " let keep eye never last door between city tree cross since hard start might story saw far sea draw left late"
    " run while press close night real life few stop open seem together next white children begin got walk example"
    " ease paper often always music those both mark book letter until mile river car feet care second group carry"
    " took rain eat room friend began idea fish mountain north once base hear horse cut sure watch color face wood"
    " main enough plain girl usual young ready above ever red list though feel talk bird soon body dog family"
    " direct pose leave song measure state product black short class wind question happen complete ship area half"
    " rock order fire south problem piece told knew pass farm top whole king size heard best hour better true"
    " during hundred am remember step early hold west ground interest reach fast five sing listen six table travel"
    " less morning ten simple several toward war lay against pattern slow center love person money serve appear"
    " road map science rule govern pull cold notice voice fall power town fine certain fly unit lead cry dark"
    " machine note wait plan figure star box noun field rest correct able pound done beauty drive stood contain"
    " front teach week final gave green oh quick develop sleep warm free minute strong special mind behind clear"
    " tail produce fact street inch lot nothing course stay wheel full force blue object decide surface deep moon"
    " island foot yet busy test record boat common gold possible plane age dry wonder laugh thousand ago ran check"
    " game shape yes miss brought heat snow bed bring sit perhaps fill east weight language among not into its"
    " because"
)

# Phrases of one or two words, whatever their case; "7" stands for any number, a Chinese character is a word.
CUES: dict[str, str] = {
    "yes_no": "or false, or no, it true, this true, 对错, 是真, 是否",
    "calculate": "calculate, compute, sum of, add, subtract, multiply, multiplied, multiplies, divide, divided,"
    " divides, times, product of, solve, evaluate, how much, 7 x, 等于, 计算, 求",
    "sort": "sort, sorted, order these, order the, rank, ascending, descending, arrange, 排列, 排序, 升序, 降序",
    "reverse": "reverse, reversed, backward, backwards, turn around, 倒过, 反转, 倒序",
    "count": "how many, how often, count, number of, 几个, 多少, 几次, 数一",
    "compare": "largest, smallest, biggest, greatest, lowest, highest, maximum, minimum, least, compare, larger,"
    " smaller, 最大, 最小, 比较",
    "classify": "label, classify, classified, classification, category, categorise, categorize, categories, sentiment,"
    " or negative, 判断, 分类, 正面, 负面",
    "convert": "convert, roman, in words, in digits, digits, spell out, express, 换算, 罗马, 汉字, 数字",
    "extract": "extract, the value, this json, where does, how old, the job, the name, 取出, 的值, 哪里, 几岁, 职业",
    "translate": "translate, translation, 翻译",
    "summarise": "summarise, summarize, summary, tl dr, tldr, in short, 总结, 概括, 摘要",
    "complete": "continue, complete, fill in, comes next, next number, 下一, 填数, 补全",
    "write": "write, compose, draft, essay, poem, story, email, generate, create, 写一, 作文, 撰写",
    "explain": "why, explain, describe, discuss, prove, derive, justify, 为什, 解释, 说明, 证明",
    "question": "what, which, who, whom, when, where, how, 什么, 哪, 谁, 怎",
}
DOMAINS: dict[str, str] = {
    "maths": "equation, integral, theorem, probability, triangle, polynomial, matrix, derivative, sum, product,"
    " percent, prime, integer, integers, fraction, frac, sqrt, 方程, 概率, 三角, 计算, 求",
    "science": "atom, atoms, molecule, molecules, molecular, energy, velocity, cell, cells, protein, proteins, acid,"
    " electron, electrons, voltage, species, quantum, chemical, enzyme, enzymes, mass",
    "law": "court, plaintiff, defendant, statute, contract, jury, liable, constitution, constitutional, attorney, law",
    "medicine": "patient, patients, disease, symptom, symptoms, diagnosis, diagnosed, diagnostic, clinical, therapy,"
    " blood, infection, surgery",
    "business": "market, price, cost, revenue, profit, tax, interest rate, investment, company, accounting",
    "humanities": "philosophy, philosopher, philosophers, philosophical, history, moral, morally, morality, ethics,"
    " ethical, century, religion, war, empire, theory of",
}
_PHRASES: dict[str, str] = {
    "negations": "not, no, never, none, nor, without, except, cannot, don t, doesn t, didn t, isn t, aren t, wasn t,"
    " weren t, won t, wouldn t, can t, couldn t, shouldn t, hasn t, haven t, hadn t, 不, 没, 非",
    "comparatives": "more, less, than, larger, smaller, greater, before, after, most, least, 比, 更, 最, 之后, 之前",
    "conjunctions": "and, or, but, if, while, because, then, although, who, which, that, 且, 或, 但, 如果, 虽然, 因为,"
    " 那么",
    "units": "km, cm, mm, kg, mg, ml, min, day, days, hour, hours, week, weeks, g, h, l, m, s, t, 天, 岁, 个, 倍",
    "english": "the, of, and, is, are, was, which, what, how, with, this, that, from, does, would",
    "pluses": "plus, add, added, sum of, 加, 和",
    "minuses": "minus, subtract, subtracted, away from, difference, 减, 差",
    "times": "times, multiply, multiplied, product of, 7 x, 乘, 积",
    "ratios": "divide, divided, ratio, quotient, percent, 除, 商",
    "roman": "roman, 罗马",
    "weekdays": "monday, tuesday, wednesday, thursday, friday, saturday, sunday, 星期",
    "common": ", ".join(COMMON_WORDS.split()),
}
# what may be code: only rows with these words and signs are searched with the pattern
CODE: dict[str, tuple[str, str, str]] = {
    "sql": (
        "select, insert into, create table, update",
        "",
        r"\bSELECT\s[^;]+?\sFROM\s|(?i)\bselect\s+(?:\*|count\(|distinct\s)[^;]*?\sfrom\s|\binsert\s+into\s+\w"
        r"|\bselect\s[^;]*?\sfrom\s+[\w.]+\s+(?:where|group by|order by|limit|join)\s|\bcreate\s+table\s+\w"
        r"|\bupdate\s+\w+\s+set\s+\w+\s*=",
    ),
    "python": (
        "def, import, lambda, print, self, elif, assert",
        "",
        r"\bdef\s+\w+\s*\(|(?m:^\s*(?:from\s+[\w.]+\s+)?import\s+\w+)|\blambda\s+\w+\s*:|\bprint\(|\bself\.\w"
        r"|\belif\b.*:|\bassert\s+\w+\(",
    ),
    "javascript": (
        "function, const, let, var, console",
        "=({.",
        r"\bfunction\s*\w*\s*\([^()]*\)\s*\{|\bconst\s+\w+\s*=|\blet\s+\w+\s*=|=>\s*[{(\w]|console\.log|\bvar\s+\w+\s*=",
    ),
    "c_java": (
        "include, public, int, std, system",
        ";{<(",
        r"#include\s*<|\bpublic\s+(?:static|class|void)\b|\bint\s+main\s*\(|\bstd::|System\.out",
    ),
    "html": (
        "div, span, html, body, p, a, table, td, script, head",
        "<",
        r"(?i)</(?:div|span|html|body|p|a|table|td|script|head)>|<(?:div|span|html|body|table|td|script|head)(?:\s[^<>]*)?>"
        r"|<(?:p|a)\s[^<>]+>",
    ),
    "shell": (
        "sudo, bin, apt get, pip install, cd, grep, chmod",
        "$#/~.-",
        r"(?m)^\s*(?:\$\s+\w|sudo\s+\w|#!/bin|apt-get\s|pip install\s|cd\s+[/~.]|grep\s+-|chmod\s+[0-9+])",
    ),
    "json": ("", "{", r"\{\s*\"[^\"]+\"\s*:"),
}
NUMERALS = {"one": 1, "single": 1, "two": 2, "three": 3, "few": 3}
ASKED = {"word": 1.3, "sentence": 25.0, "paragraph": 100.0, "line": 15.0}  # tokens of the answer, each

# characters by list, and by what Unicode says of them
_SIGNS: dict[str, str] = {
    "digits": "0123456789",
    "newlines": "\n",
    "commas": ",，、",
    "quotes": '"“”「」',
    "brackets": "([{（【",
    "closing": ")]}）】",
    "operators": "-+*/×÷=<>^%",
    "punctuation": ".,;:!?。，；：！？、",
    "code_signs": "{};_\\`|&",
    "questions": "?？",
    "plus_signs": "+",
    "minus_signs": "-−",
    "times_signs": "*×·",
    "ratio_signs": "/÷%",
    "ends": ".!?。！？",
    "full_width_ends": "。！？",
    "roman_letters": "IVXLCDM",
    **{f"signs_{name}": signs for name, (_, signs, _) in CODE.items()},
}
_SCRIPTS: dict[str, str] = {
    "space": r"\s",
    "letters": r"\p{L}",
    "numerals": r"\p{N}",
    "uppercase": r"\p{Lu}",
    "latin": r"\p{Latin}",
    "han": r"\p{Han}",
    "kana": r"[\p{Hiragana}\p{Katakana}]",
    "hangul": r"\p{Hangul}",
    "cyrillic": r"\p{Cyrillic}",
    "arabic": r"\p{Arabic}",
}
_LEXICON: dict[str, str] = {
    **_PHRASES,
    **{f"asked_{unit}": ", ".join(f"{n} {unit}, {n} {unit}s" for n in ("7", *NUMERALS)) for unit in ASKED},
    **{f"numeral_{n}": ", ".join(w for w, m in NUMERALS.items() if m == n) for n in set(NUMERALS.values())},
    **{f"asks_{name}": phrases for name, phrases in CUES.items()},
    **{f"domain_{name}": phrases for name, phrases in DOMAINS.items()},
    **{f"words_{name}": phrases for name, (phrases, _, _) in CODE.items()},
}

FEATURE_NAMES: tuple[str, ...] = (
    "characters_log", "tokens_log", "words", "sentences", "sentence_length", "word_length", "rare_share",
    "diversity", "digit_share", "longest_number", "largest_number_log", "second_number_log", "nesting",
    "answer_length", "turns", "list_items", "digits", "numbers", "long_numbers", "commas", "quotes", "brackets",
    "operators", "arithmetic", "pluses", "minuses", "times", "ratios", "punctuation", "symbols", "code_signs",
    "uppercase", "newlines", "questions", "negations", "comparatives", "conjunctions", "units", "dates",
    "roman", "single_letters", "options", "latin", "han", "kana", "hangul", "cyrillic", "arabic",
    *(f"asks_{c}" for c in CUES), *(f"code_{c}" for c in CODE), *(f"domain_{d}" for d in DOMAINS),
)  # fmt: skip
LABEL_NAMES: tuple[str, ...] = (
    "characters", "tokens_estimated", "words", "sentences", "numbers", "language", "code_language", "domain",
    "instruction_type", "nesting", "answer_length", "turns",
)  # fmt: skip
_NUMBER_LABELS = ("characters", "tokens_estimated", "words", "sentences", "numbers", "nesting", "answer_length")
LANGUAGES = ("ja", "ko", "zh", "ru", "ar", "other", "en", "latin", "none")
_TASKS = {**dict.fromkeys(CUES, "task"), "yes_no": "question", "count": "question", "compare": "question",
          "explain": "question", "question": "question", "other": "other"}  # fmt: skip


def describe(requests: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Features and labels of requests, from one pass over the prompts.

    Features: `row` and one finite float32 column for each of FEATURE_NAMES, in the same order. Labels, what rules may
    ask about a row: `row` and LABEL_NAMES, words and plain numbers. Identical prompts are computed once.
    """
    import pyarrow as pa

    texts = requests["prompt"].cast(pl.String).fill_null("")
    first, same = _distinct(texts)
    block, numbers = _computed(texts if same is None else texts.gather(first))
    if same is not None:
        block, numbers = block[:, same], {name: values[same] for name, values in numbers.items()}
    labelled = _labels(numbers | dict(zip(FEATURE_NAMES, block, strict=True)))
    turns = pl.Series("turns", np.ones(len(texts), np.uint32))
    if isinstance(requests.schema.get("messages"), pl.List):
        turns = requests["messages"].list.len().fill_null(1).alias("turns")
    labelled["turns"] = turns
    block[FEATURE_NAMES.index("turns")] = turns.to_numpy()
    # all columns look into one block, so that `to_numpy` copies nothing
    features = [pl.Series(name, pa.array(column)) for column, name in zip(block, FEATURE_NAMES, strict=True)]
    return (
        pl.DataFrame([requests["row"], *features]),
        pl.DataFrame([requests["row"], *(labelled[name] for name in LABEL_NAMES)]),
    )


def extract(requests: pl.DataFrame) -> pl.DataFrame:
    """The features of `describe`."""
    return describe(requests)[0]


def labels(requests: pl.DataFrame) -> pl.DataFrame:
    """The labels of `describe`."""
    return describe(requests)[1]


def groups(requests: pl.DataFrame) -> pl.Series:
    """A coarse kind for each row, such as `zh/maths/none/calculate`: where forecasts borrow strength from."""
    return group_of(labels(requests))


def group_of(labelled: pl.DataFrame) -> pl.Series:
    """The coarse kind of rows whose labels are known; a row of a special domain is a task, a question or other."""
    kind = pl.col("instruction_type")
    coarse = pl.when(pl.col("domain").is_in(["general", "maths", "code"])).then(kind).otherwise(kind.replace(_TASKS))
    return labelled.select(
        pl.concat_str("language", "domain", "code_language", coarse, separator="/").alias("group")
    ).to_series()


def _distinct(texts: pl.Series) -> tuple[Ints, Ints | None]:
    """Where each different text stands first, and for every row which of them it is; None: all differ."""
    _, first, same = np.unique(texts.hash().to_numpy(), return_index=True, return_inverse=True)
    if len(first) == len(texts):
        return first, None
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[same]


def _computed(texts: pl.Series) -> tuple[NDArray[np.float32], Counts]:
    """A row (N,) for each feature, that of turns not yet known, and the other numbers that labels need."""
    characters = texts.str.len_chars().to_numpy().astype(np.int64)
    block = np.empty((len(FEATURE_NAMES), len(texts)), np.float32)
    numbers: Counts = {
        name: np.empty(len(texts), np.float32) for name in (*_NUMBER_LABELS, "language") if name not in FEATURE_NAMES
    }
    found = numbers | dict(zip(FEATURE_NAMES, block, strict=True))
    stops = np.cumsum(np.minimum(characters, LONGEST) + 1)
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(stops, (stops[start - 1] if start else 0) + CHUNK, side="right"))
        stop = max(stop, start + 1)
        part = texts.slice(start, stop - start)
        longest = int(characters[start:stop].max())
        part = part.str.slice(0, LONGEST) if longest > LONGEST else part
        for name, values in _measures(part, characters[start:stop]).items():
            if name in found:
                found[name][start:stop] = values
        start = stop
    for name, (_, _, pattern) in CODE.items():
        code = found[f"code_{name}"]
        rows = np.flatnonzero(code)
        if len(rows):
            code[rows] = texts.gather(rows).str.slice(0, LONGEST).str.contains(pattern).to_numpy()
    return block, numbers


def _labels(found: Counts) -> dict[str, pl.Series]:
    """Label columns by name, but turns."""
    code = np.stack([found[f"code_{name}"] > 0 for name in CODE])
    asks = np.stack([found[f"asks_{name}"] > 0 for name in CUES])
    fields = np.stack([found[f"domain_{name}"] for name in DOMAINS])
    # the first that is there, but for domains the one with the most words
    chosen = {
        "language": (LANGUAGES, found["language"].astype(np.int64)),
        "code_language": ((*CODE, "none"), np.where(code.any(axis=0), code.argmax(axis=0), len(CODE))),
        "instruction_type": ((*CUES, "other"), np.where(asks.any(axis=0), asks.argmax(axis=0), len(CUES))),
        "domain": (
            (*DOMAINS, "general", "code"),
            np.select([code.any(axis=0), fields.any(axis=0)], [len(DOMAINS) + 1, fields.argmax(axis=0)], len(DOMAINS)),
        ),
    }
    named = {name: pl.Series(name, names).gather(places) for name, (names, places) in chosen.items()}
    return named | {name: pl.Series(name, found[name].astype(np.uint32)) for name in _NUMBER_LABELS}


@dataclass(frozen=True)
class _Kinds:
    """Named sets, and the kinds of what is in them: things that are in the same sets are of one kind."""

    names: tuple[str, ...]
    member: Bools
    """(kinds, sets)."""

    @classmethod
    def of(cls, sets: Mapping[str, Bools]) -> tuple[_Kinds, Kind]:
        """The kinds and each thing's kind; kinds in no set come first, those in the first set last."""
        inside = np.stack(list(sets.values()), axis=1)
        shifts = np.arange(len(sets), dtype=np.uint64)[::-1]
        alike, kind = np.unique((inside.astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64), return_inverse=True)
        member = (alike[:, None] >> shifts) & np.uint64(1) > 0
        return cls(tuple(sets), member), kind.astype(np.uint8)

    def tally(self, row: Ints, kind: Kind, rows: int) -> Counts:
        """For each set, how many things every row has in it."""
        kinds = len(self.member)
        counts = np.bincount(kind.astype(np.int64) * rows + row, minlength=rows * kinds).reshape(kinds, rows)
        # sums of a few kinds each: a matrix product would wake the threads of BLAS for every chunk
        return {name: counts[inside].sum(axis=0) for name, inside in zip(self.names, self.member.T, strict=True)}

    def within(self, name: str) -> Bools:
        """(kinds,): is the kind in this set?"""
        return self.member[:, self.names.index(name)]


@dataclass(frozen=True)
class _Characters:
    """What is known of each code point; kinds are sorted: signs, from `space` on spaces, then letters, and so on."""

    kinds: _Kinds
    kind: Kind
    key: Keys
    """What the character, in lower case, brings to the key of its word; 0 if it is no part of a word."""
    space: int
    letter: int
    digit: int
    ideograph: int


@cache
def _characters() -> _Characters:
    points = np.array([*range(0xD800), *range(0xE000, OTHER)])
    shown = pl.Series([chr(p) for p in points])
    sets = {name: np.zeros(OTHER + 1, np.bool_) for name in ("ideographs", "digits", "word", "space")}
    for name, pattern in _SCRIPTS.items():
        sets[name] = np.zeros(OTHER + 1, np.bool_)
        sets[name][points] = shown.str.contains(pattern).to_numpy()
    for name, signs in _SIGNS.items():
        sets[name] = np.zeros(OTHER + 1, np.bool_)
        sets[name][[ord(sign) for sign in signs]] = True
    sets["word"] = sets["letters"] | sets["numerals"]
    sets["ideographs"] = sets["han"] & sets["letters"]
    sets["symbols"] = ~(sets["word"] | sets["space"] | sets["punctuation"])
    kinds, kind = _Kinds.of(sets)
    key = np.zeros(OTHER + 1, np.uint64)
    key[points] = [ord(lower[0]) for lower in shown.str.to_lowercase()]
    starts = [int(np.argmax(kinds.within(name))) for name in ("space", "word", "digits", "ideographs")]
    return _Characters(kinds, kind, np.where(sets["word"], key, np.uint64(0)), *starts)


@cache
def _powers() -> tuple[Keys, Keys]:
    """Powers of a base modulo 2^64 and of its inverse: a word's key is the same wherever it stands."""
    length = CHUNK + LONGEST + 2
    up, down = (np.full(length, n, np.uint64) for n in (BASE, pow(BASE, -1, 1 << 64)))
    up[0], down[0] = 1, SPREAD
    return np.cumprod(up), np.cumprod(down)


class _Text:
    """A chunk of prompts as one array of code points, each prompt with a line end behind it, and its words.

    By character: `code` (`padded` has one line end more on both sides), `kind`, `row`, and its neighbours' kinds
    `before` and `after`; `signs`: where signs stand. By word: `start`, `length`, `word_row`, and `key`, equal for equal words.
    """

    def __init__(self, texts: pl.Series) -> None:
        self.characters = chars = _characters()
        self.rows = len(texts)
        text = "".join(("\n", texts.str.join("\n").item(), "\n\n"))
        self.padded = code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        self.code = code[1:-1]
        if not text.isascii() and code.max() >= OTHER:
            code = np.where((code >= 0x20000) & (code < 0x32400), np.uint32(0x4E00), np.minimum(code, OTHER))
        kind = chars.kind[code]
        self.before, self.kind, self.after = kind[:-2], kind[1:-1], kind[2:]
        lengths = texts.str.len_chars().to_numpy().astype(np.int64) + 1
        self.row = np.repeat(np.arange(self.rows), lengths)
        self.line_end = np.cumsum(lengths) - 1
        self.signs = np.flatnonzero(self.kind < chars.space)

        part, alone = kind >= chars.letter, kind >= chars.ideograph
        outside = ~part | alone
        self.start = np.flatnonzero(part[1:-1] & (outside[:-2] | alone[1:-1]))
        self.length = np.flatnonzero(part[1:-1] & (outside[2:] | alone[1:-1])) + 1 - self.start
        self.word_row = self.row[self.start]
        power, inverse = _powers()
        key = chars.key[code[1:-1]]
        key *= power[: len(key)]
        self.key = np.add.reduceat(key, self.start) * inverse[self.start] if len(self.start) else key[:0]
        first = self.kind[self.start]
        self.is_number = (first >= chars.digit) & (first < chars.ideograph)

    def per_row(self, row: Ints) -> NDArray[np.float64]:
        """How often each row stands in `row`."""
        return np.bincount(row, minlength=self.rows).astype(np.float64)


@dataclass(frozen=True)
class _Lexicon:
    """Phrases of one or two words by key."""

    kinds: _Kinds
    keys: Keys
    kind: Kind
    slots: NDArray[np.int16]
    """Where a phrase stands by the top bits of its key times `factor`; 0 for no phrase."""
    factor: np.uint64

    def find(self, keys: Keys) -> Kind:
        """The kind of each key's phrase, that of no phrase among them."""
        place = self.slots[(keys * self.factor) >> np.uint64(64 - SLOT_BITS)]
        return np.asarray(np.where(self.keys[place] == keys, self.kind[place], self.kind[0]))


@cache
def _lexicon() -> _Lexicon:
    lists = {name: listed.split(", ") if listed else [] for name, listed in _LEXICON.items()}
    phrases = sorted({phrase for each in lists.values() for phrase in each})
    lists["latin_words"] = [phrase for phrase in phrases if phrase.isascii() and phrase.isalpha() and len(phrase) > 1]
    text = _Text(pl.Series(phrases))
    word, pair = _phrase_keys(text)
    words = np.bincount(text.word_row)
    first = np.cumsum(words) - words
    keys = np.append(np.uint64(0), np.where(words == 1, word[first], np.append(pair, np.uint64(0))[first]))
    kinds, kind = _Kinds.of({name: np.isin(["", *phrases], each) for name, each in lists.items()})
    for odd in range(1, 1 << 16, 2):
        factor = np.uint64(odd * BASE % (1 << 64))
        slot = (keys[1:] * factor) >> np.uint64(64 - SLOT_BITS)
        if len(np.unique(slot)) == len(slot):
            break
    slots = np.zeros(1 << SLOT_BITS, np.int16)
    slots[slot] = np.arange(1, len(keys))
    return _Lexicon(kinds, keys, kind, slots, factor)


def _phrase_keys(text: _Text) -> tuple[Keys, Keys]:
    """Keys of the W words, numbers all alike, and of the W - 1 pairs of neighbours, 0 across prompts."""
    word = np.where(text.is_number, NUMBER, text.key)
    pair = word[:-1] * PAIR + word[1:]
    pair[text.word_row[:-1] != text.word_row[1:]] = 0
    return word, pair


def _measures(prompts: pl.Series, characters: Ints) -> Counts:
    """Everything that is known of a chunk, by name; `characters` as before prompts were cut."""
    text, lexicon = _Text(prompts), _lexicon()
    rows = text.rows
    signs = text.characters.kinds.tally(text.row, text.kind, rows)
    word, pair = _phrase_keys(text)
    word_kind, pair_kind = lexicon.find(word), lexicon.find(pair)
    found = signs | lexicon.kinds.tally(
        np.concatenate([text.word_row, text.word_row[:-1]]), np.concatenate([word_kind, pair_kind]), rows
    )
    found |= _numbers(text) | _signs(text) | _letters(text)
    found["nesting"] = _nesting(text)
    found["newlines"] -= 1
    found["words"] = text.per_row(text.word_row)
    found["answer_length"] = _answer_length(text, lexicon, word_kind, pair_kind)
    for name, (words, marks, _) in CODE.items():
        has_words, has_marks = found[f"words_{name}"] > 0, found[f"signs_{name}"] > 0
        found[f"code_{name}"] = (has_words | (not words)) & (has_marks | (not marks))
    also = {
        "code_signs": "sign_pairs",
        "pluses": "plus_signs",
        "minuses": "minus_signs",
        "times": "times_signs",
        "ratios": "ratio_signs",
        "roman": "roman_numerals",
        "domain_maths": "arithmetic",
        "dates": "weekdays",
    }
    for name, more in also.items():
        found[name] = found[name] + found[more]
    for name in CUES:
        found[f"asks_{name}"] = found[f"asks_{name}"] > 0
    found["asks_calculate"] |= found["arithmetic"] > 0
    found["asks_question"] |= found["questions"] > 0
    cjk, pieces = found["han"] + found["kana"] + found["hangul"], found["words"]
    spelt = np.maximum(pieces - found["ideographs"] - text.per_row(text.word_row[text.is_number]), 0)
    # Latin text has about four characters a token, Chinese somewhat over one, digits and signs one each
    dense = found["digits"] + found["symbols"] * 0.8
    loose = np.maximum(characters - cjk - found["digits"] - found["symbols"], 0)
    tokens = np.ceil(cjk * 0.8 + dense + loose / 4.2)
    found |= {
        "characters": characters,
        "tokens_estimated": tokens,
        "characters_log": np.log1p(characters),
        "tokens_log": np.log1p(tokens),
        "sentence_length": pieces / found["sentences"],
        "word_length": np.maximum(found["letters"] - cjk, 0) / np.maximum(spelt, 1),
        "rare_share": 1 - np.clip(found["common"] / np.maximum(spelt, 1), 0, 1),
        "diversity": _distinct_words(text) / np.maximum(pieces, 1),
        "digit_share": found["digits"] / np.maximum(characters, 1),
        "list_items": np.maximum(np.maximum(found["commas"], found["single_letters"]), found["numbers"]),
        "language": _language(found, spelt),
    }
    return found


def _language(found: Counts, spelt: NDArray[np.float64]) -> Ints:
    """The place in LANGUAGES, by script; Latin script with enough words of the lexicon is English."""
    latin, letters = found["latin"], found["letters"]
    words = spelt - found["single_letters"]
    english = (found["latin_words"] * 5 >= words) | (found["english"] * 16 >= words)
    english &= found["latin_words"] > 0
    signs = [
        found["kana"] > 0,
        found["hangul"] > latin,
        (found["han"] * 3 > latin) | ((found["han"] > 0) & ~english),
        found["cyrillic"] > latin,
        found["arabic"] > latin,
        letters > 2 * latin,
        english,
        latin > 0,
    ]
    return np.select(signs, list(range(len(signs))), len(signs))


def _distinct_words(text: _Text) -> NDArray[np.float64]:
    """How many different words each row has."""
    row_and_key = np.sort((text.word_row.astype(np.uint64) << np.uint64(44)) | (text.key >> np.uint64(20)))
    new = np.ones(len(row_and_key), np.bool_)
    new[1:] = row_and_key[1:] != row_and_key[:-1]
    return text.per_row((row_and_key[new] >> np.uint64(44)).astype(np.int64))


def _numbers(text: _Text) -> Counts:
    """Runs of digits: how many, how long, how large; dates, and signs of arithmetic between numbers."""
    chars, code = text.characters, text.padded
    digits = np.flatnonzero((text.kind >= chars.digit) & (text.kind < chars.ideograph))
    start = digits[np.flatnonzero(np.diff(digits, prepend=-2) > 1)]
    stop = digits[np.flatnonzero(np.diff(digits, append=len(text.kind) + 1) > 1)] + 1
    length, row = stop - start, text.row[start]
    value = np.zeros(len(start))
    for place in range(min(int(length.max(initial=0)), 18)):
        live = np.flatnonzero(length > place)
        value[live] = value[live] * 10 + (text.code[start[live] + place] - ZERO)
    order = np.lexsort((value, row))
    last = np.flatnonzero(np.diff(row, append=-1))  # rows rise, so each row's largest stands at its end
    largest, second, longest = (np.zeros(text.rows) for _ in range(3))
    largest[row[last]] = value[order[last]]
    further = last[(last > 0) & (row[last - 1] == row[last])]
    second[row[further]] = value[order[further - 1]]
    np.maximum.at(longest, row, length)
    # of a decimal, the part behind the point is no number of its own (padded code stands one further)
    fraction = (code[start] == ord(".")) & _is_digit(code[start - 1])
    date = np.flatnonzero((length[:-2] == 4) & (length[1:-1] == 2) & (length[2:] == 2) & (start[2:] - start[:-2] == 8)
                          & (text.code[stop[:-2]] == ord("-")) & (text.code[stop[1:-1]] == ord("-")))  # fmt: skip
    operators = text.signs[chars.kinds.within("operators")[text.kind[text.signs]]]
    left, right = code[operators], code[operators + 2]
    left = np.where(left == BLANK, code[operators - 1], left)
    right = np.where(right == BLANK, code[np.minimum(operators + 3, len(code) - 1)], right)
    dates = text.per_row(row[date])
    arithmetic = operators[_is_digit(left) & (_is_digit(right) | (right == ord("(")))]
    return {
        "numbers": text.per_row(row[~fraction]),
        "long_numbers": text.per_row(row[length >= 3]),
        "longest_number": longest,
        "largest_number_log": np.log1p(largest),
        "second_number_log": np.log1p(second),
        "dates": dates,
        "arithmetic": text.per_row(text.row[arithmetic]) - 2 * dates,
    }


def _is_digit(code: NDArray[np.uint32]) -> Bools:
    return np.asarray((code >= ZERO) & (code < ZERO + 10))


def _signs(text: _Text) -> Counts:
    """Sentences, at least 1: they end at a sign before a space, a full-width sign or a line end; pairs like `==`."""
    chars, kinds = text.characters, text.characters.kinds
    signs, kind, after = text.signs, text.kind[text.signs], text.after[text.signs]
    before_space = (after >= chars.space) & (after < chars.letter)
    ends = signs[kinds.within("full_width_ends")[kind] | (kinds.within("ends")[kind] & before_space)]
    lines = np.flatnonzero(text.code == LINE_END)
    lines = lines[(text.line_end[text.row[lines]] != lines) & ~kinds.within("newlines")[text.before[lines]]
                  & ~kinds.within("ends")[text.before[lines]]]  # fmt: skip
    last = text.before[text.line_end]
    unfinished = ~kinds.within("ends")[last] & ((last < chars.space) | (last >= chars.letter))
    first, second = text.code[signs], text.padded[signs + 2]
    both = [(first == ord(pair[0])) & (second == ord(pair[1])) for pair in ("==", "!=", "->", "=>", "::")]
    pairs = signs[np.logical_or.reduce(both)]
    return {
        "sentences": np.maximum(text.per_row(text.row[ends]) + text.per_row(text.row[lines]) + unfinished, 1),
        "sign_pairs": text.per_row(text.row[pairs]),
    }


def _letters(text: _Text) -> Counts:
    """Words of one letter, letters of options such as `A.` at the start of a line, and Roman numerals."""
    chars, code = text.characters, text.padded
    alone = text.start[text.length == 1]
    letter = text.code[alone]
    option = alone[(letter >= ord("A")) & (letter <= ord("J"))]
    before, behind, then = code[option], code[option + 2], text.kind[np.minimum(option + 2, len(text.kind) - 1)]
    before = np.where(before == ord("("), code[option - 1], before)
    closed = (behind == ord(".")) | (behind == ord(")")) | (behind == ord(":"))
    option = option[closed & (before == LINE_END) & (then >= chars.space) & (then < chars.letter)]
    is_roman = chars.kinds.within("roman_letters")
    few = np.flatnonzero((text.length > 1) & (text.length < 16) & is_roman[text.kind[text.start]])
    start, length, roman = text.start[few], text.length[few], np.ones(len(few), np.bool_)
    for place in range(1, 15):
        kind = text.kind[np.minimum(start + place, len(text.kind) - 1)]
        roman &= (length <= place) | is_roman[kind]
    return {
        "single_letters": text.per_row(text.row[alone[(letter >= ord("a")) & (letter <= ord("z"))]]),
        "options": text.per_row(text.row[option]),
        "roman_numerals": text.per_row(text.row[start[roman]]),
    }


def _nesting(text: _Text) -> NDArray[np.float64]:
    """The most brackets that are open at once in each row, at most 10; a bracket that closes nothing is not counted."""
    kinds, most = text.characters.kinds, np.zeros(text.rows)
    step = kinds.within("brackets").astype(np.int64) - kinds.within("closing")
    places = text.signs[step[text.kind[text.signs]] != 0]
    if not len(places):
        return most
    row, steps = text.row[places], step[text.kind[places]]
    depth = np.cumsum(steps)
    first = np.flatnonzero(np.diff(row, prepend=-1))
    depth -= np.repeat(depth[first] - steps[first], np.diff(first, append=len(row)))
    # the lowest depth so far in the row: each row is shifted below the one before it
    shift = row * (4 * LONGEST)
    low = np.minimum(np.minimum.accumulate(depth - shift) + shift, 0)
    np.maximum.at(most, row, depth - low)
    return np.minimum(most, 10)


def _answer_length(text: _Text, lexicon: _Lexicon, word_kind: Kind, pair_kind: Kind) -> NDArray[np.float64]:
    """Tokens of the answer that each row asks for in words, sentences, paragraphs or lines; 0 if it asks for none."""
    tokens = np.zeros(text.rows)
    for unit, each in ASKED.items():
        word = np.flatnonzero(lexicon.kinds.within(f"asked_{unit}")[pair_kind])
        count = np.zeros(len(word))
        for numeral in set(NUMERALS.values()):
            count[lexicon.kinds.within(f"numeral_{numeral}")[word_kind[word]]] = numeral
        for place in range(min(int(text.length[word].max(initial=0)), 4)):
            code = text.code[np.minimum(text.start[word] + place, len(text.code) - 1)]
            live = text.is_number[word] & (text.length[word] > place) & _is_digit(code)
            count[live] = count[live] * 10 + (code[live] - ZERO)
        np.maximum.at(tokens, text.word_row[word], count * each)
    return tokens
