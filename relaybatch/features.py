"""Features: what a prompt looks like, as vectorised Polars expressions; request frame in, float32 frame out.

Owns the list of features and its version. References are never read. The twelve families are those of published
prompt-difficulty models: length, sentences, rare words, lexical diversity, numbers, punctuation, code, script,
nesting (a stand-in for syntactic depth), instruction type, domain, and the length of the answer that is asked for.
"""

from __future__ import annotations

import polars as pl

FEATURES_VERSION = 1
CHUNK = 65_536  # rows at a time: bounds the memory of intermediate columns
LONGEST = 20_000  # characters of a prompt that are looked at; the full length is a feature of its own

COMMON_WORDS = (
    "the of and to a in is it you that he was for on are with as i his they be at one have this from or had by hot but"
    " some what there we can out other were all your when up use word how said an each she which do their time if will"
    " way about many then them would write like so these her long make thing see him two has look more day could go"
    " come did my sound no most number who over know water than call first people may down side been now find any new"
    " work part take get place made live where after back little only round man year came show every good me give our"
    " under name very through just form much great think say help low line before turn cause same mean differ move"
    " right boy old too does tell sentence set three want air well also play small end put home read hand port large"
    " spell add even land here must big high such follow act why ask men change went light kind off need house picture"
    " try us again animal point mother world near build self earth father head stand own page should country found"
    " answer school grow study still learn plant cover food sun four thought let keep eye never last door between city"
    " tree cross since hard start might story saw far sea draw left late run while press close night real life few stop"
    " open seem together next white children begin got walk example ease paper often always music those both mark book"
    " letter until mile river car feet care second group carry took rain eat room friend began idea fish mountain north"
    " once base hear horse cut sure watch color face wood main enough plain girl usual young ready above ever red list"
    " though feel talk bird soon body dog family direct pose leave song measure state product black short class wind"
    " question happen complete ship area half rock order fire south problem piece told knew pass farm top whole king"
    " size heard best hour better true during hundred am remember step early hold west ground interest reach fast five"
    " sing listen six table travel less morning ten simple several toward war lay against pattern slow center love"
    " person money serve appear road map science rule govern pull cold notice voice fall power town fine certain fly"
    " unit lead cry dark machine note wait plan figure star box noun field rest correct able pound done beauty drive"
    " stood contain front teach week final gave green oh quick develop sleep warm free minute strong special mind behind"
    " clear tail produce fact street inch lot nothing course stay wheel full force blue object decide surface deep moon"
    " island foot yet busy test record boat common gold possible plane age dry wonder laugh thousand ago ran check game"
    " shape yes hot miss brought heat snow bed bring sit perhaps fill east weight language among not into its because"
).split()  # fmt: skip

