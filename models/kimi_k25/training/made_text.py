"""Short stories and small tasks on words and lists."""

from __future__ import annotations

from random import Random

from models.kimi_k25.training.cleaning import capitalised
from models.kimi_k25.training.documents import Exchange
from models.kimi_k25.training.made_words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    FEELINGS,
    FOODS,
    NAMES,
    NUMBERS,
    PLACES,
    THINGS,
)

_OPENINGS = (
    "Once upon a time, there was a child named {a}. {a} lived near the {place} and had a {adj} {thing}.",
    "One sunny morning, {a} went to the {place} with a {adj} {thing}.",
    "{a} was a kind child who loved to play in the {place}. Every day {a} took a {adj} {thing} along.",
    "There was once a little {animal} who lived by the {place}. The {animal} had one friend, and the friend was {a}.",
    "{a} and {b} were walking to the {place}. {a} was carrying a {adj} {thing}.",
    "In a small town there lived a {animal} who wanted a {adj} {thing} more than anything.",
    "It was a cold evening. {a} sat in the {place} and looked at a {adj} {thing}.",
    "Long ago, in a faraway {place}, a {animal} met a child named {a}.",
)
_PROBLEMS = (
    "One day, the {thing} was gone. {a} looked under the bed and behind the door, but it was not there.",
    "Then {a} saw a {animal}. The {animal} looked {feel}.",
    '"Look!" said {b}. "There is a {animal} in the {place}."',
    "The wind was strong, and the {thing} flew away over the {place}.",
    "Suddenly it began to rain, and everything got wet.",
    "But the way was long, and soon it was dark. {a} felt {feel}.",
    "A {animal} came by and asked for help. It had lost its {thing2}.",
    "{a} dropped the {thing} into the water, and it sank to the bottom.",
)
_TURNS = (
    '"Can you help me?" asked {a}. "Of course," said {b}. They walked and walked until they were tired.',
    '{a} asked the {animal}, "Why are you {feel}?" The {animal} said, "I have lost my {thing2}."',
    "{b} had an idea. They made a plan and worked together all afternoon.",
    "{a} was {feel} and wanted to cry, but {b} gave {a} a big hug.",
    '"Do not worry," said {b}. "We can look for the {thing} together."',
    'The {animal} whispered, "I know the way. Follow me!" So they followed it past the {place2}.',
    "{b} brought a lamp, and together they searched every corner of the {place2}.",
)
_ENDINGS = (
    "At last they found the {thing} next to a big tree. {a} smiled.",
    "In the end, the {animal} gave the {thing} back, and they all shared some cake.",
    "{b} found the {thing} in the {place2}. It was a little dirty, but it was safe.",
    "The {animal} was so glad that it danced around the {place}.",
    "When the sun came up, everything was fine again, and the {thing} shone in the light.",
)
_LESSONS = (
    "{a} said thank you, and they went home for dinner.",
    "From that day on, {a} and {b} were best friends.",
    "{a} learned that it is good to ask for help.",
    "That night {a} slept well and dreamed of the {place}.",
    "And they all lived happily ever after.",
    "{a} learned that sharing makes everyone happy.",
    "{a} promised to be more careful next time.",
)
_REQUESTS = (
    "Tell me a short story about {a} and a {thing}.",
    "Write a story with a {animal}, a {thing} and a child named {a}.",
    "Can you tell me a story?",
    "Tell me a story.",
    "Write a short story that takes place in the {place}.",
    "Please tell a story for children about a {adj} {thing}.",
    "Tell me a story about a {animal}.",
    "Write me a short story about a {animal} and a child.",
    "I am bored. Tell me a story about {a}.",
    "Tell me a bedtime story.",
    "Write a short story about a {animal} who finds a {thing}.",
)


def story_parts(rng: Random) -> tuple[dict, str]:
    a, b = rng.sample(NAMES, 2)
    place, place2 = rng.sample(PLACES, 2)
    thing, thing2 = rng.sample(THINGS, 2)
    words = {
        "a": a,
        "b": b,
        "animal": rng.choice(ANIMALS),
        "thing": thing,
        "thing2": thing2,
        "place": place,
        "place2": place2,
        "adj": rng.choice(ADJECTIVES),
        "feel": rng.choice(FEELINGS),
    }
    head = " ".join(rng.choice(part) for part in (_OPENINGS, _PROBLEMS))
    tail = " ".join(rng.choice(part) for part in (_TURNS, _ENDINGS, _LESSONS))
    return words, f"{head}\n\n{tail}".format(**words)


