# SPDX-License-Identifier: Apache-2.0
"""The generated conversations of tale-chat: sums, a handful of facts, and what was told before.

As with reference_language.py, everything the model ever reads comes from here. A conversation is turns of a user and
an assistant, in ChatML; a system message "Be brief." makes every answer its value alone.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from functools import lru_cache

from reference_language import ANIMALS, COLOURS, END, MEN, WOMEN
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUMBERS = range(101)
LARGEST = 10  # of the two numbers that are added, subtracted or multiplied
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Poland": "Warsaw", "Japan": "Tokyo",
    "China": "Beijing", "India": "Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo",
    "Greece": "Athens", "Austria": "Vienna", "Canada": "Ottawa", "England": "London",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "old": "young", "black": "white", "day": "night", "fast": "slow", "good": "bad",
    "high": "low", "long": "short", "open": "closed", "wet": "dry", "full": "empty",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SMALL_TALK = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning"], "Hello! How can I help you?"),
    (["How are you?", "How are you today?"], "I am well, thank you."),
    (["Who are you?", "What are you?", "What is your name?"], "I am tale-chat, a very small model of slimrt."),
    (
        ["What can you do?", "Help", "Help me", "What do you know?"],
        "I add, subtract and multiply small numbers, know a few facts and remember what you tell me.",
    ),
    (["Thank you", "Thank you!", "Thanks", "Thanks!"], "You are welcome."),
    (["Bye", "Bye!", "Goodbye", "Good night"], "Goodbye!"),
]
UNKNOWN = "I do not know that."
STRANGE = [
    "Tell me a story", "Tell me a joke", "Write a poem", "Sing a song", "What time is it?", "How is the weather?",
    "Why is the sky {w}?", "Where is {w}?", "Who was {w}?", "What is {w}?", "What is the capital of {w}?", "Why?",
    "What is the opposite of {w}?", "What comes after {w}?", "Do you like {w}?", "How do I make {w}?", "{w}", "{w} {w}",
    "{w} {w} {w}", "{w} {w} {w} {w}?", "How many {w} are there?", "Can you {w}?", "Explain {w}", "Is {w} {w}?",
]  # fmt: skip
SYSTEM, BRIEF = "You are a helpful assistant.", "Be brief."

Turn = tuple[str, str, str]  # what the user says, a full answer, a brief one


def sum_turn(rng: random.Random) -> Turn:
    """One sum of two small numbers, a difference that is not negative, or a product; of larger ones it knows none."""
    known = rng.random() < 0.85
    a, b = (rng.randint(0, LARGEST) if known else rng.choice(NUMBERS) for _ in range(2))
    sign, word, value = rng.choice([("+", "plus", a + b), ("-", "minus", a - b), ("*", "times", a * b)])
    if value < 0:
        a, b, value = b, a, -value
    between = rng.choice([f" {sign} ", sign, f" {word} "])
    asked = f"{a}{between}{b}"
    users = [f"What is {asked}?", f"How much is {asked}?", asked, f"{asked}?", f"{asked} = ?", f"And {asked}?"]
    user = rng.choice(users)
    if max(a, b) > LARGEST:
        return user, UNKNOWN, UNKNOWN
    return user, f"{a} {sign} {b} is {value}.", str(value)


def fact_turn(rng: random.Random) -> Turn:
    """One of the few things it knows."""
    kind = rng.randrange(3)
    if kind == 0:
        country, city = rng.choice(list(CAPITALS.items()))
        user = rng.choice(["What is the capital of {}?", "What's the capital of {}?", "Capital of {}?", "And of {}?"])
        return user.format(country), f"The capital of {country} is {city}.", city
    if kind == 1:
        pair = rng.choice(list(OPPOSITES.items()))
        word, other = pair if rng.random() < 0.5 else pair[::-1]
        user = rng.choice(["What is the opposite of {}?", "Opposite of {}?"])
        return user.format(word), f"The opposite of {word} is {other}.", other
    at = rng.randrange(7)
    if rng.random() < 0.5:
        user, answer = "What comes after {}?", f"{DAYS[(at + 1) % 7]} comes after {DAYS[at]}."
    else:
        user, answer = "What comes before {}?", f"{DAYS[at - 1]} comes before {DAYS[at]}."
    return user.format(DAYS[at]), answer, answer.split()[0]


def any_word(rng: random.Random) -> str:
    """A word that nobody knows."""
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 7)))


def any_name(rng: random.Random) -> str:
    """A name, known or not."""
    if rng.random() < 0.65:
        return rng.choice(WOMEN + MEN)
    name = any_word(rng)
    return name if rng.random() < 0.2 else name.title()


class Memory:
    """What the user has told so far: "name", "colour", "animal"."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.told: dict[str, str] = {}

    def telling(self) -> Turn:
        kind = self.rng.choice(["name", "name", "colour", "animal"])
        if kind == "name":
            value = self.told[kind] = any_name(self.rng)
            user = self.rng.choice(["My name is {}.", "My name is {}", "I am {}.", "Call me {}.", "Hello, I am {}."])
            return user.format(value), f"Nice to meet you, {value}.", f"Hello, {value}."
        choices = COLOURS if kind == "colour" else ANIMALS
        value = self.told[kind] = self.rng.choice(choices) if self.rng.random() < 0.7 else any_word(self.rng)
        user = self.rng.choice([f"My favourite {kind} is {value}.", f"I like the {kind} {value}."])
        return user, f"Your favourite {kind} is {value}. I will remember that.", value

    def asking(self) -> Turn:
        kind = self.rng.choice(list(self.told) * 3 + ["name", "colour", "animal"])
        what = kind if kind == "name" else f"favourite {kind}"
        users = [f"What is my {what}?", f"Do you know my {what}?", f"And my {what}?"]
        users += ["Who am I?", "What's my name?"] if kind == "name" else [f"Which {kind} do I like?"]
        value = self.told.get(kind)
        if value is None:
            return self.rng.choice(users), f"You have not told me your {what}.", UNKNOWN
        return self.rng.choice(users), f"Your {what} is {value}.", value