CUES: dict[str, str] = {
    "yes_no": r"\b(?:true or false|yes or no|is this true|is it true)\b|对错|是真的吗|是否",
    "calculate": r"\b(?:calculate|compute|sum of|add|subtract|multipl\w+|divide\w*|times|product of|solve|evaluate|how much)\b"
    r"|[0-9]\s*[-+*/×÷x^]\s*[0-9]|等于|计算|求",
    "sort": r"\b(?:sort|order|rank|ascending|descending|arrange)\b|排列|排序|升序|降序",
    "reverse": r"\b(?:reverse|backwards?|turn around)\b|倒过来|反转|倒序",
    "count": r"\b(?:how many|how often|count|number of)\b|几个|多少|几次|数一数",
    "compare": r"\b(?:largest|smallest|biggest|greatest|lowest|highest|maximum|minimum|least|compare|larger|smaller)\b|最大|最小|比较",
    "classify": r"\b(?:label|classif\w+|categor\w+|sentiment|positive or negative)\b|判断|分类|正面|负面",
    "convert": r"\b(?:convert|roman|in words|in digits|digits|spell out|express)\b|换算|罗马|汉字|数字",
    "extract": r"\b(?:extract|give the value|in this json|where does|how old|what is the job|find the name)\b|从.{0,12}取出|的值|住在哪里|几岁|职业",
    "translate": r"\b(?:translate|translation)\b|翻译",
    "summarise": r"\b(?:summari[sz]e|summary|tl;?dr|in short)\b|总结|概括|摘要",
    "complete": r"\b(?:continue|complete|fill in|comes next|next number)\b|下一个|填数|补全",
    "write": r"\b(?:write|compose|draft|essay|poem|story|email|generate|create)\b|写一|作文|撰写",
    "explain": r"\b(?:why|explain|describe|discuss|prove|derive|justify)\b|为什么|解释|说明|证明",
    "question": r"\?|？|\b(?:what|which|who|whom|when|where|how)\b|什么|哪|谁|怎",
}
CODE: dict[str, str] = {
    "sql": r"(?i)\bselect\b.{0,200}\bfrom\b|\binsert\s+into\b|\bcreate\s+table\b|\bupdate\s+\w+\s+set\b",
    "python": r"\bdef\s+\w+\s*\(|\bimport\s+\w+|\blambda\s+\w+\s*:|\bprint\(|\bself\.|\belif\b|assert\s+\w+\(",
    "javascript": r"\bfunction\s*\w*\s*\(|\bconst\s+\w+\s*=|\blet\s+\w+\s*=|=>|console\.log|\bvar\s+\w+\s*=",
    "c_java": r"#include\s*<|\bpublic\s+(?:static|class|void)\b|\bint\s+main\s*\(|\bstd::|System\.out|;\s*\n\s*\}",
    "html": r"(?i)</?(?:div|span|html|body|p|a|table|td|script|head)\b[^>]{0,200}>",
    "shell": r"(?m)^\s*(?:\$\s|sudo\s|#!/bin|apt-get\s|pip install|cd\s+[/~.])",
    "json": r"\{\s*\"[^\"]{1,80}\"\s*:",
}
DOMAINS: dict[str, str] = {
    "maths": r"[0-9]\s*[-+*/×÷=<>^%]\s*[0-9(]|\\frac|\\sqrt|\$[^$\n]{1,200}\$|(?i)\b(?:equation|integral|theorem|probability|triangle|"
    r"polynomial|matrix|derivative|sum|product|percent|prime|integer|fraction)\b|方程|概率|三角形|计算|求",
    "science": r"(?i)\b(?:atom|molecul\w+|energy|velocity|cell|protein|acid|electron|voltage|species|quantum|chemical|enzyme|mass)\b",
    "law": r"(?i)\b(?:court|plaintiff|defendant|statute|contract|jury|liable|constitution\w*|attorney|law)\b",
    "medicine": r"(?i)\b(?:patient|disease|symptom\w*|diagnos\w+|clinical|therapy|blood|infection|surgery)\b",
    "business": r"(?i)\b(?:market|price|cost|revenue|profit|tax|interest rate|investment|company|accounting)\b",
    "humanities": r"(?i)\b(?:philosoph\w+|history|moral\w*|ethic\w*|century|religion|war|empire|theory of)\b",
}

_COUNTS: dict[str, str] = {
    "digits": r"[0-9]",
    "numbers": r"[0-9]+(?:\.[0-9]+)?",
    "long_numbers": r"[0-9]{3,}",
    "commas": r"[,，、]",
    "quotes": r"[\"“”「」]",
    "brackets": r"[(\[{（【]",
    "operators": r"[-+*/×÷=<>^%]",
    "punctuation": r"[.,;:!?。，；：！？、]",
    "symbols": r"[^\p{L}\p{N}\s.,;:!?。，；：！？、]",
    "code_signs": r"[{};_\\`|&]|==|!=|->|::",
    "uppercase": r"\p{Lu}",
    "newlines": r"\n",
    "questions": r"[?？]",
    "negations": r"(?i)\b(?:not|no|never|none|nor|without|except)\b|n't\b|不|没|并非|非",
    "comparatives": r"(?i)\b(?:more|less|than|larger|smaller|greater|before|after|most|least)\b|比|更|最|之后|之前",
    "conjunctions": r"(?i)\b(?:and|or|but|if|while|because|then|although|who|which|that)\b|且|或|但|如果|虽然|因为|那么",
    "units": r"\b(?:km|cm|mm|kg|mg|ml|min|days?|hours?|weeks?|[ghlmst])\b|天|岁|个|倍",
    "dates": r"[0-9]{4}-[0-9]{2}-[0-9]{2}|(?i)\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|星期",
    "roman": r"\b[IVXLCDM]{2,}\b",
    "single_letters": r"\b[a-z]\b",
    "options": r"(?m)^\s*\(?[A-J][).:]\s",
    "latin": r"\p{Latin}",
    "han": r"\p{Han}",
    "kana": r"[\p{Hiragana}\p{Katakana}]",
    "hangul": r"\p{Hangul}",
    "cyrillic": r"\p{Cyrillic}",
    "arabic": r"\p{Arabic}",
}

