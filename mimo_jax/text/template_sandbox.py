"""Jinja for chat templates: no access to Python behind the values, and bounds on work and memory.

A template comes with a model and is not trusted. Jinja's sandbox limits what it can reach; here every loop
step, call and output is also held to a deadline, and everything that can make a long text from a short one to
a size.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# These names hold a space, so no template can write them.
_CLOCK = "render clock"
_LOOP_FILTER = "bounded loop"
_TEXT_FILTER = "bounded text"
_WIDTH_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
_MOST_WIDTH = 10_000
_MOST_INTEGER_BITS = 4096
_WIDE_FORMAT = re.compile(r"%[-+ #0-9.]*\*|\d{5,}")


@dataclass(frozen=True)
class RenderLimits:
    """What one rendering may use. The defaults leave room for a prompt of a million tokens."""

    seconds: float = 5.0
    characters: int = 1 << 25


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A rendering ran into a limit."""


class RenderClock:
    """The deadline of one rendering."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {self._seconds:g} s")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check()
            yield item


class GenerationBlock(Extension):
    """`{% generation %}` marks what the model writes, for training code; here it is its plain content."""

    tags = {"generation"}  # noqa: RUF012  (the attribute Jinja asks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for, as transformers defines it, within `limits`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, limits: RenderLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant expressions are not computed while loading, where nothing bounds them
            finalize=self._bounded,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        self._limits = limits
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters.update({name: _narrow(name, self.filters[name]) for name in _WIDTH_FILTERS})
        self.filters["tojson"] = self._to_json
        self.filters["replace"] = self._replace
        self.filters["string"] = lambda value: str(self._bounded(value))
        self.filters["join"] = self._join
        self.filters[_LOOP_FILTER] = _bounded_loop
        self.filters[_TEXT_FILTER] = self._bounded

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Renders within the limits. Raises what the template raises, TemplateLimitError for a limit."""
        clock = RenderClock(self._limits.seconds)
        parts, characters = [], 0
        for part in template.generate({**variables, _CLOCK: clock}):
            clock.check()
            characters += len(part)
            self._check_length(characters)
            parts.append(part)
        return "".join(parts)

    def concat(self, parts: Iterable[str]) -> str:
        """How compiled templates join the output of a macro or a block."""
        parts = list(parts)
        self._check_length(sum(map(len, parts)))
        return "".join(parts)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call a template makes goes through here."""
        __context.parent[_CLOCK].check()
        subject, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(subject, str):
            if any(isinstance(value, int) and value > _MOST_WIDTH for value in (*args, *kwargs.values())):
                raise TemplateLimitError(f"{name} with a width above {_MOST_WIDTH}")
            if name in ("replace", "join", "translate"):
                self._check_length(len(subject) * max((len(a) for a in args if hasattr(a, "__len__")), default=0))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Jinja asks this of every attribute, to make `str.format` safe."""
        subject = getattr(value, "__self__", None)
        if isinstance(subject, str) and value.__name__ in ("format", "format_map"):
            _check_format(subject)
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_INTEGER_BITS:
                raise TemplateLimitError(f"an integer of more than {_MOST_INTEGER_BITS} bits")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(times, int):
                    self._check_length(len(sequence) * times)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja's hook between parsing and compiling: puts the bounds around loops and concatenations."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _through_filter(loop.iter, _LOOP_FILTER)
        for concatenation in template.find_all(nodes.Concat):
            concatenation.nodes = [_through_filter(part, _TEXT_FILTER) for part in concatenation.nodes]
        return template

    def _check_length(self, characters: int) -> None:
        if characters > self._limits.characters:
            raise TemplateLimitError(f"it makes more than {self._limits.characters} characters")

    def _bounded(self, value: Any) -> Any:
        """Returns `value` if writing it out stays within the size limit; one list may be there many times."""
        waiting, characters = [value], 0
        while waiting:
            item = waiting.pop()
            if isinstance(item, dict):
                waiting.extend((*item.keys(), *item.values()))
            elif isinstance(item, list | tuple):
                waiting.extend(item)
            characters += len(item) if isinstance(item, str) else 1
            self._check_length(characters + len(waiting))
        return value

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as it stands: Jinja's own filter escapes for HTML, which no model was trained on."""
        if indent is not None and indent > _MOST_WIDTH:
            raise TemplateLimitError(f"tojson with an indent above {_MOST_WIDTH}")
        return json.dumps(
            self._bounded(value),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        whole = str(self._bounded(text))
        self._check_length(len(whole) * len(new))
        return whole.replace(old, new, count)

    def _join(self, items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        parts = [str(self._bounded(item)) for item in items]
        self._check_length(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)


@jinja2.pass_context
def _bounded_loop(context: Context, items: Any) -> Iterator[Any]:
    clock: RenderClock = context.parent[_CLOCK]
    return clock.each(items)


def _through_filter(expression: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, expression), name, [], [], None, None, lineno=expression.lineno)


def _narrow(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's marks on the function
    def narrow(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and value > _MOST_WIDTH for value in (*args, *kwargs.values())):
            raise TemplateLimitError(f"{name} with a width above {_MOST_WIDTH}")
        return function(*args, **kwargs)

    return narrow


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("a format with a width of five digits or one taken from a value")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
