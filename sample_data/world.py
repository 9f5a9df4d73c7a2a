"""A small world of instructions whose answers a program can check: 18 kinds, 5 levels, English and Chinese.

Every instruction is drawn by seed. An instruction is held out, never trained on, when the hash of its text says so.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta

HELD_OUT_ONE_IN = 16

Draw = random.Random
Maker = Callable[[Draw, int, bool], tuple[str, str]]  # (draw, level 1..5, Chinese?) -> prompt, answer


@dataclass(frozen=True)
class Instruction:
    """A prompt with its one right answer."""

    prompt: str
    reference: str
    kind: str
    difficulty: int
    language: str


def held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out pool: a fixed one in HELD_OUT_ONE_IN of all texts."""
    return hashlib.blake2b(prompt.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


def draw_instructions(seed: int, *, held: bool, kinds: tuple[str, ...] | None = None) -> Iterator[Instruction]:
    """An endless stream of instructions, all from the held-out pool or none of them."""
    draw = random.Random(seed)
    names = kinds or tuple(KINDS)
    while True:
        kind = draw.choice(names)
        level = draw.choices((1, 2, 3, 4, 5), LEVEL_WEIGHTS)[0]
        chinese = draw.random() < 0.4
        prompt, reference = KINDS[kind](draw, level, chinese)
        if held_out(prompt) == held:
            yield Instruction(prompt, reference, kind, level, "zh" if chinese else "en")


LEVEL_WEIGHTS = (24, 24, 20, 17, 15)

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Finn", "Grace", "Hugo", "Ivy", "Jack", "Kate", "Leo", "Mia", "Noah",
         "Olga", "Paul")  # fmt: skip
NAMES_ZH = ("小明", "小红", "小华", "小丽", "小刚", "小芳", "小军", "小梅", "小龙", "小雪", "小强", "小云")
CITIES = ("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Cairo", "Tokyo", "Lima", "Dublin", "Athens")
CITIES_ZH = ("北京", "上海", "广州", "深圳", "成都", "杭州", "武汉", "西安", "南京", "天津")
JOBS = ("doctor", "teacher", "farmer", "pilot", "cook", "lawyer", "nurse", "painter", "driver", "baker")
JOBS_ZH = ("医生", "老师", "农民", "飞行员", "厨师", "律师", "护士", "画家", "司机", "工人")
THINGS = ("apples", "books", "coins", "pens", "stamps", "cards", "eggs", "shells", "stones", "cups")
THINGS_ZH = ("苹果", "铅笔", "硬币", "邮票", "卡片", "鸡蛋", "石头", "杯子", "橘子", "气球")
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "pink")
COLOURS_ZH = ("红色", "蓝色", "绿色", "黑色", "白色", "黄色", "灰色", "紫色")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DAYS_ZH = ("星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日")


def _say(
    draw: Draw, chinese: bool, english_forms: tuple[str, ...], chinese_forms: tuple[str, ...], **values: object
) -> str:
    return draw.choice(chinese_forms if chinese else english_forms).format(**values)


def _number(draw: Draw, digits: int) -> int:
    return draw.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _add(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    left, right = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3))[level - 1]
    a, b = _number(draw, left), _number(draw, right)
    if draw.random() < 0.5:
        a, b = b, a
    prompt = _say(
        draw,
        chinese,
        (
            "What is {a} + {b}?",
            "Calculate {a} + {b}.",
            "Add {a} and {b}.",
            "{a} + {b} = ?",
            "Find the sum of {a} and {b}.",
        ),
        ("{a} + {b} = ?", "计算 {a} + {b}。", "{a} 加 {b} 等于多少?", "求 {a} 与 {b} 的和。"),
        a=a,
        b=b,
    )
    return prompt, str(a + b)