def story(rng: Random) -> Exchange:
    words, text = story_parts(rng)
    request = rng.choice(_REQUESTS).format(**words)
    hero = words["animal"] if words["animal"] in request else words["a"]
    return Exchange(request, text, f"The user wants a story. I will write about {hero} and a {words['thing']}.")


def _spelling(rng: Random) -> Exchange:
    word = rng.choice(ANIMALS + THINGS + PLACES + COLORS + ADJECTIVES)
    kind = rng.randrange(5)
    letters = "-".join(word.upper())
    if kind == 0:
        return Exchange(
            rng.choice((f"Spell the word {word}.", f"How do you spell {word}?")), f"{letters}.", f"The word is {word}."
        )
    if kind == 1:
        question = rng.choice((f"How many letters are in the word {word}?", f"How many letters does {word} have?"))
        return Exchange(
            question, f"The word {word} has {NUMBERS[len(word)]} letters.", f"{letters}: that is {len(word)}."
        )
    if kind == 2:
        question = rng.choice((f"Write the word {word} in capital letters.", f"Make {word} upper case."))
        return Exchange(question, word.upper(), f"The word is {word}. In capitals it is {word.upper()}.")
    if kind == 3:
        return Exchange(
            f"Spell {word} backwards.", f"{word[::-1]}", f"{letters} from the end: {'-'.join(word[::-1].upper())}."
        )
    end = rng.choice(("first", "last"))
    letter = word[0 if end == "first" else -1].upper()
    return Exchange(
        f"What is the {end} letter of {word}?",
        f"The {end} letter of {word} is {letter}.",
        f"{letters}. {letter} is {end}.",
    )


def _ordering(rng: Random) -> Exchange:
    words = rng.sample(rng.choice((ANIMALS, THINGS, PLACES, FOODS)), rng.randrange(3, 6))
    listed = ", ".join(words)
    if rng.random() < 0.6:
        question = rng.choice((f"Put these words in order from A to Z: {listed}.", f"Sort these words: {listed}."))
        return Exchange(question, f"{', '.join(sorted(words))}.", f"{sorted(words)[0]} comes first in the alphabet.")
    first, second = words[:2]
    if len(first) == len(second):
        answer = "They have the same length."
    else:
        answer = f"{capitalised(max(first, second, key=len))} is longer."
    reasoning = f"{first} has {len(first)} letters and {second} has {len(second)}."
    return Exchange(f"Which word is longer, {first} or {second}?", answer, reasoning)


def _repeating(rng: Random) -> Exchange:
    sentence = f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} is in the {rng.choice(PLACES)}"
    form = rng.choice(("Repeat after me: {}.", "Say: {}.", "Please repeat this sentence: {}."))
    return Exchange(form.format(sentence), capitalised(sentence) + ".", "The user wants me to repeat the sentence.")


_KINDS = {"animals": ANIMALS, "places": PLACES, "colors": COLORS, "foods": FOODS, "cities": CITIES, "names": NAMES}


def _listing(rng: Random) -> Exchange:
    kind = rng.choice(list(_KINDS))
    count = rng.randrange(2, 8)
    number = rng.choice((str(count), NUMBERS[count]))
    form = rng.choice(("Make a list of {} {}.", "List {} {}.", "Name {} {}.", "Give me {} {}.", "Can you name {} {}?"))
    chosen = rng.sample(_KINDS[kind], count)
    style = rng.randrange(3)
    if style == 0:
        answer = "\n".join(f"{i + 1}. {capitalised(word)}" for i, word in enumerate(chosen))
    elif style == 1:
        answer = "\n".join(f"- {capitalised(word)}" for word in chosen)
    else:
        answer = capitalised(", ".join(chosen[:-1]) + " and " + chosen[-1] + ".")
    return Exchange(form.format(number, kind), answer, f"I need {count} {kind}.")


def word_task(rng: Random) -> Exchange:
    return rng.choice((_spelling, _spelling, _ordering, _repeating, _listing, _listing))(rng)
