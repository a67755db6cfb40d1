"""Small talk, identity, jokes and general knowledge as single exchanges, and conversations that need the history."""

from __future__ import annotations

from random import Random

from models.kimi_k25.training.chat_lines import INTENTS, JOKE_REQUESTS, JOKES, KNOWLEDGE, OPPOSITES, TRANSLATIONS
from models.kimi_k25.training.cleaning import capitalised
from models.kimi_k25.training.documents import Document, Exchange, conversation, pick_system
from models.kimi_k25.training.made_words import (
    ANIMALS,
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    HOBBIES,
    JOBS,
    MONTHS,
    NAMES,
    NUMBERS,
    PLACES,
    THINGS,
)


def _intent(rng: Random) -> Exchange:
    questions, answers, reasoning = rng.choice(INTENTS[:12] if rng.random() < 0.5 else INTENTS)
    return Exchange(_typed(rng, rng.choice(questions)), rng.choice(answers), reasoning)


def _typed(rng: Random, text: str) -> str:
    """As people type: sometimes without capitals or the final mark, sometimes with a greeting in front."""
    draw = rng.random()
    if draw < 0.08:
        return text.lower()
    if draw < 0.14:
        return text.rstrip(".?!") or text
    if draw < 0.2:
        return text.lower().rstrip(".?!") or text
    return text


def _joke(rng: Random) -> Exchange:
    joke = rng.choice(JOKES)
    return Exchange(_typed(rng, rng.choice(JOKE_REQUESTS)), joke, "The user wants a joke. I know a short one.")


def _knowledge(rng: Random) -> Exchange:
    question, answer, topic = rng.choice(KNOWLEDGE)
    question = _typed(rng, question)
    if rng.random() < 0.12 and question[0].isupper():
        opener = rng.choice(
            ("Can you tell me: ", "I have a question. ", "Quick question: ", "Please tell me: ", "Hi! ")
        )
        question = opener + question
    return Exchange(question, answer, f"The user asks about {topic}. I know this: {answer}")


