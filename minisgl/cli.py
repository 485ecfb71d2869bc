"""The command line: generate, chat, serve, fetch. Flags come from the fields of the dataclasses they fill.

examples:
  minisgl generate "Once upon a time" --max-tokens 40
  minisgl generate --chat "What is the capital of France?" --stats
  minisgl generate --chapter 1 "The first engine of the course:"
  minisgl chat --temperature 0.7 --top-p 0.9
  minisgl chat --model Qwen/Qwen3-0.6B
  minisgl serve --port 8000
  minisgl chat --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import atexit
import gc
import inspect
import os
import runpy
import signal
import sys
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich_argparse import RawDescriptionRichHelpFormatter

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.server.config import ServerConfig

if TYPE_CHECKING:
    from minisgl.llm import LLM, Completion, Message
    from minisgl.server.remote import Remote


_CHAT_HELP = "/reset starts over · /stats shows the work done · /exit or Ctrl-D leaves · Ctrl-C stops an answer"

_notes = Console(stderr=True, highlight=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. A user's mistake ends with one line on stderr and exit status 1."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as on Ctrl-C
    # Or Python, as it ends, looks through all objects of torch for most of a second. Triton's would count as leaked.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    from minisgl_hub import FetchError

    from minisgl.distributed.ranks import RankDied

    try:
        args.run(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `minisgl generate … | head`
        sys.stderr.close()
        sys.exit(0)
    except (ValueError, OSError, FetchError, FloatingPointError, NotImplementedError, RankDied) as error:
        _notes.print(f"[bold red]minisgl:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("minisgl", description=__doc__, formatter_class=RawDescriptionRichHelpFormatter)
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)
        sub.set_defaults(run=run)
        return sub

    generate = command("generate", _generate, "Continue a prompt, printing the text as it comes.")
    generate.add_argument("prompt", nargs="?", help="the text to continue; read from standard input when absent")
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    generate.add_argument("--stats", action="store_true", help="print speed and work counts to stderr at the end")
    chat = command("chat", _chat, "Talk with a model in the terminal.")
    for sub in (generate, chat):
        sub.add_argument("--system", help="the system message of a chat")
        sub.add_argument("--chapter", type=int, help="use the engine as it stands at the end of this chapter")
        add_fields(sub.add_argument_group("engine"), EngineConfig)
        add_fields(sub.add_argument_group("sampling"), SamplingParams)
    chat.set_defaults(max_tokens=1024)
    chat.add_argument("--url", help="talk to the OpenAI server there; --model is then its name for the model")
    chat.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="for --url ($OPENAI_API_KEY)")

    server = command("serve", _serve, "Serve a model to OpenAI's clients, with a page at /.")
    server.add_argument("--chapter", type=int, help="use the engine as it stands at the end of this chapter")
    add_fields(server.add_argument_group("server"), ServerConfig)
    add_fields(server.add_argument_group("engine"), EngineConfig)

    bench = command("bench", _bench, "Measure speed, beside what this machine allows.")
    kinds = "many requests at once, a few, a shared prefix with and without its cache, a server, each chapter's engine"
    bench.add_argument("what", choices=("offline", "latency", "prefix", "serve", "ladder"), help=kinds)
    bench.add_argument("options", nargs=argparse.REMAINDER, help="of each: see `minisgl bench offline --help`")
    fetch = command("fetch", _fetch, "Download and convert the course's default model, once.")
    fetch.add_argument("--force", action="store_true", help="fetch again although the model is there")
    return parser


def add_fields(group: argparse._ArgumentGroup, cls: type[Any]) -> None:
    """One flag a field, of the field's type; its help is the field's line in the class's docstring."""
    hints, texts = typing.get_type_hints(cls), _field_texts(cls)
    for field in fields(cls):
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        options, many = typing.get_args(hint), typing.get_origin(hint) in (Sequence, Mapping)
        kind = next((o for o in options if o is not type(None)), str) if options else hint
        default = "none; may be given several times" if many else field.default
        settings: dict[str, Any] = {"help": f"{texts[field.name]} (default: {default})", "default": None}
        if many:
            settings |= {"action": "append", "type": kind if len(options) == 1 else _pair}
        if kind is bool:
            settings |= {"action": argparse.BooleanOptionalAction}
        elif isinstance(kind, str):  # Literal["a", "b"]
            settings |= {"choices": options}
        else:
            settings = {"type": kind, "metavar": field.name.split("_")[-1].upper()} | settings
        group.add_argument(flag, **settings)