_NUMBERS = (
    "characters_log", "tokens_log", "words", "sentences", "sentence_length", "word_length", "rare_share", "diversity",
    "digit_share", "longest_number", "largest_number_log", "second_number_log", "nesting", "answer_length", "turns", "list_items",
)  # fmt: skip
FEATURE_NAMES: tuple[str, ...] = (
    *_NUMBERS, *_COUNTS, *(f"asks_{c}" for c in CUES), *(f"code_{c}" for c in CODE), *(f"domain_{d}" for d in DOMAINS),
)  # fmt: skip
LABEL_NAMES: tuple[str, ...] = (
    "characters", "tokens_estimated", "words", "sentences", "numbers", "language", "code_language", "domain",
    "instruction_type", "nesting", "answer_length", "turns",
)  # fmt: skip
_COMMON = r"(?i)\b(?:" + "|".join(sorted(set(COMMON_WORDS))) + r")\b"


def extract(requests: pl.DataFrame) -> pl.DataFrame:
    """The features of requests: `row` and one finite float32 column for each of FEATURE_NAMES, in the same order.

    Identical prompts are computed once.
    """
    return _computed(requests, FEATURE_NAMES)


def labels(requests: pl.DataFrame) -> pl.DataFrame:
    """What rules may ask about a row: `row` and LABEL_NAMES, words and plain numbers."""
    return _computed(requests, LABEL_NAMES)


def groups(requests: pl.DataFrame) -> pl.Series:
    """A coarse kind for each row, such as `zh/maths/calculate`: where forecasts borrow strength from."""
    return group_of(labels(requests))


def group_of(labelled: pl.DataFrame) -> pl.Series:
    """The coarse kind of rows whose labels are known."""
    return labelled.select(
        pl.concat_str("language", "domain", "code_language", "instruction_type", separator="/").alias("group")
    ).to_series()


