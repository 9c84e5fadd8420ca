"""Requests for JSON, and the JSON that was asked for."""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.mimo_tiny.draw import Draw
from benchmarks.mimo_tiny.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    FIRST_NAMES,
    LANGUAGES,
    LAST_NAMES,
    PRODUCTS,
    TOPICS,
    listed,
)

Make = Callable[[Draw], Any]


def _person(draw: Draw) -> str:
    return f"{draw.pick(FIRST_NAMES)} {draw.pick(LAST_NAMES)}"


# What a record is about -> its fields and how a value is drawn
RECORDS: dict[str, dict[str, Make]] = {
    "person": {
        "name": _person,
        "age": lambda draw: draw.between(18, 79),
        "city": lambda draw: draw.pick(CITIES),
        "languages": lambda draw: draw.some(LANGUAGES, draw.between(1, 3)),
        "married": lambda draw: draw.chance(0.5),
    },
    "product": {
        "name": lambda draw: draw.pick(PRODUCTS),
        "price": lambda draw: draw.between(2, 99) + 0.5 * draw.below(2),
        "colour": lambda draw: draw.pick(COLOURS),
        "stock": lambda draw: draw.between(1, 400),
        "available": lambda draw: draw.chance(0.5),
    },
    "book": {
        "title": lambda draw: f"The {draw.pick(TOPICS)} of {draw.pick(CITIES)}",
        "author": _person,
        "year": lambda draw: draw.between(1950, 2024),
        "pages": lambda draw: draw.between(90, 600),
        "topics": lambda draw: draw.some(TOPICS, draw.between(1, 3)),
    },
    "trip": {
        "start": lambda draw: draw.pick(CITIES),
        "end": lambda draw: draw.pick(CITIES),
        "days": lambda draw: draw.between(2, 21),
        "travellers": lambda draw: draw.some(FIRST_NAMES, draw.between(1, 3)),
        "booked": lambda draw: draw.chance(0.5),
    },
    "pet": {
        "name": lambda draw: draw.pick(FIRST_NAMES),
        "animal": lambda draw: draw.pick(ANIMALS),
        "age": lambda draw: draw.between(1, 15),
        "owner": _person,
        "colour": lambda draw: draw.pick(COLOURS),
    },
}
PLURALS = {"person": "persons", "product": "products", "book": "books", "trip": "trips", "pet": "pets"}
REQUESTS = ("Write a JSON record for a {0}", "Give me a JSON object for a {0}", "Make a JSON record of a {0}")
LIST_REQUESTS = ("Write a JSON array of {1} {0}", "Give me a JSON array of {1} {0}")


def json_exchange(draw: Draw) -> tuple[str, str]:
    """(request, answer). The answer is one JSON object or array with the fields of the request, in their order."""
    about = draw.pick(tuple(RECORDS))
    makers = RECORDS[about]
    fields = draw.some(tuple(makers), draw.between(3, len(makers)))
    if draw.chance(0.2):
        return _open_request(draw, about, fields)
    if draw.chance(0.25):
        return _list_request(draw, about, fields[:2])
    record = {field: makers[field](draw) for field in fields}
    request = f"{draw.pick(REQUESTS).format(about)}: {_spoken(record)}."
    return request, json.dumps(record, indent=2)


def _list_request(draw: Draw, about: str, fields: list[str]) -> tuple[str, str]:
    makers = RECORDS[about]
    records = [{field: makers[field](draw) for field in fields} for _ in range(draw.between(2, 4))]
    spoken = "; ".join(_spoken(record) for record in records)
    request = f"{draw.pick(LIST_REQUESTS).format(PLURALS[about], len(records))}: {spoken}."
    return request, json.dumps(records, indent=2)


def _open_request(draw: Draw, about: str, fields: list[str]) -> tuple[str, str]:
    """Without values. Those of the answer come from a skewed choice, so that one answer is the likeliest."""
    examples = [{field: RECORDS[about][field](Draw(example)) for field in fields} for example in range(4)]
    record = {field: draw.skewed(examples)[field] for field in fields}
    request = f"{draw.pick(REQUESTS).format(about)} with the fields {listed(fields)}."
    return request, json.dumps(record, indent=2)


def _spoken(record: dict[str, Any]) -> str:
    return ", ".join(f"{field} {_value(value)}" for field, value in record.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return listed(value) if isinstance(value, list) else str(value)
