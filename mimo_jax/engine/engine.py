"""The loop: plan, build, step, commit. The one stateful object around the pure functions."""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import jax
import numpy as np

from mimo_jax.engine.batch import build
from mimo_jax.engine.buckets import Ladder
from mimo_jax.engine.pages import PagePool
from mimo_jax.engine.request import FinishReason, Request, TokenLogprob
from mimo_jax.engine.scheduler import Limits, Row, Scheduler, StepPlan
from mimo_jax.engine.speculation import Speculation
from mimo_jax.errors import RequestError
from mimo_jax.params import Params
from mimo_jax.sampling import BANNED, Sampled
from mimo_jax.sampling_params import SamplingParams
from mimo_jax.steps import Bucket, StepOutputs, Steps
from mimo_jax.text import Detokenizer, TextStream, Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What one step brought for one request. `text` is the new text that is certain; the last update has `finished`."""

    request: Request
    token_ids: tuple[int, ...]
    text: str
    finished: bool


class Engine:
    """Runs requests on one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        params: Params,
        steps: Steps,
        limits: Limits,
        ladder: Ladder,
        *,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> None:
        self.params = params
        self.steps = steps
        self.limits = limits
        self.ladder = ladder
        self.tokenizer = tokenizer
        self.scheduler = self._new_scheduler()
        self.speculation = Speculation(limits.drafts)
        self._cache = steps.init_cache()
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, TextStream] = {}
        self.seed = seed
        self._random = random.Random(seed)

    @property
    def unfinished(self) -> int:
        return self.scheduler.unfinished

    def make_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Checks one prompt and its parameters and resolves what depends on the model; queues nothing.

        Raises RequestError naming what is wrong, got and allowed.
        """
        most = self.limits.room(len(prompt), params.max_tokens)
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < self.steps.vocab:
                message = f"the prompt has token id {str(token)[:40]}; 0 to {self.steps.vocab - 1} are possible"
                raise RequestError(message, param="prompt")
        max_tokens = self._most_tokens(len(prompt), most) if params.max_tokens is None else params.max_tokens
        if params.min_tokens > max_tokens:
            message = (
                f"min_tokens={params.min_tokens}; behind a prompt of {len(prompt)} tokens at most {max_tokens} fit"
            )
            raise RequestError(message, param="min_tokens")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
        request = Request(
            request_id=request_id,
            prompt=tuple(int(token) for token in prompt),
            params=params,
            seed=self._random.getrandbits(32) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            stop_ids=self._stop_ids(params),
        )
        self.scheduler.check_fits(request)
        return request

    def choices(self, request: Request) -> list[Request]:
        """The n requests of one prompt: the same but for the choice, which the random numbers depend on."""
        return [
            replace(
                request,
                request_id=f"{request.request_id}-{choice}",
                choice=choice,
                # Lists of its own: replace() would share them between the choices.
                output=[],
                logprobs=[],
                prompt_logprobs=[],
                full_pages=[],
                window_pages=[],
            )
            for choice in range(request.params.n)
        ]

    def add(self, request: Request) -> None:
        """Queues a request made by `make_request`."""
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is running already", param="request_id")
        self.scheduler.add(request)
        self._requests[request.request_id] = request
        if self.tokenizer is not None:
            self._streams[request.request_id] = TextStream(Detokenizer(self.tokenizer), request.params.stop_strings)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages; unknown and finished ones are ignored."""
        if request_id in self._requests:
            self._forget(self._requests[request_id], FinishReason.ABORT)

    def step(self) -> list[Update]:
        """One iteration: at most one decode and one prefill call on the device. Empty when nothing is to be done.

        A decode call verifies the drafts of the step before, so that a row may bring several tokens.

        If the device fails or the user interrupts, every request ends with ERROR, the cache is made anew (the step has
        used up the old one), and the exception goes on.
        """
        try:
            return [update for plan in self.scheduler.plan(self._drafts_for) for update in self._run(plan)]
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Ends all requests with ERROR and starts over with an empty cache."""
        for request in list(self._requests.values()):
            request.finish_reason = FinishReason.ERROR
        self._requests.clear()
        self._streams.clear()
        self.scheduler = self._new_scheduler()
        self._cache = self.steps.init_cache()

    def warm_up(
        self,
        seqs: int,
        prompt_tokens: int,
        total_tokens: int,
        *,
        alone: bool = False,
        scoring: bool,
        progress: bool,
    ) -> None:
        """Compiles every shape that so many requests at once, of such sizes at most, can meet.

        `alone`: there is one request, of exactly this prompt length.
        """
        shapes = self.ladder.reachable(self.limits, seqs, prompt_tokens, total_tokens, alone=alone)
        self.steps.warm_up([Bucket(*shape) for shape in shapes], scoring=scoring, progress=progress)

    def _new_scheduler(self) -> Scheduler:
        sizes = self.steps.sizes
        return Scheduler(self.limits, PagePool(sizes.full_pages), PagePool(sizes.window_pages))

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.stop_token_ids
        ids = frozenset((*own, *(params.stop_token_ids or ())))
        if len(ids) > BANNED:
            raise RequestError(f"{len(ids)} stop ids; at most {BANNED} are possible", param="stop_token_ids")
        return ids

    def room(self, prompt_tokens: int) -> int:
        """Tokens that can follow a prompt of so many. Raises RequestError when none can."""
        return self._most_tokens(prompt_tokens, self.limits.room(prompt_tokens, None))

    def _most_tokens(self, prompt_tokens: int, most: int) -> int:
        """What max_tokens=None means: the rest of the context, as far as the full pool could ever hold it."""
        if not self.limits.has_full:
            return most
        room = self.scheduler.full.total * self.limits.full_page_tokens + 1 - prompt_tokens
        return max(1, min(most, room))

    def _drafts_for(self, rows: int) -> int:
        """How many drafts a decode step of so many rows should verify."""
        pages = max(len(request.full_pages) for request in self.scheduler.running)
        plain = Bucket(*self.ladder.decode(rows, pages))
        # A plain step may still be compiling behind the first tokens of a request.
        return self.speculation.drafts_for(plain.seqs) if self.steps.ready(plain) else self.limits.drafts

    def _run(self, plan: StepPlan) -> list[Update]:
        rows = plan.rows
        pages = max(len(row.request.full_pages) for row in rows)
        if plan.decode:
            bucket = Bucket(*self.ladder.decode(len(rows), pages, drafts=any(row.drafts for row in rows)))
        else:
            bucket = Bucket(*self.ladder.chunk(len(rows), max(row.count for row in rows), pages))
        inputs, sampling = build(rows, self.steps.input_shapes(bucket), self.steps.vocab)
        began = time.perf_counter()
        outputs, self._cache = self.steps.run(bucket, self.params, self._cache, inputs, sampling)
        sampled, accepted, drafts = jax.device_get((outputs.sampled, outputs.accepted, outputs.drafts))
        if plan.decode:
            verified = [(row.drafts, int(accepted[index])) for index, row in enumerate(rows)]
            self.speculation.record(bucket.seqs, time.perf_counter() - began, verified)
        self._score_prompts(rows, outputs, accepted)
        updates = []
        for index, row in enumerate(rows):
            self.scheduler.advance(row, int(accepted[index]))
            if row.samples:
                row.request.drafts = tuple(drafts[index].tolist())
                updates.append(self._commit(row.request, jax.tree.map(itemgetter(index), sampled), accepted[index]))
        return updates

    def _commit(self, request: Request, sampled: Sampled, accepted: int) -> Update:
        """Takes the accepted tokens and the one behind them, up to whatever ends the request. sampled [places]."""
        texts, tokens = [], []
        for place in range(1 + accepted):
            token = int(sampled.token[place])
            tokens.append(token)
            if request.params.logprobs is not None:
                request.logprobs.append(token_logprob(sampled, place, request.params.logprobs))
            text, reason = self._take(request, token)
            texts.append(text)
            if reason is not None:
                self._forget(request, reason)
                break
        return Update(request, tuple(tokens), "".join(texts), finished=request.finished)

    def _take(self, request: Request, token: int) -> tuple[str, FinishReason | None]:
        """One token: its new text, and what it ends the request with: stop id, stop string, length, in this order."""
        may_stop = len(request.output) >= request.params.min_tokens
        request.output.append(token)
        stream = self._streams.get(request.request_id)
        text, reason = "", None
        if token in request.stop_ids and may_stop:
            reason = FinishReason.STOP
            request.stop_reason = token if token in (request.params.stop_token_ids or ()) else None
        elif stream is not None:
            text, matched = stream.add([token], check_stop=may_stop)
            if matched is not None:
                reason, request.stop_reason = FinishReason.STOP, matched
        if reason is None and len(request.output) >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None and stream is not None and not isinstance(request.stop_reason, str):
            text += stream.finish()
        return text, reason

    def _forget(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self._requests.pop(request.request_id, None)
        self._streams.pop(request.request_id, None)

    def _score_prompts(self, rows: tuple[Row, ...], outputs: StepOutputs, accepted: np.ndarray) -> None:
        """Prompt log-probabilities and scores, from the hidden states of prompt chunks."""
        hidden = None
        for index, row in enumerate(rows):
            request = row.request
            targets = request.prompt[row.start + 1 : row.start + 1 + row.count]
            wants_logprobs = request.params.prompt_logprobs is not None and targets
            if not wants_logprobs and request.on_hidden is None:
                continue
            hidden = jax.device_get(outputs.hidden) if hidden is None else hidden
            if request.on_hidden is not None:
                request.on_hidden(hidden[index, : row.count - row.drafts + int(accepted[index])])
            if wants_logprobs:
                scored = self.steps.score(self.params, hidden[index, : len(targets)], np.asarray(targets, np.int32))
                wanted = request.params.prompt_logprobs or 0
                request.prompt_logprobs += [token_logprob(scored, place, wanted) for place in range(len(targets))]


def token_logprob(sampled: Sampled, index: int, alternatives: int) -> TokenLogprob:
    """Row `index` of sampled arrays as plain numbers, with the wanted number of alternatives."""
    ids, values = sampled.top_ids[index, :alternatives], sampled.top_logprobs[index, :alternatives]
    return TokenLogprob(
        token_id=int(sampled.token[index]),
        logprob=float(sampled.logprob[index]),
        rank=int(sampled.rank[index]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )
