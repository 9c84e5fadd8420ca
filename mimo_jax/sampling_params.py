"""How a request wants its tokens chosen and where it stops, in vLLM's vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

from mimo_jax.errors import RequestError, short

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 16
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """Frozen and checked: a value out of its range raises RequestError naming the parameter, the value and the range.

    n               choices a prompt, each with its own random numbers
    max_tokens      tokens generated at most; None: as many as the model's context allows
    min_tokens      before so many tokens neither an end-of-text token nor a stop may end the text
    temperature     0 (or below 1e-5) is greedy, up to 100
    top_p, min_p    over 0 up to 1, and 0 to 1; 1 and 0 are off
    top_k           0 or -1 is off
    seed            the same seed and prompt give the same tokens, whatever else runs; None: drawn by the engine. One
                    seed for a list of prompts means the same random numbers at the same positions of each
    stop            strings that end the text and are not part of it
    stop_token_ids  further ids that end the text
    ignore_eos      the model's own end-of-text ids do not end the text
    logprobs        how many of the most likely tokens to report beside the chosen one, 0 to 20; of the model's own
                    distribution, before temperature and any cut
    prompt_logprobs the same for the tokens of the prompt
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if hasattr(value, "item") and not getattr(value, "shape", None):  # a NumPy number
                object.__setattr__(self, name, value.item())
        _whole("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}", param="min_tokens")
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p=0; more than 0 is needed (1 is off)", param="top_p")
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r}; true or false is needed", param="ignore_eos")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)  # __post_init__ normalised it
        return self.stop


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={short(value)}; a whole number from {low} to {high} is needed", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN as well
        raise RequestError(f"{name}={short(value)}; a finite number, {low:g} to {high:g}, is needed", param=name)


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise RequestError(f"stop={short(stop)}; a string or a list of strings is needed", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in strings:
        if not 0 < len(text) <= MAX_STOP_STRING_CHARACTERS:
            allowed = f"1 to {MAX_STOP_STRING_CHARACTERS} characters"
            raise RequestError(f"stop has a string of {len(text)} characters; {allowed} are allowed", param="stop")
    return tuple(strings)


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    values = () if ids is None else ids
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids={short(ids)}; a list of at most {MAX_STOP_TOKEN_IDS} ids is needed"
        raise RequestError(message, param="stop_token_ids")
    for value in values:
        _whole("stop_token_ids", value, 0, 2**31 - 1)
    return tuple(values)
