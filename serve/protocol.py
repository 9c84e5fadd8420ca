"""What a request may contain. A field that is not here is refused by name, never ignored.

Three kinds of fields: those with an effect; those that clients send by default and that could have none here
(`user`, `metadata`, hints about caching and billing), which are accepted; and those of features that do not
exist yet, which are accepted with the value that means "off" (`only`) and refused with any other. null is the
same as leaving a field out.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mimo_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from serve.errors import ApiError

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_SEQUENCES = 1024  # prompts times n, of one request
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Prompt = str | list[int]
Model = TypeVar("Model", bound=BaseModel)


def only(*values: object) -> AfterValidator:
    """Refuses all but the values that ask for nothing."""

    def check(value: object) -> object:
        if value not in values:
            allowed = " or ".join(json.dumps(one) for one in values)
            raise PydanticCustomError(
                "unsupported",
                "is not supported with this value; leave it out or send {allowed}",
                {"allowed": allowed},
            )
        return value

    return AfterValidator(check)


def _prompts(value: object) -> list[Prompt]:
    """A text, texts, token ids, or lists of token ids: always as a list of prompts. Ids are checked by the
    engine.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds == {int}:
            return [value]
        if kinds == {str} or kinds == {list}:
            return value
    raise PydanticCustomError(
        "prompt",
        "has to be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
    )


def _plain_values(arguments: dict[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        if not isinstance(value, bool | int | float | str):
            raise PydanticCustomError("plain", "{name} has to be true, false, a number or a string", {"name": name})
    return arguments


class Strict(BaseModel):
    """No type is converted into another, and no field goes unnoticed."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        # Ours instead of extra="forbid", which would write an error for each of a million fields.
        unknown = (
            next((name for name in value if name not in cls.model_fields), None) if isinstance(value, dict) else None
        )
        if unknown is not None:
            raise PydanticCustomError("unknown_field", "the field {name} is not known", {"name": unknown})
        return value


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool, only(False)] | None = None


class RequestBody(Strict):
    """The fields that both endpoints share. Ranges are those of `SamplingParams`, which has the last word."""

    model: str
    n: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Extensions, under the names that vLLM gave them.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Any = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    # Without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None

    # Not supported yet.
    presence_penalty: Annotated[float, only(0)] | None = None
    frequency_penalty: Annotated[float, only(0)] | None = None
    repetition_penalty: Annotated[float, only(1)] | None = None
    logit_bias: Annotated[dict[str, Any], only({})] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The fields as parameters; what was left out has the default of `SamplingParams`."""
        names = (
            "n",
            "temperature",
            "top_p",
            "seed",
            "stop",
            "top_k",
            "min_p",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
        )
        given = {name: getattr(self, name) for name in (*names, "prompt_logprobs")}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)


class CompletionBody(RequestBody):
    """POST /v1/completions. `logprobs` counts alternatives: 0 reports the chosen tokens alone."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: int | None = None

    # Not supported yet.
    echo: Annotated[bool, only(False)] | None = None
    suffix: Annotated[str, only("")] | None = None
    best_of: Annotated[int, only(1)] | None = None


class ChatBody(RequestBody):
    """POST /v1/chat/completions. Messages are checked by `mimo_jax.text.normalise_messages`.

    `max_tokens` is the old name of `max_completion_tokens`; without either the answer may fill the context.
    Of `chat_template_kwargs` only plain values pass: switches of the model's own template, never a template.
    """

    messages: list[Any]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_plain_values)] | None = None

    # Without effect.
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    # Not supported yet.
    store: Annotated[bool, only(False)] | None = None
    tools: Annotated[list[Any], only([])] | None = None
    tool_choice: Annotated[Any, only("none", "auto", None)] = None
    functions: Annotated[list[Any], only([])] | None = None
    function_call: Annotated[Any, only("none", "auto", None)] = None
    response_format: Annotated[dict[str, Any], only({"type": "text"})] | None = None
    modalities: Annotated[list[Any], only(["text"])] | None = None


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8, without the constants NaN and Infinity and the halves of characters that Python would
    let pass. Raises ApiError.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):  # an escape; json has joined those that are pairs
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is invalid") from error
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body has a lone surrogate, half of a character") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    return value


def parse_body(kind: type[Model], value: object) -> Model:
    """Checks a decoded body. Raises ApiError that names the first field that is wrong."""
    if not isinstance(value, Mapping):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}; an object is needed")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        if first["type"] == "unknown_field":
            path = ".".join(filter(None, (path, first["ctx"]["name"])))
            raise ApiError(400, f"the field {path!r} is not known", param=path, code="unknown_field") from error
        if first["type"] == "missing":
            raise ApiError(400, f"the field {path!r} is missing", param=path, code="missing_field") from error
        code = "unsupported_value" if first["type"] == "unsupported" else None
        raise ApiError(400, f"{path}: {first['msg']}", param=path, code=code) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
