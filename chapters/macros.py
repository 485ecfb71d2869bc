"""What a page may call: code, tasks and results from the repository, so that no page repeats what may change.

Loaded by mkdocs-macros. An unknown symbol, task, result or figure raises, and the strict build fails with the message.
"""

from __future__ import annotations

import functools
import html
import json
import os
import posixpath
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # mkdocs puts neither on the path

from chapters.manifest import find_task, load_chapters, load_planned  # noqa: E402
from chapters.symbols import find, language  # noqa: E402
from chapters.workspace import files  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "chapters" / "reference" / "examples"
RUNS_ON = {
    "cpu": "CPU",
    "interpreter": "GPU, or CPU in Triton's interpreter",
    "gpu": "GPU",
    "multi-gpu": "several GPUs",
}
_chapters = functools.cache(load_chapters)  # a build asks a hundred times
_SIZE = re.compile(r'<svg[^>]* viewBox="0 0 ([\d.]+) ([\d.]+)"')


def code(name: str) -> str:
    """The source of `package.module:symbol`, titled with its place."""
    symbol = find(ROOT, name)
    title = f"{symbol.path.as_posix()}:{symbol.place.start + 1}"
    return _fence(textwrap.dedent(symbol.source), title, language(symbol.path).LEXER)


def example(name: str) -> str:
    """A whole file of chapters/reference/examples, titled with its place."""
    path = EXAMPLES / name
    if not path.is_file():
        raise LookupError(f"no example {name!r} in {EXAMPLES.relative_to(ROOT).as_posix()}")
    return _fence(path.read_text(encoding="utf-8").rstrip(), path.relative_to(ROOT).as_posix(), "python")


def task(task_id: str) -> str:
    """The task's box: what to write, how to verify it, hints folded."""
    chapter, entry = find_task(_chapters(ROOT), task_id)
    own = files(ROOT, chapter)[entry.module].relative_to(ROOT).as_posix()
    symbol = find(ROOT, entry.symbol)
    speech = language(symbol.path)
    parts = [
        f"`{entry.qualname}` in `{own}` · about {entry.lines} line{'s' if entry.lines > 1 else ''}",
        _fence(f"{textwrap.dedent(symbol.head)}\n{speech.GAP}", own, speech.LEXER),
        _fence(f"pytest {' '.join(entry.tests)} --mine", "verify", "bash"),
        *(f'??? tip "Hint {n}"\n{_inside(hint)}' for n, hint in enumerate(entry.hints, 1)),
    ]
    return f'<a id="task-{task_id}"></a>\n\n!!! task "Task {task_id} · {entry.title}"\n{_inside(*parts)}\n'


def solution(task_id: str) -> str:
    """The engine's own code for a task, folded."""
    _, entry = find_task(_chapters(ROOT), task_id)
    return f'??? success "Solution {task_id} · {entry.title}"\n{_inside(code(entry.symbol))}\n'


def result(name: str, path: str, spec: str = "") -> str:
    """A number from benchmarks/results/<name>.json, at a path like `data.tokens.3`, formatted by spec."""
    value: Any = _record(name)
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            held = list(value) if isinstance(value, dict) else type(value).__name__
            raise LookupError(f"{name}.json has no {path!r}: at {part!r} there is only {held}") from None
    return format(value, spec)


def circumstances(name: str) -> str:
    """Where and how a result was measured, in one line."""
    record = _record(name)
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    line = f"{record['device']} · {versions} · {record['date']} · commit {record['commit']} · `{record['command']}`"
    return f"<small>Measured on {line}</small>"


def measured(name: str, path: str = "") -> bool:
    """Whether benchmarks/results/<name>.json is there, and has something at the path."""
    try:
        return bool(result(name, path) if path else _record(name)["data"])
    except LookupError:
        return False


def unmeasured(name: str, what: str = "") -> str:
    """What stands on a page where a result is to come. tests/site/test_measured.py fails as long as one does."""
    part = f" of {what}" if what else ""
    return f"*Not measured yet: `benchmarks/results/{name}.json`{part}.*"


def ledger(name: str) -> str:
    """The changes of a results file, in order: what was predicted, what was measured, and why; None is a dash."""
    record = _record(name)
    if not record["data"]["rows"]:
        return unmeasured(name)
    rows = ["| change | batch | predicted | measured | why |", "|---|--:|--:|--:|---|"]
    for row in record["data"]["rows"]:
        times = ["–" if row[kind] is None else f"{row[kind]:,.0f} µs" for kind in ("predicted_us", "measured_us")]
        rows.append(" | ".join(("| " + row["change"], str(row["batch"]), *times, row["why"])) + " |")
    return "\n".join([*rows, "", circumstances(name)])