def _computed(requests: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
    texts = requests.select(
        "row", pl.col("prompt").fill_null("").alias("text"),
        (pl.col("messages").list.len() if requests.schema.get("messages", pl.Null) != pl.Null else pl.lit(1)).fill_null(1).alias("turns"),
    ).with_columns(pl.struct("text", "turns").hash().alias("key"))  # fmt: skip
    unique = texts.unique("key", keep="first", maintain_order=True)
    parts = [_of_chunk(unique.slice(start, CHUNK), names) for start in range(0, max(unique.height, 1), CHUNK)]
    if unique.height == texts.height:
        return pl.concat(parts).drop("key").with_columns(texts["row"]).select("row", *names)
    return (
        texts.select("row", "key")
        .join(pl.concat(parts), on="key", how="left", maintain_order="left")
        .select("row", *names)
    )


def _of_chunk(texts: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
    """`key` and the named columns for unique texts."""
    full = pl.col("text").str.len_chars()
    base = texts.lazy().select(
        "key", "turns", full.alias("characters"), pl.col("text").str.slice(0, LONGEST).alias("text")
    )
    text = pl.col("text")
    base = base.with_columns(
        **{name: text.str.count_matches(pattern) for name, pattern in _COUNTS.items()},
        words=text.str.count_matches(r"[\p{Latin}\p{Cyrillic}\p{Arabic}\p{Hangul}]+"),
        sentences=text.str.count_matches(r"[.!?。！？]+(?:\s|$)|[。！？]|\n+").clip(1),
        common=text.str.count_matches(_COMMON),
        letters=text.str.count_matches(r"\p{L}"),
        distinct=text.str.to_lowercase().str.extract_all(r"\p{Han}|[\p{L}\p{N}]+").list.n_unique(),
        pieces=text.str.count_matches(r"\p{Han}|[\p{L}\p{N}]+"),
        found=text.str.extract_all(r"[0-9]+"),
        nesting=_nesting(text),
        asked=text.str.extract(r"(?i)\b(?:in|within|exactly|at most|about|under)?\s*([0-9]{1,4}|one|two|three|a few|a single)\s+(?:words?|sentences?|paragraphs?|lines?)\b"),
        asked_unit=text.str.extract(r"(?i)\b(?:[0-9]{1,4}|one|two|three|a few|a single)\s+(word|sentence|paragraph|line)"),
    )  # fmt: skip
    lower = text.str.to_lowercase()
    base = base.with_columns(
        **{f"asks_{name}": lower.str.contains(pattern) for name, pattern in CUES.items()},
        **{f"code_{name}": text.str.contains(pattern) for name, pattern in CODE.items()},
        **{f"domain_{name}": text.str.contains(pattern) for name, pattern in DOMAINS.items()},
    )
    count = pl.col("asked").str.to_lowercase().replace_strict(
        {"one": 1, "two": 2, "three": 3, "a few": 3, "a single": 1}, default=pl.col("asked").cast(pl.Int64, strict=False), return_dtype=pl.Int64
    )  # fmt: skip
    per = pl.col("asked_unit").str.to_lowercase().replace_strict(
        {"word": 1.3, "sentence": 25.0, "paragraph": 100.0, "line": 15.0}, default=None, return_dtype=pl.Float64
    )  # fmt: skip
    largest = pl.col("found").list.eval(pl.element().str.slice(0, 18).cast(pl.Float64)).list.sort(descending=True)
    cjk = pl.col("han") + pl.col("kana") + pl.col("hangul")
    derived = base.with_columns(
        # Latin text has about four characters a token, Chinese somewhat over one, digits and signs one each
        tokens_estimated=(
            cjk * 0.8 + pl.col("digits") + pl.col("symbols") * 0.8
            + (pl.col("characters") - cjk - pl.col("digits") - pl.col("symbols")).clip(0) / 4.2
        ).ceil(),
        answer_length=(count * per).fill_null(0.0),
        largest=largest.list.get(0, null_on_oob=True).fill_null(0.0),
        second=largest.list.get(1, null_on_oob=True).fill_null(0.0),
        longest_number=pl.col("found").list.eval(pl.element().str.len_chars()).list.max().fill_null(0),
        language=pl.when(pl.col("kana") > 0).then(pl.lit("ja")).when(pl.col("hangul") > pl.col("latin")).then(pl.lit("ko"))
        .when(pl.col("han") * 3 > pl.col("latin")).then(pl.when(pl.col("han") > 0).then(pl.lit("zh")).otherwise(pl.lit("none")))
        .when(pl.col("cyrillic") > pl.col("latin")).then(pl.lit("ru")).when(pl.col("arabic") > pl.col("latin")).then(pl.lit("ar"))
        .when(pl.col("common") * 5 >= pl.col("words")).then(pl.lit("en")).otherwise(pl.lit("latin")),
        code_language=_first_of("code", tuple(CODE), "none"),
        domain=pl.when(pl.any_horizontal(*(f"code_{c}" for c in CODE))).then(pl.lit("code")).otherwise(_first_of("domain", tuple(DOMAINS), "general")),
        instruction_type=_first_of("asks", tuple(CUES), "other"),
    )  # fmt: skip
    if names is LABEL_NAMES:
        return derived.select("key", *names).collect()
    words = pl.col("words").clip(1)
    features = derived.with_columns(
        characters_log=pl.col("characters").log1p(),
        tokens_log=pl.col("tokens_estimated").log1p(),
        sentence_length=pl.col("pieces") / pl.col("sentences"),
        word_length=(pl.col("letters") - cjk) / words,
        rare_share=1 - (pl.col("common") / words).clip(0, 1),
        diversity=pl.col("distinct") / pl.col("pieces").clip(1),
        digit_share=pl.col("digits") / pl.col("characters").clip(1),
        largest_number_log=pl.col("largest").log1p(),
        second_number_log=pl.col("second").log1p(),
        list_items=pl.max_horizontal("commas", "single_letters", "numbers"),
    )
    return features.select("key", *(pl.col(name).cast(pl.Float32) for name in names)).collect()


def _first_of(prefix: str, choices: tuple[str, ...], otherwise: str) -> pl.Expr:
    """The first choice whose sign is in the text, in the order of the choices."""
    found = pl.lit(otherwise)
    for choice in reversed(choices):
        found = pl.when(pl.col(f"{prefix}_{choice}")).then(pl.lit(choice)).otherwise(found)
    return found


def _nesting(text: pl.Expr) -> pl.Expr:
    """Depth of brackets, counted by taking the innermost pairs away up to five times; deeper counts as six."""
    shown = text.str.replace_all(r"[^()\[\]{}（）]", "").str.slice(0, 400)
    depth = (shown.str.len_chars() > 0).cast(pl.Int32)
    for _ in range(5):
        shown = shown.str.replace_all(r"\(\)|\[\]|\{\}|（）", "")
        # siblings such as ()() go in one pass, so what is left encloses at least one pair more
        depth = depth + (shown.str.len_chars() > 0).cast(pl.Int32)
    return depth
