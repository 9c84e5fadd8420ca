"""Requests for small Python functions, and the functions."""

from benchmarks.mimo_tiny.draw import Draw

ARGUMENTS = ("numbers", "values", "items", "data", "scores")
# condition in words -> (part of a name, Python test of `item`); N is replaced by a number
CONDITIONS = {
    "even": ("even", "item % 2 == 0"),
    "odd": ("odd", "item % 2 == 1"),
    "positive": ("positive", "item > 0"),
    "negative": ("negative", "item < 0"),
    "larger than N": ("above_N", "item > N"),
    "smaller than N": ("below_N", "item < N"),
    "divisible by N": ("by_N", "item % N == 0"),
}
# verb -> (what it returns in words, start value, what happens to each item)
REDUCTIONS = {
    "sum": ("the sum of the {0}", "0", "total += item"),
    "count": ("how many {0} there are", "0", "total += 1"),
    "multiply": ("the product of the {0}", "1", "total *= item"),
    "collect": ("a list of the {0}", "[]", "total.append(item)"),
}
# name -> (what it does in words, expression of x)
MAPPINGS = {
    "add": ("adds N to each item of {0}", "item + N"),
    "scale": ("multiplies each item of {0} by N", "item * N"),
    "subtract": ("subtracts N from each item of {0}", "item - N"),
    "power": ("raises each item of {0} to the power of N", "item ** N"),
}
# name -> (arguments, what it returns in words, expression)
FORMULAS = {
    "rectangle_area": ("width, height", "the area of a rectangle", "width * height"),
    "rectangle_border": ("width, height", "the perimeter of a rectangle", "2 * (width + height)"),
    "square_area": ("side", "the area of a square", "side * side"),
    "triangle_area": ("base, height", "the area of a triangle", "base * height / 2"),
    "mean_of_two": ("first, second", "the mean of two numbers", "(first + second) / 2"),
    "to_fahrenheit": ("celsius", "a temperature in Fahrenheit", "celsius * 9 / 5 + 32"),
    "to_celsius": ("fahrenheit", "a temperature in Celsius", "(fahrenheit - 32) * 5 / 9"),
    "is_even": ("number", "whether a number is even", "number % 2 == 0"),
    "reverse_text": ("text", "a text in reverse order", "text[::-1]"),
    "count_words": ("text", "how many words a text has", "len(text.split())"),
    "first_letter": ("text", "the first letter of a text", "text[0]"),
    "hours_to_minutes": ("hours", "how many minutes some hours have", "hours * 60"),
}


def function_exchange(draw: Draw) -> tuple[str, str]:
    """(request, answer). The answer is one function in a fenced block."""
    kind = draw.below(5)
    if kind < 3:
        return _reduction(draw)
    return _mapping(draw) if kind == 3 else _formula(draw)


def _reduction(draw: Draw) -> tuple[str, str]:
    verb, words = draw.pick(tuple(REDUCTIONS)), draw.pick(tuple(CONDITIONS))
    returns, start, update = REDUCTIONS[verb]
    number, argument = str(draw.between(2, 99)), draw.pick(ARGUMENTS)
    part, test = (text.replace("N", number) for text in CONDITIONS[words])
    meant = f"numbers {words.replace('N', number)}" if " " in words else f"{words} numbers"
    name = f"{verb}_{part}"
    body = (
        f"    total = {start}\n    for item in {argument}:\n        if {test}:\n            {update}\n    return total"
    )
    return _exchange(draw, name, argument, f"returns {returns.format(meant)} in {argument}", body)


def _mapping(draw: Draw) -> tuple[str, str]:
    verb = draw.pick(tuple(MAPPINGS))
    number, argument = str(draw.between(2, 99)), draw.pick(ARGUMENTS)
    does, expression = (text.replace("N", number) for text in MAPPINGS[verb])
    body = f"    result = []\n    for item in {argument}:\n        result.append({expression})\n    return result"
    return _exchange(draw, f"{verb}_{number}", argument, does.format(argument), body)


def _formula(draw: Draw) -> tuple[str, str]:
    name = draw.pick(tuple(FORMULAS))
    arguments, returns, expression = FORMULAS[name]
    return _exchange(draw, name, arguments, f"returns {returns}", f"    return {expression}")


def _exchange(draw: Draw, name: str, arguments: str, does: str, body: str) -> tuple[str, str]:
    opening = draw.pick(("Write a Python function", "Give me a Python function"))
    request = f"{opening} {name}({arguments}) that {does}."
    code = f'def {name}({arguments}):\n    """{does[0].upper()}{does[1:]}."""\n{body}'
    return request, f"```python\n{code}\n```"
