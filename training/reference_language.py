# SPDX-License-Identifier: Apache-2.0
"""The generated language of the reference models: small tales, facts to remember, and questions about them.

Everything the reference models ever read comes from this file, so their weights carry nobody else's text. A tale
is a short story whose parts agree with each other (who, where, what was lost, who helped). A fact gives one person
one value ("The password of Anna is lantern."); the value is drawn afresh for every document, so it can only be
answered by looking it up in the context.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # both BOS and EOS, as in GPT-2

WOMEN = (
    "Anna Clara Emma Julia Laura Maria Nora Olga Paula Rosa Sara Tina Vera Wanda Alice Berta Carla Daisy Edith Flora "
    "Greta Helen Irene Jenny Karin Lydia Mabel Nancy Petra Rita Sofia Trudy Ursula Viola Agnes Bella Celia Dora Elsa "
    "Fanny Gilda Hanna Ida Judith Klara Linda Mona Nelly Pia Ruth"
).split()
MEN = (
    "Tom Adam Bruno Carl David Emil Felix Georg Hugo Ivan Jacob Karl Leo Martin Nils Oscar Peter Robert Simon Theo "
    "Victor Walter Anton Boris Conrad Dennis Erik Frank Gustav Henry Isaac Jonas Kevin Lucas Max Norman Otto Paul Ralf "
    "Samuel Tim Urban Vincent William Albert Ben Casper Daniel Edgar Fred"
).split()
COMMON = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(MEN))))
WORDS = (
    "lantern basket hammer ladder mirror pillow ribbon saddle teapot violin window anchor bottle candle drum engine "
    "feather glove harbor island jacket kettle lemon marble needle orange pencil quilt rocket spoon ticket umbrella "
    "valley whistle yarn zebra acorn button carpet dragon eagle forest garden helmet iron jungle kitten lizard meadow "
    "napkin onion pepper queen river silver tiger tunnel velvet walnut copper planet castle cherry comet coral cotton "
    "desert falcon ginger guitar hazel ivory jasmine lotus magnet maple melon monkey nickel olive oyster panda parrot "
    "pearl piano pirate plum puzzle rabbit raven robin salmon shadow shovel snail spider sponge stone sugar sunset "
    "thunder tomato trumpet turtle vapor violet wagon walrus willow winter wizard"
).split()
COLOURS = (
    "red blue green yellow white black brown pink purple golden grey scarlet amber turquoise crimson beige".split()
)
NUMBERS = [str(n) for n in range(10, 100)]
ATTRIBUTES = {"password": WORDS, "number": NUMBERS, "colour": COLOURS}

# A trade, what is made, where, and what for: one row, so that a baker never sells horseshoes.
TRADES = [
    ("baker", "bread", "bakery", "baked", "oven"),
    ("miller", "flour", "mill", "ground", "wheel"),
    ("farmer", "corn", "farm", "grew", "plough"),
    ("gardener", "roses", "garden", "planted", "spade"),
    ("fisher", "fish", "harbour", "caught", "net"),
    ("potter", "bowls", "pottery", "made", "kiln"),
    ("tailor", "coats", "tailor shop", "sewed", "needle"),
    ("shepherd", "wool", "meadow", "sheared", "staff"),
    ("beekeeper", "honey", "orchard", "gathered", "smoker"),
    ("carpenter", "chairs", "workshop", "built", "saw"),
    ("smith", "horseshoes", "forge", "made", "hammer"),
    ("painter", "pictures", "studio", "painted", "brush"),
    ("cook", "soup", "kitchen", "cooked", "pot"),
    ("clockmaker", "clocks", "clock shop", "repaired", "lens"),
]
HOMES = ["small village", "quiet town", "green valley", "little house", "town by the sea", "village near the forest"]
PLACES = ["bridge", "well", "river", "old tree", "church", "market", "barn", "gate", "pond", "hill", "tower", "lake"]
THINGS = ["key", "ring", "letter", "coin", "map", "lamp", "book", "bell", "hat", "watch", "flute", "drum"]
LOOKS = ["silver", "wooden", "old", "little", "shiny", "round", "heavy", "beautiful"]
ANIMALS = ["cat", "dog", "goat", "fox", "duck", "horse", "lamb", "owl", "donkey", "hen"]
YOUNG = {"cat": "milk", "dog": "a bone", "goat": "grass", "fox": "an egg", "duck": "crumbs", "horse": "an apple",
         "lamb": "milk", "owl": "a mouse", "donkey": "a carrot", "hen": "corn"}  # fmt: skip
TIMES = ["One morning", "One day", "One evening", "One winter day", "One summer day", "Last spring"]
# Weather and what follows from it.
WEATHER = [
    ("it rained all day", "the road was wet", "an umbrella"),
    ("it snowed", "the road was white", "a warm coat"),
    ("the wind was strong", "the leaves flew through the air", "a scarf"),
    ("the sun was hot", "the grass was dry", "water"),
    ("a thick fog came", "nobody could see far", "a lantern"),
    ("there was a storm", "the trees shook", "a candle"),
]
FEELINGS = [("happy", "smiled"), ("proud", "laughed"), ("glad", "sang a song"), ("grateful", "danced")]

OPENINGS = [
    "Once upon a time, there was {a_trade} named {A}.",
    "Once upon a time, {a_trade} named {A} lived in a {home}.",
    "{A} was {a_trade} in a {home}.",
    "There once was {a_trade} called {A}.",
    "In a {home} lived {a_trade} named {A}.",
]
HABITS = [
    "Every day {she} {made} {goods} in the {shop}.",
    "{She} {made} {goods} and sold {goods} at the market.",
    "{A} loved {her} work, and everyone liked {her} {goods}.",
    "{She} worked in the {shop} with {her} friend {B}.",
    "Each morning {she} walked to the {shop} and {made} {goods}.",
]
WEATHERS = [
    "{time}, {weather} and {effect}.",
    "{time}, {weather}, so {A} took {gear}.",
    "{time}, {weather}, but {A} went out with {gear}.",
]
PLOTS = {
    "lost": [
        [
            "Near the {place}, {she} lost {her} {look} {thing}.",
            "{A} dropped {her} {look} {thing} near the {place}.",
            "On the way to the {place}, {her} {look} {thing} fell from {her} pocket.",
        ],
        ["{A} was very sad.", "{She} looked for it all day, but could not find it.", "{A} began to cry."],
        [
            "{She} asked {B}, the {trade_b}, for help.",
            "{B}, the {trade_b}, saw {her} and wanted to help.",
            "Then {she} met {B}, who was {a_trade_b}.",
        ],
        [
            "{B} looked behind the {place} and found the {thing}.",
            "{B} walked back to the {place} and saw the {thing} in the grass.",
            "Together they went to the {place}, and {B} found the {thing} under a stone.",
        ],
        ["{A} thanked {B} and gave {him} some {goods}.", "To thank {B}, {A} gave {him} {goods} from the {shop}."],
    ],
    "animal": [
        [
            "At the {place}, {she} heard a small {animal}.",
            "{A} found a hungry {animal} near the {place}.",
            "A little {animal} was sitting alone by the {place}.",
        ],
        ["The {animal} was cold and afraid.", "The {animal} was hungry and looked at {A}."],
        [
            "{A} gave the {animal} {food} and took it home.",
            "{She} carried the {animal} to the {shop} and gave it {food}.",
        ],
        [
            "{B} said that the {animal} belonged to nobody.",
            "{Her} friend {B} built a warm bed for the {animal}.",
            "{B}, the {trade_b}, came to see the {animal}.",
        ],
        ["From that day, the {animal} followed {A} to the {shop}.", "Soon the {animal} was strong again."],
    ],
    "tool": [
        [
            "In the {shop}, the {tool} broke.",
            "{A} wanted to work, but {her} {tool} was broken.",
            "When {A} came to the {shop}, the {tool} was gone.",
        ],
        ["Without the {tool}, there were no {goods}.", "{She} could not work without the {tool}."],
        [
            "{A} went to the {place} and asked {B} for advice.",
            "{B}, the {trade_b}, heard about it and came at once.",
            "{She} told {her} friend {B} about the {tool}.",
        ],
        [
            "{B} had {a_look} {tool} at home and gave it to {A}.",
            "{B} worked all night and brought a new {tool} to the {shop}.",
        ],
        ["The next day, {A} {made} more {goods} than ever.", "{A} {made} {goods} for {B} to say thank you."],
    ],
    "gift": [
        [
            "{A} wanted to give {B} {a_look} {thing}.",
            "It was the birthday of {B}, and {A} had no gift.",
            "{B}, the {trade_b}, was ill and stayed in bed.",
        ],
        [
            "So {she} walked to the {place} to buy {a_look} {thing}.",
            "{She} sold {her} {goods} at the {place} and bought {a_look} {thing}.",
        ],
        [
            "On the way home, {she} met {a_animal} and gave it {food}.",
            "The way was long, and {she} sat down by the {place2}.",
        ],
        ["In the evening, {A} knocked at the door of {B}.", "{A} put the {thing} in a box and went to see {B}."],
        ["{B} opened the box and saw the {thing}.", "{B} loved the {thing} and kept it for many years."],
    ],
}
ENDINGS = [
    "In the evening, {A} and {B} sat by the fire, and {A} {acted}.",
    "{A} was {feeling} and {acted}.",
    "They were both {feeling}, and {B} {acted}.",
    "After that, {A} and {B} were friends forever.",
]


def _an(phrase: str) -> str:
    """The phrase with its indefinite article."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _name(rng: random.Random, even: bool, friend: bool) -> tuple[str, bool]:
    """A name, and whether it is a woman's.

    Unless `even`, heroes like to have the first names of the lists and friends the last: a greedy continuation takes
    the likeliest name, and where a hundred are equally likely, chance picks the hero's own name for the friend.
    """
    woman = rng.random() < 0.5
    names = WOMEN if woman else MEN
    if even:
        return rng.choice(names), woman
    return rng.choices(names[::-1] if friend else names, cum_weights=COMMON)[0], woman


