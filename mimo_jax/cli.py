"""The `mimo-jax` command: generate, chat, batch, serve, inspect, convert."""

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mimo_jax.convert import convert_model
from mimo_jax.engine.scheduler import Limits
from mimo_jax.engine.setup import EngineOptions, Load, load_engine
from mimo_jax.errors import CheckpointError, RequestError
from mimo_jax.families.mimo_v2_published import PUBLISHED
from mimo_jax.inspect import as_text, inspect_model
from mimo_jax.llm import LLM
from mimo_jax.models import BUILT_IN
from mimo_jax.outputs import RequestOutput
from mimo_jax.sampling_params import SamplingParams
from mimo_jax.text import Tokenizer

_QUANTIZATION = "int8, int8-g128 or dequantize; weights stay as stored by default"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 1 for what the user can mend, said on one line of stderr."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    try:
        code: int = options.run(options)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, RequestError, ValueError, OSError) as error:
        print(f"mimo-jax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _generate(options: argparse.Namespace) -> int:
    params = _sampling(options)  # first: a bad value should not cost the loading of a model
    llm = _one_sequence(options, lambda tokenizer: _encode(tokenizer, options))
    prompt = {"prompt_token_ids": _encode(llm.tokenizer, options)}
    if options.json:
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        print(json.dumps(_as_json(output, options.prompt), ensure_ascii=False))
        return 0
    for update in llm.stream(prompt, params):
        text = update.text if llm.tokenizer is not None else "".join(f"{token} " for token in update.token_ids)
        print(text, end="", flush=True)
    print()
    _report_drafts(llm)
    return 0


def _report_drafts(llm: LLM) -> None:
    metrics = llm.draft_metrics
    if metrics.steps:
        length = f"{metrics.mean_accepted_length:.2f} tokens a step"
        print(f"draft heads: {metrics.accepted} of {metrics.drafts} drafts stood, {length}", file=sys.stderr)


def _chat(options: argparse.Namespace) -> int:
    params = _sampling(options)
    llm = LLM(**_engine_arguments(options), progress=_on_terminal(sys.stderr))
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise CheckpointError(f"{options.model}: it has no chat template; use `mimo-jax generate`")
    messages = [{"role": "system", "content": options.system}] if options.system else []
    interactive = _on_terminal(sys.stdin)
    if interactive:
        print("Type a message; an empty line or Ctrl-D ends the chat.", file=sys.stderr)
    while (text := _read_line("> " if interactive else "")) is not None:
        messages.append({"role": "user", "content": text})
        pieces = []
        try:
            ids = llm.encode_chat(messages)
            room = llm.engine.room(len(ids))  # near the end of the context an answer is cut short
            fitting = dataclasses.replace(params, max_tokens=min(options.max_tokens, room))
            for update in llm.stream({"prompt_token_ids": ids}, fitting):
                pieces.append(update.text)
                print(update.text, end="", flush=True)
        except RequestError as error:
            messages.pop()  # a message that does not fit ends its own turn, not the chat
            print(f"mimo-jax: {error}", file=sys.stderr)
            continue
        print(flush=True)
        messages.append({"role": "assistant", "content": "".join(pieces)})
    return 0


def _batch(options: argparse.Namespace) -> int:
    batch_files, batches = _serve_module("batch_files"), _serve_module("batches")
    batch_files.check_paths(options.input, options.output)
    llm = LLM(**_engine_arguments(options), progress=_on_terminal(sys.stderr))
    summary = batches.run_batch(llm, options.input, options.output)
    done = f"{summary.lines} lines, {summary.kept} of them done before, {summary.failed} failed"
    print(f"{options.output}: {done}, {summary.completion_tokens} tokens generated", file=sys.stderr)
    return 0


def _serve(options: argparse.Namespace) -> int:
    engine_options = EngineOptions(**_engine_arguments(options))
    name = options.served_model_name or options.model
    _serve_module("app").run_server(engine_options, host=options.host, port=options.port, served_model_name=name)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    summary = inspect_model(options.model, hf_overrides=options.hf_overrides)
    print(json.dumps(dataclasses.asdict(summary), indent=2) if options.json else as_text(summary))
    return 0


def _convert(options: argparse.Namespace) -> int:
    progress = _on_terminal(sys.stderr)
    convert_model(options.model, options.out, dtype=options.dtype, quantization=options.quantization, progress=progress)
    return 0


def _one_sequence(options: argparse.Namespace, encode: Any) -> LLM:
    """An LLM that has compiled, while its weights were read, just what one prompt needs."""

    def expect(tokenizer: Tokenizer | None, limits: Limits) -> Load:
        prompt = len(encode(tokenizer))
        limits.room(prompt, options.max_tokens)
        return Load(seqs=1, prompt_tokens=prompt, total_tokens=prompt + options.max_tokens, alone=True)

    arguments = _engine_arguments(options) | {"max_num_seqs": 1}
    progress = _on_terminal(sys.stderr)
    engine = load_engine(EngineOptions(**arguments), expect=expect, progress=progress)
    return LLM.from_engine(engine, progress=progress)


def _encode(tokenizer: Tokenizer | None, options: argparse.Namespace) -> list[int]:
    """Prompt ids: of the text as it stands, or with --chat of the conversation it opens."""
    if tokenizer is None:
        try:
            return [int(word) for word in options.prompt.replace(",", " ").split()]
        except ValueError as error:
            raise RequestError("this model has no tokenizer: give --prompt token ids, such as '1 22 333'") from error
    if options.chat:
        return tokenizer.encode_chat([{"role": "user", "content": options.prompt}])
    return tokenizer.encode(options.prompt)


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt).strip() or None
    except (EOFError, RuntimeError):  # RuntimeError: standard input was closed before the program started
        return None


