from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="drawings need the extra `site`")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters import draw
from chapters.figures import DARK, LIGHT
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from tests.helpers import tiny_model

SYSTEM = list(range(10, 20))  # what prompts have in common: two pages and a half


def run(path, prompts, new_tokens=6, **switches) -> draw.Trace:
    """The trace of a real engine with a tiny model; all prompts are there from the start."""
    config = EngineConfig(device="cpu", page_size=4, trace=str(path), **{"kv_pages": 41} | switches)
    engine = Engine(tiny_model(), config)
    for i, prompt in enumerate(prompts):
        engine.add(Request(i, list(prompt), SamplingParams(max_tokens=new_tokens, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    engine.close()
    return draw.read_trace(path)


@pytest.fixture
def trace(tmp_path) -> draw.Trace:
    """Three requests that follow one another, the last two with a common beginning; two run side by side."""
    prompts = [[*range(40, 47)], [*SYSTEM, 51, 52, 53], [*SYSTEM, 61]]
    return run(tmp_path / "run.jsonl", prompts, max_running_requests=2, max_batch_tokens=8)


@pytest.fixture
def ax():
    return Figure(figsize=(8, 4)).add_subplot()


def rectangles(ax) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


class TestReadTrace:
    def test_every_page_is_held_in_the_tree_or_free_after_every_step(self, trace):
        for step in trace.steps:
            held = {page for pages in step.tables.values() for page in pages}
            cached = {page for node in step.tree for page in node.pages}
            assert len(held | cached) + step.free == trace.pages

    def test_a_prompts_tokens_are_found_or_computed_and_each_later_token_is_a_decode(self, trace):
        for request, prompt_tokens in {0: 7, 1: 13, 2: 11}.items():
            rows = [(step.kinds[request], step.batch[request]) for step in trace.steps if request in step.batch]
            prefill = sum(row.cached + row.tokens for kind, row in rows if kind == "prefill")
            assert prefill == prompt_tokens
            assert [row.tokens for kind, row in rows if kind == "decode"] == [1] * 5  # the last token is not fed back

    def test_the_prefix_that_another_request_left_counts_as_cached(self, trace):
        first = next(step.batch[2] for step in trace.steps if 2 in step.batch)
        assert (first.cached, first.tokens) == (8, 3)  # two whole pages of the common beginning

    def test_a_request_waits_until_it_runs_and_is_gone_when_it_has_finished(self, trace):
        kinds = [step.kinds.get(2) for step in trace.steps]
        begun = kinds.index("prefill")
        assert begun > 0
        assert set(kinds[:begun]) == {"waiting"}
        assert trace.steps[-1].finished[2] == "length"
        assert trace.steps[-1].kinds[2] == "decode"
        assert trace.steps[-1].tables == {}

    def test_who_lost_its_pages_is_preempted_and_then_prefills_again(self, tmp_path):
        trace = run(tmp_path / "tight.jsonl", [[1, 3, 4], [5, 6, 8]], new_tokens=13, kv_pages=6, output_reserve=0.0)
        kinds = [step.kinds.get(1) for step in trace.steps]
        lost = kinds.index("preempted")
        assert kinds[lost - 1] == "decode"
        assert "prefill" in kinds[lost:]

    def test_who_holds_pages_but_computes_nothing_is_paused(self, tmp_path):
        prompts = [[1, 3, 4], [5, 6, 8, 9, 10, 11, 12]]
        trace = run(tmp_path / "paused.jsonl", prompts, batching="prefill_first", max_batch_tokens=4)
        assert [step.kinds[0] for step in trace.steps[:3]] == ["prefill", "paused", "paused"]

    def test_a_file_that_is_no_trace_is_refused(self, tmp_path):
        (tmp_path / "other.jsonl").write_text('{"loss": 2.5}\n')
        with pytest.raises(ValueError, match="is no trace"):
            draw.read_trace(tmp_path / "other.jsonl")


class TestTimeline:
    def test_a_cell_stands_for_each_request_in_each_step(self, trace, ax):
        draw.timeline(trace, ax)
        drawn = sorted((patch.get_x(), round(patch.get_y() + 0.4)) for patch in rectangles(ax))
        assert drawn == sorted((i, request) for i, step in enumerate(trace.steps) for request in step.batch)

    def test_a_prefill_says_how_many_tokens_it_found_and_computed(self, trace, ax):
        draw.timeline(trace, ax)
        assert "8+3" in {text.get_text() for text in ax.texts}

    def test_steps_are_as_wide_as_their_tokens_or_their_seconds(self, trace, ax):
        for by, end in (("tokens", sum(s.total_tokens for s in trace.steps)), ("time", trace.steps[-1].time)):
            draw.timeline(trace, ax, by=by)
            assert max(p.get_x() + p.get_width() for p in rectangles(ax)) == pytest.approx(end)
            ax.clear()

    def test_the_key_explains_only_what_is_drawn(self, trace, ax):
        draw.timeline(trace, ax)
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels == ["prefill", "decode", "waiting", "finished"]


class TestPoolGrid:
    def cell(self, ax, page, columns=16):
        """The fills of one page's square."""
        y, x = divmod(page - 1, columns)
        inside = [p for p in rectangles(ax) if int(p.get_x()) == x and int(p.get_y()) == y and p.get_fill()]
        return [p for p in inside if p.get_width() > 0]

    def test_a_shared_page_has_a_band_in_the_colour_of_each_holder(self, trace, ax):
        step = next(i for i, s in enumerate(trace.steps) if {1, 2} <= s.tables.keys())
        shared = set(trace.steps[step].tables[1]) & set(trace.steps[step].tables[2])
        draw.pool_grid(trace, step, ax)
        assert len(shared) == 2
        for page in shared:
            assert len({p.get_y() for p in self.cell(ax, page)}) == 2
            assert len({to_hex(p.get_facecolor()) for p in self.cell(ax, page)}) == 4  # two colours, each also pale

    def test_the_last_page_is_filled_as_far_as_it_is_written(self, trace, ax):
        draw.pool_grid(trace, 0, ax)
        assert trace.steps[0].computed[0] == 7
        last = self.cell(ax, trace.steps[0].tables[0][-1])
        assert min(p.get_width() for p in last) == pytest.approx(0.75 * max(p.get_width() for p in last))

    def test_a_free_page_is_empty(self, trace, ax):
        draw.pool_grid(trace, 0, ax)
        assert self.cell(ax, trace.pages) == []

    @pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
    def test_every_page_but_the_dummy_has_its_number(self, trace, ax, theme):
        draw.pool_grid(trace, -1, ax, theme, numbers=True)
        assert [text.get_text() for text in ax.texts] == [str(page) for page in range(1, trace.pages + 1)]
        assert {to_hex(text.get_color()) for text in ax.texts} == {theme.ink}


class TestRadixTree:
    def test_a_node_shows_its_pages_its_tokens_and_its_locks(self, trace, ax):
        step = next(i for i, s in enumerate(trace.steps) if {1, 2} <= s.tables.keys())
        common = next(node for node in trace.steps[step].tree if node.tokens == SYSTEM[:8])
        draw.radix_tree(trace, step, ax, text=lambda tokens: "ab" if tokens == SYSTEM[:8] else "")
        texts = [text.get_text() for text in ax.texts]
        assert common.locks == 2
        assert texts[texts.index("ab") + 1] == "2"
        pages = [p for p in rectangles(ax) if p.get_linewidth() > 0]  # their outlines
        assert len(pages) == sum(len(node.pages) for node in trace.steps[step].tree)

    def test_children_stand_to_the_right_of_their_parent_and_no_two_leaves_on_one_line(self, trace):
        tree = trace.steps[-1].tree
        left, end, line = draw._layout(tree, most_pages=12, ratio=2.0)
        assert all(left[i] > end[node.parent] for i, node in enumerate(tree))
        leaves = set(range(len(tree))) - {node.parent for node in tree}
        assert sorted(line[i] for i in leaves) == list(range(len(leaves)))

    def test_a_long_node_is_cut_and_says_its_number_of_pages(self, tmp_path, ax):
        trace = run(tmp_path / "long.jsonl", [range(10, 60)])
        draw.radix_tree(trace, -1, ax, most_pages=3)
        assert any("(12 pages)" in text.get_text() for text in ax.texts)

    def test_an_empty_tree_is_its_root(self, tmp_path, ax):
        trace = run(tmp_path / "none.jsonl", [[1, 3, 4]], prefix_cache="none")
        draw.radix_tree(trace, -1, ax)
        assert rectangles(ax) == []