def _cast(rng: random.Random, even: bool) -> dict[str, str]:
    """Choose the people, places and things that one tale keeps to."""
    pick = rng.choice
    first, woman = _name(rng, even, friend=False)
    second, second_woman = _name(rng, even, friend=True)
    while second == first:
        second = pick(WOMEN if second_woman else MEN)
    trade, goods, shop, made, tool = pick(TRADES)
    trade_b = pick(TRADES)[0]
    while trade_b == trade:
        trade_b = pick(TRADES)[0]
    place, place2 = rng.sample(PLACES, 2)
    look, animal = pick(LOOKS), pick(ANIMALS)
    weather, effect, gear = pick(WEATHER)
    feeling, acted = pick(FEELINGS)
    she, her = ("she", "her") if woman else ("he", "his")
    return {
        "A": first, "B": second, "she": she, "her": her, "She": she.title(), "Her": her.title(),
        "him": "her" if second_woman else "him",
        "trade": trade, "a_trade": _an(trade), "goods": goods, "shop": shop, "made": made, "tool": tool,
        "trade_b": trade_b, "a_trade_b": _an(trade_b), "home": pick(HOMES), "place": place, "place2": place2,
        "look": look, "a_look": _an(look), "thing": pick(THINGS), "animal": animal, "a_animal": _an(animal),
        "food": YOUNG[animal], "time": pick(TIMES), "weather": weather, "effect": effect, "gear": gear,
        "feeling": feeling, "acted": acted,
    }  # fmt: skip