def _on_terminal(stream: Any) -> bool:
    """Whether a person is at the other end; a standard stream that was closed is None."""
    return stream is not None and bool(stream.isatty())


def _json_object(text: str) -> dict[str, Any]:
    """The value of --hf-overrides."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value


def _as_json(output: RequestOutput, prompt: str) -> dict[str, Any]:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        for choice in output.outputs
    ]
    return {"prompt": prompt, "prompt_token_ids": output.prompt_token_ids, "outputs": choices}


def _sampling(options: argparse.Namespace) -> SamplingParams:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in vars(options).items() if name in names})


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(EngineOptions)} - {"seed"}
    return {name: value for name, value in vars(options).items() if name in names}


def _serve_module(name: str) -> Any:
    """The server is a package above this one, with its own extra; only these two commands reach up to it."""
    try:
        return importlib.import_module(f"serve.{name}")
    except ModuleNotFoundError as error:
        raise OSError(f"package {error.name!r} is missing: pip install '.[serve]'") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mimo-jax", description="Inference of hybrid sliding-window transformers.")
    parser.add_argument("--verbose", action="store_true", help="say what is being done")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete one prompt")
    _add_engine(generate)
    generate.add_argument("--prompt", required=True, help="text, or token ids for a model without a tokenizer")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    _add_sampling(generate, max_tokens=128)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk with a model")
    _add_engine(chat)
    chat.add_argument("--system", help="the system message")
    _add_sampling(chat, max_tokens=512)
    chat.set_defaults(run=_chat)

    batch = commands.add_parser("batch", help="run a file of OpenAI batch lines; started again, it goes on")
    _add_engine(batch)
    batch.add_argument("-i", "--input", type=Path, required=True, help="JSON lines: custom_id, method, url, body")
    batch.add_argument("-o", "--output", type=Path, required=True, help="JSON lines, in the order of the input")
    batch.set_defaults(run=_batch)

    serve = commands.add_parser("serve", help="serve a model over HTTP, in OpenAI's protocol")
    _add_engine(serve)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--served-model-name", help="the name that requests use; MODEL as given by default")
    serve.set_defaults(run=_serve)

    inspect = commands.add_parser("inspect", help="say what a model is and how big, from its headers alone")
    published = ", ".join(PUBLISHED)
    inspect.add_argument("model", metavar="MODEL", help=f"as for the other commands, or a name alone: {published}")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.add_argument(
        "--hf-overrides", type=_json_object, help="JSON object whose keys replace those of config.json"
    )
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser("convert", help="write a model in the form it is computed in, to open it quickly")
    convert.add_argument("model", metavar="MODEL", help="as for the other commands")
    convert.add_argument("out", metavar="OUT", type=Path, help="a new folder; it is a MODEL for every command")
    convert.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    convert.add_argument("--quantization", help=_QUANTIZATION)
    convert.set_defaults(run=_convert)
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(BUILT_IN)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a Hugging Face folder, a .gguf file, a converted folder, or a built-in name ({names})",
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--max-model-len", type=int, help="tokens of a sequence at most")
    parser.add_argument("--max-num-seqs", type=int, help="sequences that run at once")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256, help="prompt tokens computed in one step")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a page of the cache")
    parser.add_argument(
        "--kv-cache-memory-bytes", type=int, help="bytes for the cache; from the free memory by default"
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, help="draft heads to use; all that the model has by default, 0 for none"
    )
    parser.add_argument("--quantization", help=_QUANTIZATION)
    parser.add_argument("--hf-overrides", type=_json_object, help="JSON object whose keys replace those of config.json")


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="a string that ends the text; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true")
