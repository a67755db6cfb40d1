"""Sums with the working written out digit by digit, so that a very small model can carry them out.

The tokenizer gives every digit its own token, so "ones, tens, hundreds" is a walk over tokens.
"""

from __future__ import annotations

from random import Random

from models.kimi_k25.training.documents import Exchange
from models.kimi_k25.training.made_words import NAMES, THINGS

_PLACES = ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands")
_ADD = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=?",
    "What's {a} + {b}?",
    "Calculate {a} + {b}.",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "Can you add {a} and {b}?",
    "Compute {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "Please work out {a} + {b}.",
    "what is {a}+{b}?",
    "Solve {a} + {b}.",
    "What is {a}+{b}?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "What's {a} - {b}?",
    "Calculate {a} - {b}.",
    "Subtract {b} from {a}.",
    "How much is {a} - {b}?",
    "Compute {a} - {b}.",
    "what is {a}-{b}?",
    "Take {b} away from {a}.",
    "Please work out {a} - {b}.",
)
_MULTIPLY = (
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "{a} * {b}",
    "{a}*{b}",
    "{a} x {b}",
    "Multiply {a} by {b}.",
    "Calculate {a} * {b}.",
    "How much is {a} times {b}?",
    "What's {a} times {b}?",
    "Compute {a} x {b}.",
    "What is {a} multiplied by {b}?",
    "what is {a}*{b}?",
)
_DIVIDE = (
    "What is {a} / {b}?",
    "What is {a} divided by {b}?",
    "{a} / {b}",
    "Divide {a} by {b}.",
    "Calculate {a} / {b}.",
    "How much is {a} divided by {b}?",
    "What's {a} / {b}?",
)
_RESULT = ("{left} = {value}.", "{left} = {value}.", "The answer is {value}.", "{left} is {value}.", "It is {value}.")


def addition_steps(a: int, b: int) -> str:
    """ "17 + 25. Ones: 7 + 5 = 12, write 2, carry 1. Tens: 1 + 2 + 1 = 4. Result 42." for any a, b below 100,000."""
    steps, carry = [f"{a} + {b}."], 0
    width = max(len(str(a)), len(str(b)))
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        term = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        carry = total // 10
        note = f", write {total % 10}, carry {carry}" if carry else ""
        steps.append(f"{_PLACES[place]}: {term} = {total}{note}.")
    return " ".join([*steps, f"Result {a + b}."])


def subtraction_steps(a: int, b: int) -> str:
    """Digit by digit with borrowing; a smaller minuend is turned round first."""
    if a < b:
        return f"{a} is smaller than {b}, so the result is negative. {subtraction_steps(b, a)} So {a} - {b} = {a - b}."
    steps, borrow = [f"{a} - {b}."], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        term = f"{x} - {y} - {borrow}" if borrow else f"{x} - {y}"
        value = x - y - borrow
        borrow = int(value < 0)
        note = f", borrow: {value + 10}" if borrow else ""
        steps.append(f"{_PLACES[place]}: {term} = {value}{note}.")
    return " ".join([*steps, f"Result {a - b}."])


def multiplication_steps(a: int, b: int) -> str:
    """Table facts up to 12 x 12; otherwise the factor is split into tens and ones."""
    if a <= 12 and b <= 12:
        return f"{a} times {b} is in the table: {a * b}."
    if b > 9 and a <= 9:
        a, b = b, a
    if b <= 9:
        tens, ones = a // 10 * 10, a % 10
        first, second = tens * b, ones * b
        parts = f"{a} = {tens} + {ones}. {tens} * {b} = {first}. {ones} * {b} = {second}."
        return f"{parts} {first} + {second} = {a * b}."
    tens, ones = b // 10 * 10, b % 10
    first, second = a * tens, a * ones
    return f"{b} = {tens} + {ones}. {a} * {tens} = {first}. {a} * {ones} = {second}. {addition_steps(first, second)}"


def _number(rng: Random) -> int:
    return rng.randrange(1, rng.choice((10, 20, 100, 100, 100, 1000, 1000, 10000)))


def _calculation(rng: Random, kind: str) -> tuple[int, int, int, str, tuple, str]:
    a, b = _number(rng), _number(rng)
    if kind == "+":
        return a, b, a + b, addition_steps(a, b), _ADD, f"{a} + {b}"
    if kind == "-":
        if rng.random() < 0.9:
            a, b = max(a, b), min(a, b)
        return a, b, a - b, subtraction_steps(a, b), _SUBTRACT, f"{a} - {b}"
    if kind == "*":
        top = rng.choice(((12, 12), (12, 12), (99, 9), (9, 99), (99, 99)))
        a, b = rng.randrange(2, top[0] + 1), rng.randrange(2, top[1] + 1)
        return a, b, a * b, multiplication_steps(a, b), _MULTIPLY, f"{a} * {b}"
    b, value = rng.randrange(2, 13), rng.randrange(2, 13)
    return b * value, b, value, f"{b} times {value} is {b * value}.", _DIVIDE, f"{b * value} / {b}"