def _opposite(rng: Random) -> Exchange:
    word, other = rng.choice(list(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    question = rng.choice(
        (f"What is the opposite of {word}?", f"Opposite of {word}?", f"Give me the opposite of {word}.")
    )
    return Exchange(question, f"The opposite of {word} is {other}.", f"{capitalised(word)} and {other} are opposites.")


def _translation(rng: Random) -> Exchange:
    language = rng.choice(list(TRANSLATIONS))
    word, translated = rng.choice(list(TRANSLATIONS[language].items()))
    form = rng.choice(('How do you say "{w}" in {l}?', "Translate {w} to {l}.", "What is {w} in {l}?"))
    answer = f'In {language}, "{word}" is "{translated}".'
    return Exchange(form.format(w=word, l=language), answer, f"The {language} word for {word} is {translated}.")


def _calendar(rng: Random) -> Exchange:
    row, kind = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    i = rng.randrange(len(row))
    if rng.random() < 0.5:
        answer = row[(i + 1) % len(row)]
        question = rng.choice((f"Which {kind} comes after {row[i]}?", f"What {kind} is after {row[i]}?"))
        return Exchange(question, f"{answer} comes after {row[i]}.", f"After {row[i]} comes {answer}.")
    answer = row[i - 1]
    return Exchange(
        f"Which {kind} comes before {row[i]}?", f"{answer} comes before {row[i]}.", f"{answer}, then {row[i]}."
    )


def small_exchange(rng: Random) -> Exchange:
    """One exchange of small talk or everyday knowledge."""
    draw = rng.random()
    if draw < 0.5:
        return _intent(rng)
    if draw < 0.6:
        return _joke(rng)
    return rng.choice((_knowledge, _knowledge, _knowledge, _opposite, _translation, _calendar))(rng)


_REMEMBERED = (
    ("My name is {name}.", "Nice to meet you, {name}!", "What is my name?", "Your name is {name}."),
    ("I am {name}.", "Hello {name}! How can I help you?", "Who am I?", "You are {name}."),
    ("Hi, I'm {name}.", "Hi {name}! Nice to meet you.", "Do you remember my name?", "Yes, your name is {name}."),
    (
        "My favorite color is {color}.",
        "{Color} is a nice color.",
        "What is my favorite color?",
        "Your favorite color is {color}.",
    ),
    ("I live in {city}.", "{city} is an interesting place.", "Where do I live?", "You live in {city}."),
    ("I have a {animal}.", "A {animal}! What is its name?", "Which animal do I have?", "You have a {animal}."),
    (
        "My {animal} is called {other}.",
        "{other} is a nice name.",
        "What is my {animal} called?",
        "Your {animal} is called {other}.",
    ),
    ("I work as a {job}.", "That must be interesting work.", "What is my job?", "You are a {job}."),
    ("I like {hobby}.", "{Hobby} is fun!", "What do I like?", "You like {hobby}."),
    (
        "My secret number is {number}.",
        "I will remember {number}.",
        "What is my secret number?",
        "Your secret number is {number}.",
    ),
    (
        "I put the {thing} in the {place}.",
        "All right, I will remember that.",
        "Where is the {thing}?",
        "The {thing} is in the {place}.",
    ),
    ("I ate {food} today.", "I hope it was good.", "What did I eat today?", "You ate {food} today."),
    ("The code word is {thing}.", "I will keep it in mind.", "What is the code word?", "The code word is {thing}."),
)


def _remembered(rng: Random) -> tuple[Exchange, Exchange]:
    name, other = rng.sample(NAMES, 2)
    words = {
        "name": name,
        "other": other,
        "color": rng.choice(COLORS),
        "city": rng.choice(CITIES),
        "animal": rng.choice(ANIMALS),
        "job": rng.choice(JOBS),
        "hobby": rng.choice(HOBBIES),
        "number": rng.randrange(1, 1000),
        "thing": rng.choice(THINGS),
        "place": rng.choice(PLACES),
        "food": rng.choice(FOODS),
    }
    words |= {"Color": words["color"].capitalize(), "Hobby": words["hobby"].capitalize()}
    told, reply, asked, answer = (part.format(**words) for part in rng.choice(_REMEMBERED))
    return Exchange(told, reply, "The user tells me something. I will remember it."), Exchange(
        asked, answer, f'The user said: "{told}"'
    )


def memory_chat(rng: Random) -> Document:
    """Something told in one turn and asked for in a later one, with other talk between."""
    told, asked = _remembered(rng)
    between = [small_exchange(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    return conversation("chat", rng, [told, *between, asked], pick_system(rng))


def persona_chat(rng: Random) -> Document:
    """The system prompt names the assistant or a rule, and the answer follows it."""
    name, job = rng.choice(NAMES), rng.choice(JOBS)
    thing, city = rng.choice(THINGS), rng.choice(CITIES)
    system, question, answer = rng.choice(
        (
            (f"You are {name}, a friendly {job}.", "Who are you?", f"I am {name}, a friendly {job}."),
            (f"You are {name}, a helpful assistant.", "What is your name?", f"My name is {name}."),
            (f"You are {name}. You live in {city}.", "Where do you live?", f"I live in {city}."),
            (f"You are an assistant called {name}.", "Hello, who are you?", f"Hello! I am {name}, your assistant."),
            (f"You work in a shop that sells {thing}s.", "What do you sell?", f"We sell {thing}s."),
            (f"Always answer with the word {thing}.", rng.choice(KNOWLEDGE)[0], thing),
            (f"Reply {thing.upper()} to everything.", rng.choice(KNOWLEDGE)[0], thing.upper()),
            (f"The user's name is {name}.", "What is my name?", f"Your name is {name}."),
        )
    )
    return conversation("chat", rng, [Exchange(question, answer, f'I was told: "{system}"')], system)


def counting_question(rng: Random) -> Exchange:
    count = rng.randrange(1, 9)
    thing = rng.choice(THINGS)
    row = " ".join([thing] * count)
    return Exchange(
        f"How many times do I say {thing}? {row}",
        f"You say it {NUMBERS[count]} time{'s' if count > 1 else ''}.",
        " ".join(f"{thing} {i + 1}," for i in range(count)).rstrip(",") + ".",
    )
