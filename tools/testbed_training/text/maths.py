"""Competition-style exercises with a written derivation: equations, sums, remainders, common divisors."""

import random

from . import Example, mostly

_VARIABLES = "x y z n k m t a".split()


def example(rng: random.Random) -> Example:
    """Return one exercise of a random kind; the answer is always an integer."""
    return rng.choice((_linear, _linear, _series, _divisor, _remainder, _quadratic))(rng)


def _linear(rng: random.Random) -> Example:
    v = rng.choice(_VARIABLES)
    x, b = rng.randint(-20, 30), rng.randint(1, 60)
    a, c = rng.sample(range(1, 13), 2)
    if a < c:
        a, c = c, a
    d = (a - c) * x + b
    left, right = f"{a}{v} + {b}", f"{c}{v} {_signed(d)}"
    prompt = rng.choice(
        (f"Solve for {v}: {left} = {right}.", f"Find {v} if {left} = {right}.", f"What is {v} when {left} = {right}?")
    )
    lines = [
        mostly(rng, ("We solve", "Take the equation", "The equation is", "We start from"), "open", a, c)
        + f" {left} = {right}.",
        mostly(
            rng,
            (f"Subtract {c}{v} from both sides:", f"Moving {c}{v} to the left gives", f"Collecting the terms in {v}:"),
            "move",
            a - c,
            v,
        )
        + f" {a - c}{v} + {b} = {d}.",
        mostly(
            rng,
            (f"Subtract {b} from both sides:", f"Taking {b} away gives", f"Moving {b} to the right:"),
            "constant",
            b,
            v,
        )
        + f" {a - c}{v} = {d} - {b} = {d - b}.",
        mostly(rng, (f"Divide by {a - c}:", f"Dividing both sides by {a - c} gives", "Hence"), "divide", a - c, b % 7)
        + f" {v} = {d - b} / {a - c} = {x}.",
        mostly(rng, ("Check:", "We check:", "To check, put it in:"), "check", x)
        + f" {a} * {_bracket(x)} + {b} = {a * x + b}"
        + f" and {c} * {_bracket(x)} {_signed(d)} = {c * x + d}.",
        mostly(rng, ("Both sides agree.", "Both sides are equal.", "The two sides match."), "agree", x % 9, a),
        f"The answer is {x}.",
    ]
    return Example(prompt, "\n".join(lines), answer=str(x))


def _series(rng: random.Random) -> Example:
    first, step, count = rng.randint(1, 30), rng.randint(2, 9), rng.randint(6, 9)
    terms = [first + i * step for i in range(count)]
    prompt = rng.choice(
        (
            f"An arithmetic sequence starts with {first} and grows by {step}. "
            f"What is the sum of its first {count} terms?",
            f"Add the first {count} terms of the arithmetic sequence {terms[0]}, {terms[1]}, {terms[2]}, ...",
        )
    )
    lines = [
        mostly(rng, ("The terms are", "We list the terms:", "The sequence is", "Its terms are"), "terms", step, count)
        + f" {', '.join(map(str, terms))}.",
        mostly(rng, ("We add them one by one.", "Now we sum them.", "Adding step by step:"), "add", first),
    ]
    total = terms[0]
    for term in terms[1:]:
        lines.append(f"{total} + {term} = {total + term}.")
        total += term
    lines.append(
        mostly(rng, ("So the sum is", "Altogether we get", "The total is", "This gives"), "sum", total % 20)
        + f" {total}."
    )
    lines.append(f"The answer is {total}.")
    return Example(prompt, "\n".join(lines), answer=str(total))