def _subtract(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    left, right = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3))[level - 1]
    a, b = _number(draw, left), _number(draw, right)
    a, b = max(a, b), min(a, b)
    prompt = _say(
        draw,
        chinese,
        (
            "What is {a} - {b}?",
            "Calculate {a} - {b}.",
            "Subtract {b} from {a}.",
            "{a} - {b} = ?",
            "Take {b} away from {a}.",
        ),
        ("{a} - {b} = ?", "计算 {a} - {b}。", "{a} 减 {b} 等于多少?", "求 {a} 与 {b} 的差。"),
        a=a,
        b=b,
    )
    return prompt, str(a - b)


def _multiply(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    low, high, other = ((0, 5, 5), (2, 9, 9), (10, 20, 5), (10, 50, 9), (11, 99, 9))[level - 1]
    a, b = draw.randint(low, high), draw.randint(1, other)
    prompt = _say(
        draw,
        chinese,
        (
            "What is {a} * {b}?",
            "Calculate {a} x {b}.",
            "Multiply {a} by {b}.",
            "{a} times {b} = ?",
            "Find the product of {a} and {b}.",
        ),
        ("{a} × {b} = ?", "计算 {a} 乘以 {b}。", "{a} 乘 {b} 等于多少?", "求 {a} 与 {b} 的积。"),
        a=a,
        b=b,
    )
    return prompt, str(a * b)


def _compare(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    count, digits = ((2, 1), (2, 2), (3, 2), (4, 3), (6, 3))[level - 1]
    numbers = draw.sample(range(10 ** (digits - 1) if digits > 1 else 0, 10**digits), count)
    largest = draw.random() < 0.5
    listed = ", ".join(map(str, numbers))
    if largest:
        prompt = _say(
            draw,
            chinese,
            (
                "Which is the largest: {x}?",
                "Find the biggest number: {x}.",
                "Give the maximum of {x}.",
                "Of {x}, which number is greatest?",
            ),
            ("{x} 中哪个最大?", "找出最大的数: {x}。", "求最大值: {x}。"),
            x=listed,
        )
    else:
        prompt = _say(
            draw,
            chinese,
            (
                "Which is the smallest: {x}?",
                "Find the lowest number: {x}.",
                "Give the minimum of {x}.",
                "Of {x}, which number is least?",
            ),
            ("{x} 中哪个最小?", "找出最小的数: {x}。", "求最小值: {x}。"),
            x=listed,
        )
    return prompt, str((max if largest else min)(numbers))


def _sort(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    count, top = ((2, 9), (3, 9), (4, 20), (5, 99), (7, 99))[level - 1]
    numbers = draw.sample(range(top + 1), count)
    down = draw.random() < 0.35
    listed = " ".join(map(str, numbers))
    if down:
        prompt = _say(
            draw,
            chinese,
            ("Sort from large to small: {x}", "Order these numbers descending: {x}", "Put {x} in descending order."),
            ("从大到小排列: {x}", "把 {x} 按降序排列。"),
            x=listed,
        )
    else:
        prompt = _say(
            draw,
            chinese,
            (
                "Sort from small to large: {x}",
                "Order these numbers ascending: {x}",
                "Put {x} in ascending order.",
                "Sort: {x}",
            ),
            ("从小到大排列: {x}", "把 {x} 按升序排列。"),
            x=listed,
        )
    return prompt, " ".join(map(str, sorted(numbers, reverse=down)))


def _reverse(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    count = (2, 3, 5, 7, 10)[level - 1]
    items = [draw.choice(LETTERS) for _ in range(count)]
    prompt = _say(
        draw,
        chinese,
        (
            "Reverse this list: {x}",
            "Write {x} backwards.",
            "Give these letters in reverse order: {x}",
            "Turn around: {x}",
        ),
        ("把 {x} 倒过来写。", "反转列表: {x}", "倒序输出: {x}"),
        x=" ".join(items),
    )
    return prompt, " ".join(reversed(items))


def _count(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    length = (3, 5, 7, 10, 14)[level - 1]
    wanted, other, third = draw.sample(LETTERS, 3)
    items = [draw.choice((wanted, other, third)) for _ in range(length)]
    prompt = _say(
        draw,
        chinese,
        (
            "How many times does {w} appear in: {x}",
            "Count the letter {w} in {x}.",
            "How often is {w} in this list? {x}",
        ),
        ("{x} 中有几个 {w}?", "数一数字母 {w} 出现几次: {x}"),
        w=wanted,
        x=" ".join(items),
    )
    return prompt, str(items.count(wanted))


def _extract(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    people = draw.sample(NAMES_ZH if chinese else NAMES, (1, 1, 2, 3, 4)[level - 1])
    facts = [
        (
            p,
            draw.randint(18, 79),
            draw.choice(CITIES_ZH if chinese else CITIES),
            draw.choice(JOBS_ZH if chinese else JOBS),
        )
        for p in people
    ]
    form = draw.randrange(3)
    sentences = []
    for name, age, city, job in facts:
        if chinese:
            sentences.append(
                (
                    f"{name}今年{age}岁,住在{city},是一名{job}。",
                    f"{name}是{job},{age}岁,家在{city}。",
                    f"住在{city}的{name}是{job},今年{age}岁。",
                )[form]
            )
        else:
            sentences.append(
                (
                    f"{name} is {age} years old, lives in {city} and works as a {job}.",
                    f"{name}, a {job} from {city}, is {age}.",
                    f"The {job} {name} lives in {city} and is {age} years old.",
                )[form]
            )
    name, age, city, job = draw.choice(facts)
    field = draw.randrange(3)
    if chinese:
        question = (f"{name}几岁?", f"{name}住在哪里?", f"{name}的职业是什么?")[field]
        lead = "".join(sentences)
    else:
        question = (f"How old is {name}?", f"Where does {name} live?", f"What is the job of {name}?")[field]
        lead = " ".join(sentences) + " "
    return lead + question, str((age, city, job)[field])


def _json(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    def record() -> dict[str, object]:
        values: dict[str, object] = {
            "name": draw.choice(NAMES), "age": draw.randint(18, 79), "city": draw.choice(CITIES),
            "colour": draw.choice(COLOURS), "size": draw.randint(1, 99), "job": draw.choice(JOBS),
        }  # fmt: skip
        keys = draw.sample(list(values), (2, 3, 4, 3, 3)[level - 1])
        return {k: values[k] for k in keys}

    if level <= 3:
        data: dict[str, object] = record()
        key = draw.choice(list(data))
        path, answer = f'"{key}"', data[key]
    else:
        outer = draw.sample(("first", "second", "third"), level - 2)
        data = {o: record() for o in outer}
        top = draw.choice(outer)
        inner = data[top]
        assert isinstance(inner, dict)
        key = draw.choice(list(inner))
        path, answer = f'"{key}" in "{top}"' if not chinese else f'"{top}" 里的 "{key}"', inner[key]
    prompt = _say(
        draw,
        chinese,
        ("What is {p} in this JSON? {x}", "{x}\nGive the value of {p}.", "Read {p} from {x}"),
        ("{x} 中 {p} 的值是什么?", "从 JSON 中取出 {p}: {x}"),
        p=path,
        x=json.dumps(data),
    )
    return prompt, str(answer)


def _date(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    if level <= 2:
        step = 1 if level == 1 else draw.randint(2, 6)
        back = draw.random() < 0.4
        day = draw.randrange(7)
        answer = (day - step if back else day + step) % 7
        if chinese:
            word = "前" if back else "后"
            return _say(
                draw,
                True,
                (),
                ("{d}的{n}天{w}是星期几?", "今天是{d},{n}天{w}是星期几?"),
                d=DAYS_ZH[day],
                n=step,
                w=word,
            ), DAYS_ZH[answer]
        word = "before" if back else "after"
        days = "day" if step == 1 else "days"
        return _say(
            draw,
            False,
            ("Which weekday is {n} {s} {w} {d}?", "What day is {n} {s} {w} {d}?", "Name the day {n} {s} {w} {d}."),
            (),
            d=DAYS[day],
            n=step,
            w=word,
            s=days,
        ), DAYS[answer]
    start = date(draw.randint(2020, 2029), draw.randint(1, 12), draw.randint(1, 28))
    if level == 3:
        step = draw.randint(1, 9)
        start = start.replace(day=draw.randint(1, 18))
    else:
        step = draw.randint(1, 9) if level == 4 else draw.randint(10, 40)
    prompt = _say(
        draw,
        chinese,
        ("What date is {n} days after {d}?", "Add {n} days to {d}.", "Which date comes {n} days after {d}?"),
        ("{d} 之后 {n} 天是哪天?", "{d} 加 {n} 天是几号?"),
        n=step,
        d=start.isoformat(),
    )
    return prompt, (start + timedelta(days=step)).isoformat()


UNITS = (("km", "m", 1000), ("m", "cm", 100), ("kg", "g", 1000), ("h", "min", 60), ("min", "s", 60), ("cm", "mm", 10),
         ("t", "kg", 1000), ("l", "ml", 1000), ("week", "days", 7), ("day", "h", 24))  # fmt: skip


def _units(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    easy = [u for u in UNITS if u[2] in (10, 100, 1000)]
    hard = [u for u in UNITS if u[2] not in (10, 100, 1000)]
    large, small, factor = draw.choice(easy if level in (1, 2, 4) else hard)
    n = draw.randint(1, (9, 99, 9, 999, 30)[level - 1])
    down = level in (1, 3) or draw.random() < 0.6
    value, source, target, answer = (n, large, small, n * factor) if down else (n * factor, small, large, n)
    prompt = _say(
        draw,
        chinese,
        ("Convert {v} {a} to {b}.", "How many {b} are {v} {a}?", "{v} {a} = ? {b}", "Express {v} {a} in {b}."),
        ("把 {v} {a} 换算成 {b}。", "{v} {a} 等于多少 {b}?", "{v} {a} = ? {b}"),
        v=value,
        a=source,
        b=target,
    )
    return prompt, f"{answer} {target}"


ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]  # fmt: skip
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
DIGITS_ZH = "零一二三四五六七八九"


def number_words(n: int) -> str:
    """An English numeral, 0..9999."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    unit, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    rest = n % unit
    return f"{number_words(n // unit)} {name}" + (f" {number_words(rest)}" if rest else "")


def number_words_zh(n: int) -> str:
    """A Chinese numeral, 0..9999."""
    if n < 10:
        return DIGITS_ZH[n]
    text, rest, gap = "", n, False
    for unit, sign in ((1000, "千"), (100, "百"), (10, "十")):
        digit, rest = divmod(rest, unit)
        if digit:
            text += ("零" if gap else "") + ("" if unit == 10 and digit == 1 and not text else DIGITS_ZH[digit]) + sign
            gap = False
        elif text and rest:
            gap = True
    return text + (("零" if gap else "") + DIGITS_ZH[rest] if rest else "")


def _words(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    n = draw.randint(*((0, 20), (20, 99), (100, 399), (100, 999), (1000, 9999))[level - 1])
    text = number_words_zh(n) if chinese else number_words(n)
    if draw.random() < 0.5:
        return _say(
            draw,
            chinese,
            ("Write {n} in words.", "Spell out the number {n}.", "{n} in words?"),
            ("用汉字写出 {n}。", "{n} 用中文数字怎么写?"),
            n=n,
        ), text
    return _say(
        draw,
        chinese,
        ("Write {t} in digits.", "Which number is {t}?", "{t} as digits?"),
        ("用阿拉伯数字写出{t}。", "{t}是哪个数?"),
        t=text,
    ), str(n)


def roman(n: int) -> str:
    """A Roman numeral, 1..3999."""
    text = ""
    for value, sign in ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
                        (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):  # fmt: skip
        while n >= value:
            text, n = text + sign, n - value
    return text


def _roman(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    n = draw.randint(*((1, 10), (11, 30), (31, 89), (90, 399), (400, 1999))[level - 1])
    if draw.random() < 0.5:
        return _say(
            draw,
            chinese,
            ("Write {n} as a Roman numeral.", "{n} in Roman numerals?", "Convert {n} to Roman."),
            ("用罗马数字写出 {n}。", "{n} 的罗马数字是什么?"),
            n=n,
        ), roman(n)
    return _say(
        draw,
        chinese,
        ("What number is the Roman numeral {r}?", "Convert {r} from Roman.", "{r} = ?"),
        ("罗马数字 {r} 是多少?", "把罗马数字 {r} 写成数字。"),
        r=roman(n),
    ), str(n)


def _sequence(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    step = draw.randint(*((1, 2), (2, 5), (3, 12), (11, 40), (2, 3))[level - 1])
    start = draw.randint(1, (10, 20, 50, 200, 9)[level - 1])
    if level == 5:
        terms = (
            [start * step**i for i in range(5)]
            if draw.random() < 0.5
            else [start + step * i * (i + 1) // 2 for i in range(6)]
        )
    else:
        terms = [start + step * i for i in range(5)]
        if level >= 2 and draw.random() < 0.4:
            terms.reverse()
    prompt = _say(
        draw,
        chinese,
        ("What comes next: {x}, ?", "Continue the sequence: {x}, ...", "Next number after {x}?"),
        ("下一个数是什么: {x}, ?", "找规律填数: {x}, ( )"),
        x=", ".join(map(str, terms[:-1])),
    )
    return prompt, str(terms[-1])


def _problem(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    size = (5, 20, 50, 20, 50)[level - 1]
    name, friend = draw.sample(NAMES_ZH if chinese else NAMES, 2)
    thing = draw.choice(THINGS_ZH if chinese else THINGS)
    total = draw.randint(2, size)
    text = f"{name}有{total}个{thing}," if chinese else f"{name} has {total} {thing}. "
    for _ in range(1 if level <= 3 else level - 2):
        n = draw.randint(1, size)
        action = draw.randrange(4)
        if action == 0 or (action == 3 and (total > 30 or level < 3)):
            total += n
            text += (
                draw.choice((f"又买了{n}个,", f"{friend}又给了{n}个,"))
                if chinese
                else draw.choice((f"{name} buys {n} more. ", f"{friend} gives {name} {n} more. "))
            )
        elif action == 3:
            times = draw.randint(2, 3)
            total *= times
            text += f"后来数量变成{times}倍," if chinese else f"Then the number grows {times} times. "
        else:
            n = draw.randint(1, max(total - 1, 1)) if total > 1 else 1
            total -= n
            text += (
                draw.choice((f"用掉了{n}个,", f"送给{friend}{n}个,"))
                if chinese
                else draw.choice((f"{name} loses {n}. ", f"{name} gives {n} to {friend}. "))
            )
    question = (
        draw.choice(("现在有几个?", f"{name}现在有多少{thing}?"))
        if chinese
        else draw.choice((f"How many {thing} does {name} have now?", f"How many {thing} are left with {name}?"))
    )
    return text + question, str(total)


GOOD = ("wonderful", "great", "lovely", "excellent", "amazing", "perfect", "delightful", "superb")
BAD = ("terrible", "awful", "boring", "horrible", "poor", "dull", "disappointing", "bad")
GOOD_ZH = ("精彩", "很好", "可爱", "优秀", "完美", "愉快", "出色", "美味")
BAD_ZH = ("糟糕", "很差", "无聊", "可怕", "失望", "难吃", "沉闷", "恶劣")
TOPICS = ("film", "book", "hotel", "meal", "concert", "phone", "trip", "service", "game", "show")
TOPICS_ZH = ("电影", "书", "酒店", "饭菜", "音乐会", "手机", "旅行", "服务", "游戏", "节目")


def _label(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    topic, other = draw.sample(TOPICS_ZH if chinese else TOPICS, 2)
    good = draw.random() < 0.5
    word = draw.choice((GOOD_ZH if good else BAD_ZH) if chinese else (GOOD if good else BAD))
    opposite = draw.choice((BAD_ZH if good else GOOD_ZH) if chinese else (BAD if good else GOOD))
    if level == 1:
        text = f"这{topic}{word}。" if chinese else f"The {topic} was {word}."
    elif level == 2:
        text = f"这{topic}不{opposite}。" if chinese else f"The {topic} was not {opposite}."
    elif level == 3:
        text = (
            f"大家说这{topic}{opposite},我觉得它{word}。"
            if chinese
            else f"People call the {topic} {opposite}, but I found it {word}."
        )
    elif level == 4:
        text = (
            f"虽然{other}{opposite},但是这{topic}并不{opposite}。"
            if chinese
            else f"While the {other} was {opposite}, the {topic} was not {opposite} at all."
        )
    else:
        text = (
            f"我不同意说这{topic}{opposite}的人,也不觉得{other}{word}。"
            if chinese
            else f"I disagree with those who say the {topic} was {opposite}, nor was the {other} {word}."
        )
    if chinese:
        return _say(
            draw, True, (), ("判断对{t}的评价是正面还是负面: {x}", "{x} 对{t}的态度: 正面或负面?"), t=topic, x=text
        ), ("正面" if good else "负面")
    return _say(
        draw,
        False,
        (
            "Label the opinion of the {t} as positive or negative: {x}",
            "{x} Is the view of the {t} positive or negative?",
            "Sentiment about the {t}, positive or negative? {x}",
        ),
        (),
        t=topic,
        x=text,
    ), ("positive" if good else "negative")


def _logic(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    def claim(digits: int) -> tuple[str, bool]:
        a, b = _number(draw, digits), _number(draw, digits)
        if draw.random() < 0.5:
            return f"{a} > {b}", a > b
        return f"{a} < {b}", a < b

    parts = [claim(1 if level <= 2 else 2) for _ in range((1, 2, 2, 3, 3)[level - 1])]
    text, truth = parts[0]
    if level == 5:
        text, truth = ("并非 " if chinese else "not ") + text, not truth
    # `and` binds before `or`: the truth is that of the written formula
    groups = [truth]
    for claimed, value in parts[1:]:
        both = draw.random() < 0.5
        text += ((" 且 " if chinese else " and ") if both else (" 或 " if chinese else " or ")) + claimed
        if both:
            groups[-1] = groups[-1] and value
        else:
            groups.append(value)
    prompt = _say(
        draw,
        chinese,
        ("True or false: {x}", "Is this true? {x}", "Yes or no: {x}"),
        ("判断对错: {x}", "这是真的吗? {x}"),
        x=text,
    )
    answer = any(groups)
    return prompt, ("是" if answer else "否") if chinese else ("yes" if answer else "no")


def _parity(draw: Draw, level: int, chinese: bool) -> tuple[str, str]:
    count, digits = ((3, 1), (4, 2), (5, 2), (7, 2), (9, 3))[level - 1]
    numbers = [_number(draw, digits) for _ in range(count)]
    even = draw.random() < 0.5
    kept = [n for n in numbers if (n % 2 == 0) == even]
    prompt = _say(
        draw,
        chinese,
        ("Keep only the {w} numbers: {x}", "List the {w} numbers in {x}.", "Which of {x} are {w}?"),
        ("只留下{w}: {x}", "{x} 中哪些是{w}?"),
        w=("偶数" if even else "奇数") if chinese else ("even" if even else "odd"),
        x=" ".join(map(str, numbers)),
    )
    return prompt, " ".join(map(str, kept)) or ("无" if chinese else "none")


KINDS: dict[str, Maker] = {
    "add": _add, "subtract": _subtract, "multiply": _multiply, "compare": _compare, "sort": _sort, "reverse": _reverse,
    "count": _count, "extract": _extract, "json": _json, "date": _date, "units": _units, "words": _words, "roman": _roman,
    "sequence": _sequence, "problem": _problem, "label": _label, "logic": _logic, "parity": _parity,
}  # fmt: skip
