"""One HTTP request or batch line on its way through the engine: what it asks (`Job`) and what comes back
(`Delta`, `Choice`).
"""

from dataclasses import dataclass, field

from mimo_jax.engine.engine import Engine, Update
from mimo_jax.engine.request import FinishReason, Request, TokenLogprob
from mimo_jax.sampling_params import SamplingParams


@dataclass(frozen=True)
class Prompt:
    """Checked by the engine, on the thread that owns it."""

    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Job:
    """All sequences of one request: a group with one life. Every prompt has params.n choices, numbered
    through.
    """

    job_id: str
    prompts: tuple[Prompt, ...]

    @property
    def sequences(self) -> int:
        return sum(prompt.params.n for prompt in self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


@dataclass(frozen=True)
class Delta:
    """What one step brought for one sequence; the last one has a finish reason. `prompt_logprobs` come with
    the first.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class Choice:
    """A sequence put together from its deltas."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def queue_job(engine: Engine, job: Job) -> list[Request]:
    """Queues all sequences of a job, in order of their index, or raises (RequestError for a bad request) and
    queues none.
    """
    parents = [
        engine.make_request(f"{job.job_id}-{place}", prompt.token_ids, prompt.params)
        for place, prompt in enumerate(job.prompts)
    ]
    requests = [choice for parent in parents for choice in engine.choices(parent)]
    for place, request in enumerate(requests):
        try:
            engine.add(request)
        except BaseException:
            abort_all(engine, requests[:place])
            raise
    return requests


def abort_all(engine: Engine, requests: list[Request]) -> None:
    """Ends what still runs of a job."""
    for request in requests:
        engine.abort(request.request_id)


def make_delta(update: Update, index: int) -> Delta:
    """A copy of what is new, so that another thread may read it while the request goes on."""
    request, count = update.request, len(update.token_ids)
    is_first = len(request.output) == count
    return Delta(
        index=index,
        token_ids=update.token_ids,
        text=update.text,
        logprobs=tuple(request.logprobs[-count:]) if request.params.logprobs is not None else (),
        prompt_logprobs=tuple(request.prompt_logprobs)
        if is_first and request.params.prompt_logprobs is not None
        else None,
        finish_reason=request.finish_reason if update.finished else None,
        stop_reason=request.stop_reason if update.finished else None,
    )