def figure(folder: Path, name: str, alt: str) -> str:
    """A drawing from a page's folder, in the variant that fits the theme; its size is told, so that nothing moves."""
    images = []
    for theme in ("light", "dark"):
        path = folder / "figures" / f"{name}-{theme}.svg"
        if not path.is_file():
            raise LookupError(f"no figure {name!r} in {folder.name}/figures: run `python -m chapters figures`")
        [(width, height)] = _SIZE.findall(path.read_text(encoding="utf-8"))
        images.append(f"![{alt}](figures/{path.name}#only-{theme}){{ width={width} height={height} loading=lazy }}")
    return '<figure class="drawing" markdown="span">\n' + "\n".join(images) + "\n</figure>"


def player(url: str, name: str, alt: str) -> str:
    """An interactive drawing of recorded steps: chapters/players/<name>.js on benchmarks/results/player_<name>.json.

    The frames stand inside the page, since a page opened from a folder may not fetch. `url` is the page's own.
    """
    if not (ROOT / "chapters" / "players" / f"{name}.js").is_file():
        raise LookupError(f"no player chapters/players/{name}.js")
    data = _record(f"player_{name}")["data"]
    frames = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", r"<\/")
    scripts = (posixpath.relpath(f"players/{script}.js", posixpath.dirname(url)) for script in ("player", name))
    return "\n".join(
        (
            f'<figure class="player" data-player="{name}" aria-label="{html.escape(alt)}">',
            '<div class="player-stage"><noscript>This drawing moves with JavaScript.</noscript></div>',
            f'<script type="application/json">{frames}</script>',
            f"<figcaption>{html.escape(alt)} Space plays, ← and → step.</figcaption>",
            "</figure>",
            *(f'<script src="{script}"></script>' for script in scripts),
        )
    )


def notebook(folder: Path, name: str) -> str:
    """A link to a rendered notebook."""
    path = ROOT / "chapters" / "notebooks" / f"{name}.ipynb"
    if not path.is_file():
        raise LookupError(f"no notebook notebooks/{name}.ipynb")
    return f"[`notebooks/{name}.ipynb`]({Path(os.path.relpath(path, folder)).as_posix()})"


def course_map(builds: dict[int, str]) -> str:
    """The chapters that exist, each with the line that the page has for it; below, those that are planned."""
    chapters = _chapters(ROOT)
    rows = ["| | chapter | you build | tasks | minutes | runs on |", "|--:|---|---|--:|--:|---|"]
    for chapter in chapters:
        if chapter.number not in builds:
            raise LookupError(f"course_map has no line for chapter {chapter.number}")
        link = f"[**{chapter.title}**]({chapter.name}/index.md)"
        row = (chapter.number, link, builds[chapter.number], len(chapter.tasks), chapter.minutes, RUNS_ON[chapter.tier])
        rows.append(f"| {' | '.join(map(str, row))} |")
    written = {chapter.number for chapter in chapters}
    planned = {number: entry for number, entry in sorted(load_planned(ROOT).items()) if number not in written}
    if planned:
        lines = (f"{number} *{entry['title'].lower()}*: {entry['builds']}" for number, entry in planned.items())
        rows += ["", f"Planned: {'; '.join(lines)}."]
    return "\n".join(rows)


def smollm2() -> dict[str, int]:
    """Sizes of the course's default model, from its config; bytes are those of 16-bit numbers."""
    import torch

    from minisgl.kvcache.contiguous import kv_bytes_per_token
    from minisgl.models.config import ModelConfig
    from minisgl.models.llama import LlamaForCausalLM

    config = ModelConfig.from_hf(json.loads((ROOT / "chapters" / "reference" / "smollm2.json").read_text()))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    return {
        "parameters": parameters,
        "embedding": config.vocab_size * config.hidden_size,
        "weight_bytes": 2 * parameters,
        "kv_bytes": kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, torch.bfloat16),
        "attention_width": config.num_layers * config.num_heads * config.head_dim,
        "context": config.max_position_embeddings,
    }


def define_env(env: Any) -> None:
    """Called by mkdocs-macros, at the beginning of each build."""
    _chapters.cache_clear()
    shown, numbers = (code, example, task, solution, course_map), (result, circumstances, measured, unmeasured, ledger)
    for macro in (*shown, *numbers, smollm2):
        env.macro(macro)

    def beside_page(macro: Callable[..., str]) -> Callable[..., str]:
        return lambda *args: macro(Path(env.page.file.abs_src_path).parent, *args)

    env.macro(beside_page(figure), "figure")
    env.macro(beside_page(notebook), "notebook")
    env.macro(lambda *args: player(env.page.url, *args), "player")


def _record(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise LookupError(f"no result benchmarks/results/{name}.json: run the benchmark that writes it")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _fence(text: str, title: str, lexer: str) -> str:
    return f'````{lexer} title="{title}"\n{text}\n````'


def _inside(*blocks: str) -> str:
    """Blocks as the content of an admonition."""
    return textwrap.indent("\n\n".join(blocks), "    ")
