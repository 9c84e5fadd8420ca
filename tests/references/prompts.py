"""The fixed texts of the llama.cpp references. All are written for this project or generated here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """`tokens` cuts the tokenised text to that many ids; None keeps all of them."""

    name: str
    text: str
    tokens: int | None = None


def smollm2_prompts() -> tuple[Prompt, ...]:
    return (
        Prompt("chat", chat(("user", "What is the capital of France?"))),
        Prompt("chat_turns", chat(*TURNS)),
        Prompt("code", CODE),
        Prompt("languages", LANGUAGES),
        Prompt("sequence", "1, 2, 3, 5, 8, 13, 21,"),
        Prompt("one_token", "The", 1),
        Prompt("story_300", harbour_log(30, seed=11), 300),
    )


def gemma3_prompts() -> tuple[Prompt, ...]:
    """The window is 512, and losing sight of the first token moves this model's output most.

    So the edge prompts show a window that is off by one: with 511 the last token of `edge_512` has lost it,
    with 513 that of `edge_513` still sees it. `story_500` is decoded across the edge; two start far past it.
    """
    return (
        Prompt("months", "The months of the year are January,"),
        Prompt("colours", "The three primary colours of paint are"),
        Prompt("languages", LANGUAGES),
        Prompt("code", CODE),
        Prompt("story_500", harbour_log(60, seed=12), 500),
        Prompt("edge_512", harbour_log(60, seed=16), 512),
        Prompt("edge_513", harbour_log(60, seed=16), 513),
        Prompt("story_720", harbour_log(80, seed=17), 720),
        Prompt("story_960", harbour_log(100, seed=14), 960),
    )


TURNS = (
    ("system", "You answer in one short sentence."),
    ("user", "Name a colour of the sea."),
    ("assistant", "The sea is often blue."),
    ("user", "And of the sky at dusk?"),
)

CODE = '''def moving_average(values, width):
    """Mean of the last `width` values, one for each position."""
    total, averages = 0.0, []
    for place, value in enumerate(values):
        total += value
        if place >= width:
            total -= values[place - width]
'''

LANGUAGES = """English: The ship leaves at seven.
Français : Le bateau part à sept heures.
Deutsch: Das Schiff fährt um sieben.
Русский: Корабль отходит в семь.
中文: 船七点出发。
日本語: 船は七時に出ます。
🚢 7️⃣
Español:"""


def chat(*turns: tuple[str, str]) -> str:
    """ChatML, left open for the assistant."""
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return said + "<|im_start|>assistant\n"


def harbour_log(days: int, seed: int) -> str:
    """A diary with a repeated form and drawn contents, so that far days help to predict near ones."""
    draw = np.random.default_rng(seed)
    ships = ("Petrel", "Marigold", "Northern Star", "Old Anna", "Quiet Tide", "Swallow")
    goods = ("salt", "timber", "lamp oil", "wool", "oranges", "rope", "copper wire")
    winds = ("a light wind from the west", "fog until noon", "a gale", "clear skies", "rain in the evening")
    notes = (
        "The keeper wrote two letters.",
        "Nobody came to the office.",
        "A child asked how far the light can be seen.",
        "The bell was mended at last.",
        "We counted the crates twice.",
    )
    lines = ["Log of the harbour office."]
    for day in range(1, days + 1):
        ship, load, wind, note = (str(draw.choice(words)) for words in (ships, goods, winds, notes))
        crates = int(draw.integers(3, 90))
        lines.append(f"Day {day}: {wind}. The {ship} brought {crates} crates of {load}. {note}")
    return "\n".join(lines)
