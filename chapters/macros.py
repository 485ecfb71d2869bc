"""What a page may call: code, tasks and results from the repository, so that no page repeats what may change.

Loaded by mkdocs-macros. An unknown symbol, task, result or figure raises, and the strict build fails with the message.
"""

from __future__ import annotations

import json
import os
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


def code(name: str) -> str:
    """The source of `package.module:symbol`, titled with its place."""
    symbol = find(ROOT, name)
    title = f"{symbol.path.as_posix()}:{symbol.place.start + 1}"
    return _fence(textwrap.dedent(symbol.source), title, language(symbol.path).LEXER)


def task(task_id: str) -> str:
    """The task's box: what to write, how to verify it, hints folded."""
    chapter, entry = find_task(load_chapters(ROOT), task_id)
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
    _, entry = find_task(load_chapters(ROOT), task_id)
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
    """A drawing from a page's folder, in the variant that fits the theme."""
    for theme in ("light", "dark"):
        if not (folder / "figures" / f"{name}-{theme}.svg").is_file():
            raise LookupError(f"no figure {name!r} in {folder.name}/figures: run `python -m chapters figures`")
    images = "\n".join(f"![{alt}](figures/{name}-{theme}.svg#only-{theme})" for theme in ("light", "dark"))
    return f'<figure class="drawing" markdown="span">\n{images}\n</figure>'


def notebook(folder: Path, name: str) -> str:
    """A link to a rendered notebook."""
    path = ROOT / "chapters" / "notebooks" / f"{name}.ipynb"
    if not path.is_file():
        raise LookupError(f"no notebook notebooks/{name}.ipynb")
    return f"[`notebooks/{name}.ipynb`]({Path(os.path.relpath(path, folder)).as_posix()})"


def course_map() -> str:
    """The chapters that exist, then those that are planned."""
    chapters = load_chapters(ROOT)
    rows = ["| | chapter | you write | minutes | runs on |", "|--:|---|---|--:|---|"]
    for chapter in chapters:
        link = f"[**{chapter.title}**]({chapter.name}/index.md)"
        writes = " · ".join(task.title for task in chapter.tasks)
        rows.append(f"| {chapter.number} | {link} | {writes} | {chapter.minutes} | {chapter.tier} |")
    written = {chapter.number for chapter in chapters}
    planned = load_planned(ROOT)
    for number in sorted(planned.keys() - written):
        rows.append(f"| {number} | {planned[number]['title']} | {planned[number]['builds']} | | planned |")
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
    """Called by mkdocs-macros."""
    for macro in (code, task, solution, result, circumstances, measured, unmeasured, ledger, course_map, smollm2):
        env.macro(macro)

    def beside_page(macro: Callable[..., str]) -> Callable[..., str]:
        return lambda *args: macro(Path(env.page.file.abs_src_path).parent, *args)

    env.macro(beside_page(figure), "figure")
    env.macro(beside_page(notebook), "notebook")


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
