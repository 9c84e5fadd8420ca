"""Small sums, differences and products with the digits worked out one after the other."""

from benchmarks.mimo_tiny.draw import Draw

QUESTIONS = ("What is {0}?", "Calculate {0}.", "Work out {0}.")
SIGNS = ("+", "-", "*")


def arithmetic_exchange(draw: Draw) -> tuple[str, str]:
    """(request, answer): one to three problems of one or two digits."""
    problems = [_problem(draw) for _ in range(draw.between(1, 3))]
    request = draw.pick(QUESTIONS).format(" and ".join(problem for problem, _ in problems))
    return request, "\n".join(steps for _, steps in problems)


def _problem(draw: Draw) -> tuple[str, str]:
    sign = draw.pick(SIGNS)
    first, second = draw.between(10, 99), draw.between(2, 9) if sign == "*" else draw.between(10, 99)
    if sign == "-" and second > first:
        first, second = second, first
    text = f"{first} {sign} {second}"
    return text, f"{text}: {worked(first, sign, second)}"


def worked(first: int, sign: str, second: int) -> str:
    """The steps from the last digit on, and the result."""
    tens, ones = divmod(first, 10)
    other_tens, other_ones = divmod(second, 10)
    if sign == "+":
        low = ones + other_ones
        carry, digit = divmod(low, 10)
        high = tens + other_tens + carry
        steps = f"{ones} + {other_ones} = {low}, write {digit}, carry {carry}. "
        steps += f"{tens} + {other_tens} + {carry} = {high}."
        return f"{steps} The answer is {first + second}."
    if sign == "-":
        borrow = int(ones < other_ones)
        low, high = ones + 10 * borrow - other_ones, tens - borrow - other_tens
        steps = f"{ones + 10 * borrow} - {other_ones} = {low}, borrow {borrow}. "
        steps += f"{tens} - {borrow} - {other_tens} = {high}."
        return f"{steps} The answer is {first - second}."
    low = ones * second
    carry, digit = divmod(low, 10)
    steps = f"{ones} * {second} = {low}, write {digit}, carry {carry}. "
    steps += f"{tens} * {second} + {carry} = {tens * second + carry}."
    return f"{steps} The answer is {first * second}."