def small_turn(rng: random.Random) -> Turn:
    users, answer = rng.choice(SMALL_TALK)
    return rng.choice(users), answer, answer


def strange_turn(rng: random.Random) -> Turn:
    user = rng.choice(STRANGE)
    while "{w}" in user:
        user = user.replace("{w}", any_word(rng), 1)
    return user, UNKNOWN, UNKNOWN


def typed(rng: random.Random, text: str, keep: str) -> str:
    """As people type: sometimes without capitals or the mark at the end. keep: a value that stays as it is."""
    if rng.random() < 0.2:
        text = keep.join(part.lower() for part in text.split(keep)) if keep else text.lower()
    return text.rstrip(".?!") if rng.random() < 0.2 and len(text) > 1 else text


def turns(rng: random.Random, brief: bool) -> Iterator[tuple[str, str]]:
    """Endless turns of one conversation: what the user says, and the answer."""
    memory = Memory(rng)
    kinds: list[Callable[[], Turn]] = [
        lambda: sum_turn(rng), lambda: fact_turn(rng), memory.telling, memory.asking, lambda: small_turn(rng),
        lambda: strange_turn(rng),
    ]  # fmt: skip
    weights = (9, 4, 4, 6, 2, 2)
    while True:
        user, full, short = rng.choices(kinds, weights)[0]()
        keep = next((value for value in memory.told.values() if value in user), "")
        yield typed(rng, user, keep), short if brief else full


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE in which every word that the model knows is one token; others fall into pieces."""
    rng = random.Random(1)
    control = [AddedToken(text, special=True, normalized=False) for text in (END, OPEN, CLOSE)]
    corpus = ["system\n", "user\n", "assistant\n", SYSTEM, BRIEF] * 2000
    for _ in range(2000):
        talk = turns(rng, brief=False)
        corpus += [text for _ in range(6) for text in next(talk)]
    names = WOMEN + MEN
    lists = [" ".join(map(str, NUMBERS)), " ".join(names + COLOURS + ANIMALS)] * 50
    corpus += lists + [str(n) for n in NUMBERS] * 50
    # Words made up at random must not become tokens: they are rarer than any that is meant.
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, min_frequency=40, special_tokens=control, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


class Rows:
    """Rows of tokens, each a conversation, with the weight of each token's loss: what the user says hardly counts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encode = lru_cache(1 << 16)(lambda text: tokenizer.encode(text).ids)

    def row(self, rng: random.Random, length: int, answer_weight: float) -> tuple[list[int], list[float]]:
        ids, weights = [], []

        def add(text: str, weight: float) -> None:
            piece = self.encode(text)
            ids.extend(piece)
            weights.extend([weight] * len(piece))

        other = f"You are {any_word(rng)} {any_word(rng)}."  # whatever it is told to be, it stays what it is
        system = rng.choices(["", SYSTEM, BRIEF, other], weights=(5, 1, 3, 1))[0]
        if system:
            add(f"{OPEN}system\n{system}{CLOSE}\n", 0.02)
        talk = turns(rng, brief=system == BRIEF)
        while len(ids) < length:
            user, answer = next(talk)
            add(f"{OPEN}user\n", 0.02)
            add(f"{user}{CLOSE}", 0.02)
            add(f"\n{OPEN}assistant\n", 0.02)
            add(f"{answer}{CLOSE}", answer_weight)
            add("\n", 0.02)
        return ids[:length], weights[:length]