def _divisor(rng: random.Random) -> Example:
    common = rng.randint(2, 15)
    a, b = sorted(rng.sample(range(2, 30), 2), reverse=True)
    a, b = a * common, b * common
    prompt = rng.choice(
        (
            f"What is the greatest common divisor of {a} and {b}?",
            f"Find the greatest common divisor of {a} and {b}.",
            f"Compute gcd({a}, {b}).",
        )
    )
    lines = [
        mostly(rng, ("We use Euclid's algorithm.", "We divide with remainder.", "Euclid's algorithm:"), "gcd", common)
    ]
    first, second = a, b
    while b:
        lines.append(f"{a} = {a // b} * {b} + {a % b}.")
        a, b = b, a % b
    lines.append(
        mostly(rng, ("The last remainder that is not zero is", "The division ends with", "So the divisor is"), "end", a)
        + f" {a}."
    )
    lines.append(
        mostly(rng, ("Indeed", "Check:", "We check that", "In fact"), "check", a, second // a)
        + f" {first} = {first // a} * {a} and {second} = {second // a} * {a}."
    )
    lines.append(f"The answer is {a}.")
    return Example(prompt, "\n".join(lines), answer=str(a))


def _remainder(rng: random.Random) -> Example:
    base, exponent, modulus = rng.randint(2, 12), rng.randint(5, 8), rng.randint(3, 19)
    prompt = rng.choice(
        (
            f"What is the remainder when {base}^{exponent} is divided by {modulus}?",
            f"Compute {base}^{exponent} mod {modulus}.",
            f"Find the remainder of {base}^{exponent} modulo {modulus}.",
        )
    )
    lines = [
        mostly(rng, ("We multiply step by step.", "We reduce after each step.", "Work modulo"), "mod", base, modulus)
    ]
    lines[0] = lines[0] if lines[0].endswith(".") else f"{lines[0]} {modulus}."
    value = base % modulus
    lines.append(f"{base}^1 is {value}.")
    for power in range(2, exponent + 1):
        product = value * base
        lines.append(f"{base}^{power} is {value} * {base} = {product}, remainder {product % modulus}.")
        value = product % modulus
    lines.append(f"The answer is {value}.")
    return Example(prompt, "\n".join(lines), answer=str(value))


def _quadratic(rng: random.Random) -> Example:
    v = rng.choice(_VARIABLES)
    p, q = sorted(rng.sample([i for i in range(-12, 13) if i], 2))
    b, c = -(p + q), p * q
    middle = "" if b == 0 else f" {_signed(b)}{v}"
    equation = f"{v}^2{middle} {_signed(c)} = 0"
    prompt = rng.choice(
        (
            f"What is the larger root of {equation}?",
            f"Find the larger solution of {equation}.",
            f"Solve {equation} and give the larger root.",
        )
    )
    lines = [
        mostly(
            rng,
            ("We look for two numbers with", "Two numbers are needed with", "We want numbers with"),
            "look",
            c % 12,
            v,
        )
        + f" sum {-b} and product {c}.",
        mostly(rng, ("They are", "These are", "We find"), "find", p)
        + f" {p} and {q}:"
        + f" {_bracket(p)} + {_bracket(q)} = {p + q} and {_bracket(p)} * {_bracket(q)} = {p * q}.",
        mostly(rng, ("So the equation factors as", "Factoring gives", "Thus we can write"), "factor", q)
        + f" ({v} {_signed(-p)})({v} {_signed(-q)}) = 0.",
        mostly(rng, ("The roots are", "Hence the roots are", "So the solutions are"), "roots", p, v)
        + f" {v} = {p} and {v} = {q}.",
        mostly(rng, ("Check the larger one:", "We check:", "Putting it in:"), "check", q)
        + f" {_bracket(q)} * {_bracket(q)} = {q * q}, {_bracket(b)} * {_bracket(q)} = {b * q}"
        + f" and {q * q} {_signed(b * q)} {_signed(c)} = 0.",
        f"The answer is {q}.",
    ]
    return Example(prompt, "\n".join(lines), answer=str(q))


def _signed(n: int) -> str:
    return f"+ {n}" if n >= 0 else f"- {-n}"


def _bracket(n: int) -> str:
    return str(n) if n >= 0 else f"({n})"
