"""The tools of the dialogues: what is asked of each, how it is called, what it returns and what is said then."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.mimo_tiny.draw import Draw
from benchmarks.mimo_tiny.words import CITIES, CURRENCIES, DAYS, FIRST_NAMES, PRODUCTS, SKIES, TOPICS

Values = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """`request` and `reply` are formats over the arguments, the reply also over what `returns` drew."""

    name: str
    description: str
    parameters: dict[str, tuple[str, str]]  # name -> (JSON type, description)
    draw_arguments: Callable[[Draw], Values]
    draw_result: Callable[[Draw], Values]
    requests: tuple[str, ...]
    reply: str

    def schema(self) -> dict[str, Any]:
        """The tool as a request's `tools` holds it."""
        properties = {key: {"type": kind, "description": text} for key, (kind, text) in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


TOOLS = (
    Tool(
        "get_weather",
        "The weather in a city.",
        {"city": ("string", "Name of the city")},
        lambda draw: {"city": draw.pick(CITIES)},
        lambda draw: {"temperature": draw.between(2, 35), "sky": draw.pick(SKIES)},
        ("What is the weather in {city}?", "How is the weather in {city} today?"),
        "It is {sky} in {city}, with a temperature of {temperature} degrees.",
    ),
    Tool(
        "get_time",
        "The time in a city.",
        {"city": ("string", "Name of the city")},
        lambda draw: {"city": draw.pick(CITIES)},
        lambda draw: {"hour": draw.between(0, 23), "minute": draw.between(10, 59)},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        "It is {hour}:{minute} in {city} now.",
    ),
    Tool(
        "convert_currency",
        "Converts an amount of money.",
        {
            "amount": ("integer", "Amount of money"),
            "source": ("string", "Currency of the amount"),
            "target": ("string", "Currency to convert to"),
        },
        lambda draw: (
            {"amount": draw.between(2, 900)} | dict(zip(("source", "target"), draw.some(CURRENCIES, 2), strict=True))
        ),
        lambda draw: {"result": draw.between(2, 900)},
        ("How much are {amount} {source} in {target}?", "Convert {amount} {source} to {target}."),
        "{amount} {source} are {result} {target}.",
    ),
    Tool(
        "set_timer",
        "Starts a timer.",
        {"minutes": ("integer", "Length in minutes"), "label": ("string", "What the timer is for")},
        lambda draw: {"minutes": draw.between(2, 90), "label": draw.pick(("tea", "pizza", "laundry", "rice", "nap"))},
        lambda draw: {"timer": draw.between(1, 9)},
        ("Set a timer of {minutes} minutes for the {label}.", "Start a timer for the {label}, {minutes} minutes."),
        "Timer {timer} for the {label} is running. It ends in {minutes} minutes.",
    ),
    Tool(
        "send_message",
        "Sends a message to a person.",
        {"person": ("string", "Who gets the message"), "text": ("string", "The message")},
        lambda draw: {
            "person": draw.pick(FIRST_NAMES),
            "text": f"{draw.pick(('The meeting is on', 'Dinner is on', 'The train leaves on'))} {draw.pick(DAYS)}",
        },
        lambda draw: {"sent": draw.pick(("true", "false"))},
        ("Send {person} the message: {text}", "Write to {person}: {text}"),
        "",
    ),
    Tool(
        "search_library",
        "Looks for books about a topic.",
        {"topic": ("string", "What the books are about"), "limit": ("integer", "How many books at most")},
        lambda draw: {"topic": draw.pick(TOPICS), "limit": draw.between(2, 20)},
        lambda draw: {"found": draw.between(1, 20), "shelf": draw.between(10, 99)},
        ("Find up to {limit} books about {topic}.", "Are there books about {topic}? At most {limit} please."),
        "There are {found} books about {topic}. They are on shelf {shelf}.",
    ),
    Tool(
        "check_stock",
        "How many pieces of a product a shop has.",
        {"product": ("string", "Name of the product"), "city": ("string", "City of the shop")},
        lambda draw: {"product": draw.pick(PRODUCTS), "city": draw.pick(CITIES)},
        lambda draw: {"pieces": draw.between(2, 400), "price": draw.between(2, 99)},
        ("Does the shop in {city} have a {product}?", "Check the stock of the {product} in {city}."),
        "Yes, the shop in {city} has {pieces} pieces of the {product}. One costs {price} EUR.",
    ),
    Tool(
        "create_event",
        "Adds an event to the calendar.",
        {
            "title": ("string", "Title of the event"),
            "day": ("string", "Day of the week"),
            "hour": ("integer", "Hour of the day"),
        },
        lambda draw: {
            "title": draw.pick(("Coffee with ", "Lunch with ", "Meeting with ")) + draw.pick(FIRST_NAMES),
            "day": draw.pick(DAYS),
            "hour": draw.between(8, 20),
        },
        lambda draw: {"event": draw.between(10, 99)},
        ("Put {title} into my calendar on {day} at {hour}.", "Plan {title} for {day} at {hour} o'clock."),
        "{title} is in your calendar as event {event}, on {day} at {hour} o'clock.",
    ),
)


def reply(tool: Tool, arguments: Values, result: Values) -> str:
    """What the assistant says behind a call."""
    if tool.name == "send_message":
        sent = result["sent"] == "true"
        return f"{arguments['person']} has your message." if sent else f"I could not reach {arguments['person']}."
    return tool.reply.format(**arguments, **result)
