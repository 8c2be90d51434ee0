"""Train the default tokenizer: byte-level BPE of 4,096 entries, the same file on every run.

In:  text that is always at hand: `pydoc_data.topics` of the running Python (PSF licence; the
     committed file was trained with 3.11), and text that this script writes itself: chats, tool
     calls in both families' formats, arithmetic, key-value lists, common words of other scripts.
Out: src/gnomon/assets/tokenizer/tokenizer.json, and a line of figures.
Why so: digits stand alone, so that arithmetic has one symbol a digit. The control tokens carry
     the real spellings and flags of DeepSeek-V3.2 and GLM-5, with DeepSeek's first three ids where
     that family has them, so that encodings, parsers and injection tests meet the real thing.
Run: .venv/bin/python tools/train_tokenizer.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
TARGET = Path(__file__).parents[1] / "src/gnomon/assets/tokenizer/tokenizer.json"

FIRST_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
FLAGGED_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
OTHER_TOKENS = (
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "｜DSML｜",
    "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip

# A digit; Han and kana; a mark with letters, letters, other marks, line ends, white space.
SPLITS = (
    r"\p{N}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def words(text: str) -> list[str]:
    """The words of a line."""
    return text.split()


NAMES = words(
    "Ada Bo Carla Dmitri Elena Farid Grace Hiro Ines Jonas Kofi Lena Mei Noor Oskar Priya Quinn "
    "Rosa Samir Tara Uma Victor Wanda Xin Yusuf Zoe"
)
THINGS = words(
    "apples pears books pens coins stamps shells marbles cards bottles keys lamps tickets boxes "
    "chairs letters maps stones plates flowers"
)
CITIES = words(
    "Berlin Paris Oslo Lisbon Rome Vienna Prague Dublin Athens Cairo Lagos Nairobi Delhi Tokyo "
    "Kyoto Beijing Hangzhou Seoul Lima Quito Boston Denver"
)
COLOURS = words("red green blue amber violet silver golden white black copper")
QUESTIONS = (
    "What is the answer?", "How many are there in all?", "Which number belongs to the key?",
    "Can you explain this step by step?", "Please answer in one sentence.",
    "What is the weather like today?", "Write a short story about the sea.",
    "Summarise the text above.", "Is that correct?", "Translate this sentence into English.",
)  # fmt: skip
ANSWERS = (
    "Let me think about this step by step.", "The answer is", "First, add the numbers.",
    "I would be happy to help with that.", "Here is what I found:", "So the result is",
    "I need to look at the list again.", "That is all the information I have.",
    "The value that belongs to the key is", "We know that", "Therefore", "However, it is not so.",
)  # fmt: skip
OTHER_SCRIPTS = (
    "你好，请问今天的天气怎么样？ 谢谢，我知道了。 这是一个问题，答案是什么？ 北京 上海 杭州 中国",
    "こんにちは、元気ですか。 ありがとうございます。 これは何ですか。 今日はいい天気です。",
    "안녕하세요. 감사합니다. 오늘 날씨가 어때요? 이것은 무엇입니까?",
    "Привет, как дела? Спасибо, всё хорошо. Это вопрос, а какой ответ?",
    "Grüße aus München: schön, daß Sie hören. Où êtes-vous? Ça va très bien. ¿Qué tal, señor?",
    "Γεια σας, τι κάνετε; Ευχαριστώ πολύ. שלום, מה שלומך? مرحبا، كيف حالك؟ नमस्ते, आप कैसे हैं?",
)


def topics() -> Iterator[str]:
    """Python's own help texts."""
    table: dict[str, str] = import_module("pydoc_data.topics").topics
    yield from (table[name] for name in sorted(table))


def written(dice: random.Random, count: int = 2500) -> Iterator[str]:
    """Our own text, in the shapes that the models of this house meet."""
    for _ in range(count):
        name, other = dice.sample(NAMES, 2)
        thing, city, colour = dice.choice(THINGS), dice.choice(CITIES), dice.choice(COLOURS)
        a, b = dice.randrange(1000), dice.randrange(1000)
        yield f"{a} + {b} = {a + b}\n{max(a, b)} - {min(a, b)} = {abs(a - b)}\n"
        yield (
            f"{name} has {a} {thing} and gives {b} of them to {other}, who lives in {city}. "
            f"How many {thing} are left? {dice.choice(QUESTIONS)}\n{dice.choice(ANSWERS)} {a}.\n"
        )
        yield f"The secret number for {city} is {a}{b}. The {colour} key of {name} opens {b}.\n"
        yield f"key-{a}: {b}\n{colour}-{thing}: {a}{b}\n{name.lower()}@{city.lower()} = {b}\n"
        yield f"User: {dice.choice(QUESTIONS)}\nAssistant: {dice.choice(ANSWERS)} {other}.\n"
        call = {"city": city, "days": a % 10, "units": "celsius"}
        schema = {
            "type": "function",
            "function": {
                "name": f"get_{thing}",
                "description": f"Get the {thing} of a person in a city",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
        yield json.dumps(schema) + "\n" + json.dumps({"name": "get_weather", "arguments": call})
        yield (
            f'function_calls>\n<invoke name="get_weather">\n<parameter name="city" string="true">'
            f"{city}</parameter>\n</invoke>\n</function_calls>\n\n<function_results>\n<result>{b}"
            "</result>\n</function_results>\n"
        )
    yield from OTHER_SCRIPTS


def train() -> Tokenizer:
    """The tokenizer, control tokens and all."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(FLAGGED_TOKENS) - len(OTHER_TOKENS),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in FIRST_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*topics(), *written(random.Random(0))], trainer)
    tokenizer.add_tokens(
        [AddedToken(name, special=True, normalized=False) for name in FLAGGED_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(name, special=False, normalized=False) for name in OTHER_TOKENS]
    )
    return tokenizer


def main() -> None:
    """Train, check, write."""
    tokenizer = train()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != VOCAB_SIZE:
        raise SystemExit(f"the vocabulary has {size} entries, not {VOCAB_SIZE}: too little text")
    sample = "".join(topics())[:200_000]
    ratio = len(sample) / len(tokenizer.encode(sample).ids)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    kib = TARGET.stat().st_size // 1024
    print(f"{TARGET}: {size} entries, {kib} KiB, {ratio:.2f} characters a token of English")


if __name__ == "__main__":
    main()