def tale(rng: random.Random, even: bool = False) -> list[str]:
    """One short story, as its sentences; `even` makes all names equally common."""
    cast = _cast(rng, even)
    steps = [OPENINGS, HABITS]
    if rng.random() < 0.6:
        steps.append(WEATHERS)
    steps += PLOTS[rng.choice(list(PLOTS))]
    steps.append(ENDINGS)
    return [rng.choice(step).format_map(cast) for step in steps] + ["The end."]


def tales(rng: random.Random) -> Iterator[str]:
    """Endless story sentences, one tale after the other."""
    while True:
        yield from tale(rng)


class Facts:
    """The facts of one document: every person gets at most one, and no person twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = rng.sample(WOMEN + MEN, len(WOMEN) + len(MEN))
        self.known: list[tuple[str, str, str]] = []

    def new(self) -> tuple[str, str, str] | None:
        """A fresh (attribute, name, value), or None when everybody has one."""
        if not self.names:
            return None
        kind = self.rng.choices(list(ATTRIBUTES), weights=(5, 4, 1))[0]
        fact = (kind, self.names.pop(), self.rng.choice(ATTRIBUTES[kind]))
        self.known.append(fact)
        return fact


def statement(fact: tuple[str, str, str]) -> tuple[str, str]:
    """A fact as text: what leads up to the value, and the value."""
    return f" The {fact[0]} of {fact[1]} is", f" {fact[2]}"


def question(fact: tuple[str, str, str]) -> str:
    """The question whose answer is `statement(fact)`."""
    return f" Question: What is the {fact[0]} of {fact[1]}? Answer:"


def build_tokenizer(vocab_limit: int = 2048) -> Tokenizer:
    """A GPT-2 style byte-level BPE in which every word of the language is one token.

    The corpus lists each word often, so that merging goes on until all are whole; training is deterministic.
    """
    rng = random.Random(1)
    corpus = [" ".join(tale(rng, even=True)) for _ in range(3000)]
    lists = " ".join(WOMEN + MEN + WORDS + COLOURS + NUMBERS)
    corpus += [f" {lists} The password number colour of is. Question: What is the? Answer:"] * 50
    corpus += [" ".join(WOMEN + MEN)] * 10 + WOMEN * 10 + MEN * 10  # a name also opens a line, without its space
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_limit,
        min_frequency=10,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


class Encoder:
    """Tokenises by cached pieces: BPE never merges across them, so whole texts need no second look."""

    PIECES = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[str, list[int]] = {}
        self.end: int = tokenizer.token_to_id(END) or 0  # the trainer puts special tokens first

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.PIECES.findall(text):
            if piece not in self.cache:
                self.cache[piece] = self.tokenizer.encode(piece).ids
            ids += self.cache[piece]
        return ids