def calculation(rng: Random) -> Exchange:
    a, b, value, steps, questions, left = _calculation(rng, rng.choice("+++++---**/"))
    answer = rng.choice(_RESULT).format(left=left, value=value)
    if rng.random() < 0.12:
        return Exchange(
            rng.choice((f"What is {left}? Show your steps.", f"Explain step by step: {left}")),
            f"{steps} So the answer is {value}.",
            "The user wants to see the steps. I will write them down.",
        )
    return Exchange(rng.choice(questions).format(a=a, b=b), answer, steps)


def word_problem(rng: Random) -> Exchange:
    name, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS) + "s"
    a, b = rng.randrange(2, 60), rng.randrange(2, 60)
    kind = rng.randrange(5)
    if kind == 0:
        verb = rng.choice(("buys", "finds", "gets"))
        question = f"{name} has {a} {things} and {verb} {b} more. How many {things} does {name} have now?"
        return Exchange(question, f"{name} has {a + b} {things} now.", f"I add: {addition_steps(a, b)}")
    if kind == 1:
        a, b = max(a, b) + 1, min(a, b)
        verb = rng.choice((f"gives {b} to {other}", f"loses {b}", f"sells {b}"))
        question = f"{name} has {a} {things} and {verb}. How many are left?"
        return Exchange(question, f"{name} has {a - b} {things} left.", f"I subtract: {subtraction_steps(a, b)}")
    if kind == 2:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        question = f"There are {a} boxes with {b} {things} in each. How many {things} are there?"
        return Exchange(question, f"There are {a * b} {things}.", f"I multiply: {multiplication_steps(a, b)}")
    if kind == 3:
        question = f"A {things[:-1]} costs {a} dollars and a bag costs {b} dollars. How much do they cost together?"
        return Exchange(question, f"Together they cost {a + b} dollars.", f"I add: {addition_steps(a, b)}")
    a, b = rng.randrange(2, 13), rng.randrange(2, 13)
    question = f"{name} shares {a * b} {things} equally with {a - 1} friends. How many does each of them get?"
    answer = f"Each of them gets {b} {things}."
    return Exchange(question, answer, f"There are {a} people. {a} times {b} is {a * b}, so each gets {b}.")


def about_numbers(rng: Random) -> Exchange:
    """Comparing, sorting, parity, counting, series, doubling and percentages."""
    kind = rng.randrange(8)
    a, b = _number(rng), _number(rng)
    if kind == 0:
        question = rng.choice((f"Which number is larger, {a} or {b}?", f"Which is bigger: {a} or {b}?"))
        same = a == b
        reasoning = f"I compare {a} and {b}. " + (
            "They are equal." if same else f"{max(a, b)} is more than {min(a, b)}."
        )
        return Exchange(question, "They are equal." if same else f"{max(a, b)} is larger.", reasoning)
    if kind == 1:
        numbers = [rng.randrange(1, 100) for _ in range(rng.randrange(3, 7))]
        listed, ordered = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
        question = rng.choice((f"Sort these numbers: {listed}.", f"Put these numbers in order: {listed}"))
        return Exchange(question, f"{ordered}.", f"The smallest is {min(numbers)} and the largest is {max(numbers)}.")
    if kind == 2:
        word = "odd" if a % 2 else "even"
        question = rng.choice((f"Is {a} even or odd?", f"Is {a} an even number?"))
        answer = f"{a} is {word}." if "odd" in question else ("Yes" if word == "even" else "No") + f", {a} is {word}."
        return Exchange(question, answer, f"The last digit of {a} is {a % 10}, which is {word}.")
    if kind == 3:
        start, step = rng.randrange(1, 20), rng.randrange(1, 11)
        row = [start + step * i for i in range(5)]
        question = f"What comes next: {', '.join(map(str, row[:4]))}?"
        return Exchange(
            question, f"The next number is {row[4]}.", f"Each number is {step} more. {row[3]} + {step} = {row[4]}."
        )
    if kind == 4:
        start = rng.randrange(1, 30)
        end = start + rng.randrange(3, 12)
        row = ", ".join(map(str, range(start, end + 1)))
        return Exchange(f"Count from {start} to {end}.", f"{row}.", f"I start at {start} and stop at {end}.")
    if kind == 5:
        a = rng.randrange(1, 100)
        question = rng.choice((f"What is double {a}?", f"What is twice {a}?"))
        return Exchange(question, f"It is {2 * a}.", addition_steps(a, a))
    if kind == 6:
        a = 2 * rng.randrange(1, 100)
        return Exchange(f"What is half of {a}?", f"Half of {a} is {a // 2}.", f"{a // 2} + {a // 2} = {a}.")
    share, a = rng.choice((10, 20, 25, 50)), 20 * rng.randrange(1, 30)
    value = a * share // 100
    return Exchange(
        f"What is {share}% of {a}?", f"{share}% of {a} is {value}.", f"{share}% of {a}: {a} * {share} / 100 = {value}."
    )


def any_sum(rng: Random) -> Exchange:
    draw = rng.random()
    if draw < 0.66:
        return calculation(rng)
    return word_problem(rng) if draw < 0.83 else about_numbers(rng)
