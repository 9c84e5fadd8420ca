"""What the offline API returns, in vLLM's vocabulary."""

from dataclasses import dataclass

from mimo_jax.engine.request import Request, TokenLogprob
from mimo_jax.text import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """`rank` 1 is the most likely token; `decoded_token` is None for a model without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. `logprobs` has an entry per token: token id -> Logprob, of the token itself and its alternatives."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its choices. `prompt_logprobs` starts with None: nothing predicts the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True


def completion(request: Request, text: str, tokenizer: Tokenizer | None) -> CompletionOutput:
    """The finished choice that a request has become."""
    assert request.finish_reason is not None
    wants = request.params.logprobs is not None
    return CompletionOutput(
        index=request.choice,
        text=text,
        token_ids=list(request.output),
        cumulative_logprob=sum(entry.logprob for entry in request.logprobs) if wants else None,
        logprobs=[logprob_dict(entry, tokenizer) for entry in request.logprobs] if wants else None,
        finish_reason=request.finish_reason.value,
        stop_reason=request.stop_reason,
    )


def prompt_logprobs(request: Request, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    return [None, *(logprob_dict(entry, tokenizer) for entry in request.prompt_logprobs)]


def logprob_dict(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Alternatives in order of likelihood, then the token itself if it is not among them."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    found = {id_: Logprob(value, rank, text(id_)) for rank, (id_, value) in enumerate(entry.top, start=1)}
    return found | {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