def _field_texts(cls: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    for line in (inspect.getdoc(cls) or "").partition("Args:\n")[2].partition("\n\n")[0].splitlines():
        name, _, text = line.strip().partition(": ")
        texts[name] = text.rstrip(".").replace("%", "%%")
    return texts


def given_fields(cls: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a dataclass that the user set on the command line."""
    given = {f.name: value for f in fields(cls) if (value := getattr(args, f.name)) is not None}
    return given | ({"logit_bias": dict(given["logit_bias"])} if "logit_bias" in given else {})


def _pair(text: str) -> tuple[int, float]:
    """12=-5 → (12, -5.0)."""
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _load(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    params = SamplingParams(**given_fields(SamplingParams, args))  # a wrong value should not cost a load
    config = _engine_config(args, max_running_requests=1)  # one at a time: few graphs, a small pool
    with _notes.status(f"loading {config.model} …"):
        from minisgl.llm import LLM

        llm = LLM(config)
    return llm, params


def _engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    chosen = defaults | given_fields(EngineConfig, args)
    return EngineConfig(**chosen) if args.chapter is None else EngineConfig.chapter(args.chapter, **chosen)


def _connect(args: argparse.Namespace) -> tuple[Remote, SamplingParams]:
    from minisgl.server.remote import Remote

    given = given_fields(EngineConfig, args) | ({} if args.chapter is None else {"chapter": args.chapter})
    if others := sorted(given.keys() - {"model"}):
        raise ValueError(f"--{others[0].replace('_', '-')} is the engine's, and that runs at --url: leave it out")
    return Remote(args.url, args.api_key, args.model or ""), SamplingParams(**given_fields(SamplingParams, args))


def _generate(args: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    llm, params = _load(args)
    messages = _opening(args)
    as_chat = args.chat or bool(messages)
    asked = [*messages, {"role": "user", "content": prompt}] if as_chat else prompt
    for i in range(params.n):
        if params.n > 1:
            print(f"--- {i + 1} of {params.n} ---")
        seed = None if params.seed is None else params.seed + i
        completion = _print_answer(llm, asked, replace(params, n=1, seed=seed))
        for token in completion.logprobs:
            chosen = {token.token_id: token.logprob} | token.top
            _notes.print(escape("  ".join(f"{llm.tokenizer.decode(i)!r} {chosen[i]:.3f}" for i in chosen)))
    if args.stats:
        _print_stats(llm, completion)
    llm.close()


def _chat(args: argparse.Namespace) -> None:
    llm: LLM | Remote
    if args.url:
        llm, params = _connect(args)
        _notes.print(f"[bold]{escape(llm.model)}[/] at {llm.url}. {_CHAT_HELP}")
    else:
        llm, params = _load(args)
        _notes.print(f"[bold]{llm.config.model}[/] on {llm.device}. {_CHAT_HELP}")
    messages = _opening(args)
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  line editing and history for input()
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _notes.print(_CHAT_HELP)
            continue
        if not line.startswith("/"):
            messages = _turn(llm, messages, line, params) if line else messages
        elif line == "/reset":
            messages = _opening(args)
            _notes.print("starting over")
        elif line == "/stats":
            _print_stats(llm)
        elif line in ("/exit", "/quit"):
            return
        else:
            _notes.print(f"unknown command {line}. {_CHAT_HELP}")


def _turn(llm: LLM | Remote, messages: list[Message], question: str, params: SamplingParams) -> list[Message]:
    """Answer one question; the conversation grows by it, or stays as it was when it does not fit."""
    asked: list[Message] = [*messages, {"role": "user", "content": question}]
    try:
        answer = _print_answer(llm, asked, params).text
    except (ValueError, ConnectionError) as error:
        _notes.print(f"[bold red]minisgl:[/] {escape(str(error))} (or /reset)", soft_wrap=True)
        return messages
    return [*asked, {"role": "assistant", "content": answer}]


def _opening(args: argparse.Namespace) -> list[Message]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _print_answer(llm: LLM | Remote, prompt: Any, params: SamplingParams) -> Completion:
    """Print an answer as it comes. Ctrl-C ends it, and what was said so far stays."""
    from minisgl.tokenizer.answer import Completion

    completion = Completion(prompt_tokens=0)
    try:
        for piece, completion in llm.stream(prompt, params):  # noqa: B007  the last one is the answer
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        _notes.print("[dim] stopped[/]", end="")
    if completion.error:
        raise ValueError(completion.error)
    print()
    return completion


def _print_stats(llm: LLM | Remote, completion: Completion | None = None) -> None:
    if completion is not None:
        reason, first, rate = completion.finish_reason, completion.first_token_s, completion.decode_tokens_per_s
        _notes.print(f"{reason or 'cut off'} · first token after {first:.2f} s, then {rate:.1f} tokens/s")
    counts = [f"{name.replace('_', ' ')} {value:,.0f}" for name, value in llm.stats().items() if value]
    _notes.print(" · ".join(counts), soft_wrap=True)


def _serve(args: argparse.Namespace) -> None:
    config, engine_config = ServerConfig(**given_fields(ServerConfig, args)), _engine_config(args)
    from minisgl.server.serve import serve

    sys.exit(serve(engine_config, config))


def _bench(args: argparse.Namespace) -> None:
    root = Path(__file__).parents[1]
    if not (root / "benchmarks").is_dir():
        raise FileNotFoundError("the benchmarks lie in a clone of the repository, not in the package: run this there")
    sys.path.insert(0, str(root))
    sys.argv[1:] = args.options
    runpy.run_module(f"benchmarks.{args.what}", run_name="__main__", alter_sys=True)


def _fetch(args: argparse.Namespace) -> None:
    import minisgl_hub as hub

    print(hub.fetch(force=args.force))
