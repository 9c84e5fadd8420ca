"""What both endpoints share: from a body to a `Call`, and from deltas to the JSON around the choices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mimo_jax.engine.request import TokenLogprob
from mimo_jax.outputs import logprob_dict
from mimo_jax.sampling_params import SamplingParams
from mimo_jax.text import Tokenizer
from serve.errors import ApiError
from serve.jobs import Choice, Delta, Job, Prompt
from serve.protocol import MAX_SEQUENCES, RequestBody

_LOWEST_LOGPROB = -9999.0  # OpenAI's number for "impossible"; JSON has no minus infinity

Json = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """What a body is read against. `served_model` None accepts any name (a batch runs one model whatever it
    is called).
    """

    tokenizer: Tokenizer | None
    served_model: str | None
    unique: str  # part of the answer's id
    created: int


class Reply(Protocol):
    """One endpoint's way to write choices. Made for one request, because streamed offsets depend on what was
    sent before.
    """

    @property
    def object_name(self) -> str: ...

    @property
    def chunk_name(self) -> str: ...

    def choice(self, choice: Choice) -> Json:
        """A finished choice."""

    def opening(self, index: int) -> Json | None:
        """What comes before a choice's first piece."""

    def piece(self, delta: Delta) -> Json:
        """New text, without a finish reason."""

    def ending(self, delta: Delta) -> Json:
        """The finish reason, without text."""


@dataclass(frozen=True)
class Call:
    """A request that was read and is ready to run."""

    job: Job
    reply: Reply
    model: str
    created: int
    stream: bool
    include_usage: bool

    def response(self, choices: Sequence[Choice]) -> Json:
        """The whole answer."""
        usage = self.usage(sum(len(choice.token_ids) for choice in choices))
        return self._envelope(self.reply.object_name, [self.reply.choice(choice) for choice in choices]) | {
            "usage": usage
        }

    def chunk(self, choice: Json) -> Json:
        """One event of a stream. `usage` is there, and null, only in streams that end with a usage."""
        return self._envelope(self.reply.chunk_name, [choice]) | ({"usage": None} if self.include_usage else {})

    def usage_chunk(self, completion_tokens: int) -> Json:
        return self._envelope(self.reply.chunk_name, []) | {"usage": self.usage(completion_tokens)}

    def usage(self, completion_tokens: int) -> Json:
        prompt = self.job.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
        }

    def _envelope(self, name: str, choices: list[Json]) -> Json:
        return {
            "id": self.job.job_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def check_model(name: str, served_model: str | None) -> None:
    """Compares names; nothing is looked up anywhere."""
    if served_model is not None and name != served_model:
        message = f"the model {name[:100]!r} does not exist; this server has {served_model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def make_call(
    body: RequestBody,
    prompts: Iterable[list[int]],
    params: SamplingParams,
    reply: Reply,
    job_id: str,
    created: int,
) -> Call:
    """Joins the parts. Raises ApiError for what no single field shows."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options need stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs are not streamed; leave out stream", param="prompt_logprobs")
    job = Job(job_id, tuple(Prompt(ids, params) for ids in prompts))
    if job.sequences > MAX_SEQUENCES:
        asked = f"{len(job.prompts)} prompts with n={params.n} are {job.sequences} sequences"
        raise ApiError(400, f"{asked}; {MAX_SEQUENCES} are possible", param="n")
    return Call(job, reply, body.model, created, stream=bool(body.stream), include_usage=body.include_usage)


def token_label(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token as a string: its text; its bytes if they are a part of a character; its id if there is no
    tokenizer.
    """
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def json_logprob(value: float) -> float:
    """JSON knows neither -inf nor NaN."""
    return value if value >= _LOWEST_LOGPROB else _LOWEST_LOGPROB


def prompt_logprobs_json(entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None) -> list[Json | None]:
    """vLLM's form: null for the first token, which nothing predicts, then {"id": {"logprob", "rank",
    "decoded_token"}}.
    """
    result: list[Json | None] = [None]
    for entry in entries:
        found = logprob_dict(entry, tokenizer)
        result.append(
            {
                str(id_): {
                    "logprob": json_logprob(one.logprob),
                    "rank": one.rank,
                    "decoded_token": one.decoded_token,
                }
                for id_, one in found.items()
            }
        )
    return result


def extras(choice: Choice, *, return_token_ids: bool, tokenizer: Tokenizer | None) -> Json:
    """Extensions that a finished choice has only if they were asked for."""
    result: Json = {"token_ids": choice.token_ids} if return_token_ids else {}
    if choice.prompt_logprobs is not None:
        result["prompt_logprobs"] = prompt_logprobs_json(choice.prompt_logprobs, tokenizer)
    return result
