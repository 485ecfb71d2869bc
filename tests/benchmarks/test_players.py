"""What the interactive drawings replay: the frames of each recorder against the engine that it watched."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.players import kernels, pages, radix, ranks, softmax, timeline
from benchmarks.record import load
from minisgl.config import EngineConfig
from minisgl.llm import LLM
from tests.distributed.group import in_threads
from tests.helpers import tiny_model


class TestSoftmax:
    IDS = (5, 100, 0, 42, 77, 50, 9)

    def found(self):
        return softmax.row(tiny_model(), self.IDS, layer=1, head=4)

    def test_the_answer_is_the_exact_softmax_of_the_recorded_row(self):
        found = self.found()

        exp = [math.exp(score) for score in found["scores"]]
        means = [sum(e * row[d] for e, row in zip(exp, found["values"], strict=True)) / sum(exp) for d in range(10)]
        assert found["kv_head"] == 1  # of the second three of six heads
        assert found["answer"] == pytest.approx(means, abs=1e-5)

    @pytest.mark.parametrize("tile", [1, 3, 7, 8])
    def test_tiles_of_any_size_end_at_the_engines_answer(self, tile):
        run = softmax.run(self.found(), tile, rescaled=True)

        assert len(run["steps"]) == math.ceil(7 / tile)
        assert run["error"] < 1e-5

    def test_the_weights_of_the_seen_keys_sum_to_total_after_each_tile(self):
        for rescaled in (True, False):
            for step in softmax.run(self.found(), 2, rescaled)["steps"]:
                assert sum(step["weights"]) == pytest.approx(step["total"], abs=0.01)  # of three decimals each

    def test_without_rescaling_a_key_that_was_once_the_largest_keeps_its_weight(self):
        found = {"scores": [1.0, 0.0, 3.0], "values": [[4.0], [8.0], [1.0]], "answer": [0.0]}

        [first, last] = softmax.run(found, 2, rescaled=False)["steps"]
        assert (first["weights"][0], last["weights"][0], last["weights"][2]) == (1.0, 1.0, 1.0)

        right = softmax.run(found, 2, rescaled=True)["steps"][-1]
        assert right["weights"][0] == pytest.approx(math.exp(-2), abs=1e-3)

    def test_the_saved_row_shows_a_largest_score_that_rises_and_a_wrong_answer(self):
        saved = load("player_softmax")["data"]
        right, wrong = (saved["runs"][name] for name in ("tiles of 4", "tiles of 4, not rescaled"))

        rises = {step["largest"] for step in right["steps"]}
        assert 2 < len(rises) < len(right["steps"])  # some tiles bring a larger score and some do not
        last = right["steps"][-1]
        assert [w / last["total"] for w in last["weights"]] == pytest.approx(saved["exact"], abs=2e-3)
        assert right["error"] < 1e-5 < 0.1 < wrong["error"]

    @pytest.mark.model
    def test_the_saved_row_is_the_models(self, smollm2_path):
        with LLM(softmax.CONFIG) as llm:
            now, saved = softmax.record(llm), load("player_softmax")["data"]

        assert (now["words"], now["next"]) == (saved["words"], saved["next"])
        assert now["scores"] == pytest.approx(saved["scores"], abs=5e-3)


class TestKernels:
    def steps(self):
        chapters = load("ch08_timeline")["data"]["chapters"]
        return {chapter: rows[str(kernels.BATCH)] for chapter, rows in chapters.items()}

    def unpacked(self, text):
        start = 0
        for part in text.split(";"):
            name, since, us = map(int, part.split(","))
            start += since
            yield name, start / 10, us / 10

    def test_each_kernel_and_call_comes_back_to_a_tenth_of_a_microsecond(self):
        for step in self.steps().values():
            packed = kernels.compact(step, in_flight=False)
            for lane, names in (("kernels", "names"), ("calls", "call_names")):
                found = list(self.unpacked(packed[lane]))
                assert [packed[names][name] for name, *_ in found] == step[lane]["name"]
                assert [start for _, start, _ in found] == pytest.approx(step[lane]["start_us"], abs=0.051)
                assert [us for *_, us in found] == pytest.approx(step[lane]["us"], abs=0.051)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("decode_kernel", "attention"),
            ("decode_rows_kernel", "small"),
            ("product_kernel", "product"),
            ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "product"),
            ("cublasLt::splitKreduce_kernel", "product"),
            ("add_rms_norm_kernel", "small"),
            ("at::native::vectorized_elementwise_kernel", "small"),
        ],
    )
    def test_a_kernel_is_known_by_its_name(self, name, kind):
        assert kernels.kind(name) == kind

    def test_a_step_has_an_attention_kernel_for_each_layer(self):
        for step in self.steps().values():
            assert [kernels.kind(name) for name in step["kernels"]["name"]].count("attention") == 28

    def test_only_chapter_8_has_a_step_in_flight(self):
        saved = load("player_kernels")["data"]["steps"]

        assert {title: step["in_flight"] for title, step in saved.items()} == {
            title: chapter == "8" for chapter, title in kernels.TITLES.items() if title in saved
        }


@pytest.fixture(scope="module")
def groups():
    """What each rank of one, two and three noted; the ranks are threads."""
    return {size: in_threads(size, ranks.decode, ranks.SHAPE, ranks.PROMPT) for size in ranks.SIZES}


class TestRanks:
    def test_the_parts_of_a_sum_add_up_to_what_one_rank_alone_has(self, groups):
        alone = {call["where"]: call["all"] for call in groups[1][0]["calls"] if call["where"] != "head"}

        for size in (2, 3):
            for calls in zip(*(rank["calls"] for rank in groups[size]), strict=True):
                if calls[0]["collective"] == "all_reduce":
                    assert sum(call["mine"] for call in calls) == pytest.approx(calls[0]["all"], abs=2e-3)
                assert len({call["all"] for call in calls}) == 1  # every rank gets the same
                assert calls[0]["all"] == pytest.approx(alone.get(calls[0]["where"], calls[0]["all"]), abs=2e-3)

    def test_all_ranks_choose_the_token_of_one_rank_alone(self, groups):
        assert {rank["chosen"] for group in groups.values() for rank in group} == {groups[1][0]["chosen"]}

    def test_each_query_head_and_each_token_is_on_one_rank(self, groups):
        for group in groups.values():
            assert [head for rank in group for head in rank["q_heads"]] == list(range(12))
            assert [rank["tokens"][0] for rank in group] + [101] == [0] + [rank["tokens"][1] for rank in group]

    def test_two_ranks_hold_as_many_kv_heads_each_as_one_alone_and_three_a_third(self, groups):
        assert [[rank["kv_bytes_per_token"] for rank in group] for group in groups.values()] == [
            [384], [384, 384], [128, 128, 128],
        ]  # fmt: skip

    def test_one_rank_sends_nothing(self, groups):
        assert all("sent" not in call for call in groups[1][0]["calls"])

    def test_processes_say_what_threads_say(self, groups):
        def without_numbers(group):
            return [[call | {"mine": 0, "all": 0} for call in rank["calls"]] for rank in group]

        processes = ranks.run(2)
        assert without_numbers(processes) == without_numbers(groups[2])
        assert [rank["chosen"] for rank in processes] == [rank["chosen"] for rank in groups[2]]

    def test_the_saved_shapes_and_bytes_are_those_of_the_code(self, groups):
        saved = load("player_ranks")["data"]["groups"]

        for size, group in groups.items():
            for now, before in zip(group, saved[str(size)], strict=True):
                assert {name: now[name] for name in now if name != "calls"} == {
                    name: before[name] for name in before if name != "calls"
                }
                sizes = [(call["where"], call.get("bytes"), call.get("sent")) for call in now["calls"]]
                assert sizes == [(call["where"], call.get("bytes"), call.get("sent")) for call in before["calls"]]


@pytest.fixture(scope="module")
def timelines(tiny_folder):
    llm = LLM(EngineConfig.chapter(5, model=str(tiny_folder), device="cpu", kv_pages=2))
    return timeline.record(llm, TestTimeline.PROMPTS, budget=32)


class TestTimeline:
    """benchmarks/players/timeline.py: one scheduler against another, on the same arrivals."""

    PROMPTS = ((0, "a short one", 6), (0, "another", 2), (15, "a long one " * 9, 3), (400, "late", 2))

    @pytest.mark.parametrize("mode", timeline.MODES)
    def test_every_token_is_computed_once_and_in_order(self, timelines, mode):
        computed = [0] * len(self.PROMPTS)
        for step in timelines["modes"][mode]:
            for request, start, tokens in step["rows"]:
                assert start == computed[request]
                computed[request] += tokens
        assert computed == [r["prompt"] + len(r["answer"]) - 1 for r in timelines["requests"]]

    @pytest.mark.parametrize("mode", timeline.MODES)
    def test_nobody_is_served_before_it_comes(self, timelines, mode):
        start = 0.0
        for step in timelines["modes"][mode]:
            for request, *_ in step["rows"]:
                arrival = timelines["requests"][request]["arrival"]
                start = max(start, arrival) if step["rows"][0][1] == 0 else start
                assert arrival <= start
            start = step["end"]

    def test_a_mixed_step_keeps_to_the_budget_and_a_static_group_does_not(self, timelines):
        def most(mode):
            return max(sum(n for *_, n in step["rows"]) for step in timelines["modes"][mode])

        assert most("mixed") == timelines["budget"] < most("static")

    def test_answers_have_the_lengths_that_were_asked_for(self, timelines):
        assert [len(r["answer"]) for r in timelines["requests"]] == [length for *_, length in self.PROMPTS]


@pytest.fixture(scope="module")
def cuts_of_a_pool(tiny_folder):
    llm = LLM(EngineConfig.chapter(3, model=str(tiny_folder), device="cpu", kv_pages=2))
    return pages.record(llm, TestPages.PROMPTS, slots=64, context=32)


class TestPages:
    """benchmarks/players/pages.py: one pool, cut into pages or regions."""

    PROMPTS = (("abcde", 6), ("x", 3), ("a longer one", 20), ("four", 9))

    @pytest.fixture(params=pages.CUTS)
    def cut(self, cuts_of_a_pool, request):
        return cuts_of_a_pool["cuts"][request.param]

    def states(self, cut):
        """The page tables and the tokens stored after each step."""
        tables, stored = {}, {}
        for step in cut["steps"]:
            tables |= step["tables"]
            stored |= {str(request): start + n for request, start, n in step["batch"]}
            yield step, {request: table for request, table in tables.items() if table}, stored

    def test_every_page_is_free_or_in_one_page_table(self, cut):
        for step, tables, _ in self.states(cut):
            held = [page for table in tables.values() for page in table]
            assert len(set(held)) == len(held) == cut["pages"] - step["free"]
            assert set(held) <= set(range(1, cut["pages"] + 1))

    def test_a_page_table_holds_its_tokens_and_less_than_a_page_more(self, cut):
        for _, tables, stored in self.states(cut):
            for request, table in tables.items():
                assert 0 <= len(table) * cut["page_size"] - stored[request] < cut["page_size"]

    def test_at_the_end_the_pool_is_whole_and_all_tokens_were_computed(self, cuts_of_a_pool, cut):
        *_, (step, tables, stored) = self.states(cut)
        assert step["free"] == cut["pages"]
        assert not tables
        assert list(stored.values()) == [len(r["tokens"]) - 1 for r in cuts_of_a_pool["requests"]]

    def test_regions_take_fewer_at_once(self, cuts_of_a_pool):
        first = [len(cuts_of_a_pool["cuts"][name]["steps"][0]["batch"]) for name in pages.CUTS]
        assert first == [4, 2]


@pytest.fixture(scope="module")
def operations(tiny_folder):
    llm = LLM(EngineConfig.chapter(4, model=str(tiny_folder), device="cpu", kv_pages=2))
    rules = "the same rules "
    rounds = [[(-1, f"{rules}one", 3)], [(-1, f"{rules}two!", 4), (-1, f"{rules}three", 2)], [(0, " more", 3)]]
    rounds += [[(-1, "something else, and longer", 3)], [(-1, f"{rules}two!", 4)]]
    return radix.record(llm, rounds, page_size=4, pages=17)


class TestRadix:
    """benchmarks/players/radix.py: the tree after each operation."""

    def test_every_operation_is_shown(self, operations):
        shown = {frame["what"] for frame in operations["frames"]}
        assert shown == {"match", "split", "lock", "step", "insert", "unlock", "short", "evict"}

    def test_the_holders_of_a_page_are_the_tree_and_the_page_tables(self, operations):
        for frame in operations["frames"]:
            held = Counter(page for _, _, own, _ in frame["tree"] for page in own)
            assert set(held.values()) <= {1}  # a page is in the tree once
            held.update(page for table in frame["tables"].values() for page in table)
            assert [held[page] for page in range(1, 17)] == list(map(int, frame["holders"]))

    def test_a_node_is_locked_by_those_whose_tables_go_through_it(self, operations):
        for frame in operations["frames"]:
            if frame["what"] in ("match", "split"):
                continue
            for _, locks, own, _ in frame["tree"]:
                assert locks == sum(set(own) <= set(table) for table in frame["tables"].values())

    def test_a_split_leaves_the_pages_and_their_tokens_as_they_were(self, operations):
        def pages(frame):
            return {page: text for _, _, own, texts in frame["tree"] for page, text in zip(own, texts, strict=True)}

        for before, frame in pairwise(operations["frames"]):
            if frame["what"] == "split":
                assert pages(before) == pages(frame)
                assert len(frame["tree"]) == len(before["tree"]) + 1

    def test_a_match_finds_what_a_request_then_need_not_compute(self, operations):
        found = {frame["who"]: 4 * len(frame["pages"]) for frame in operations["frames"] if frame["what"] == "match"}
        assert found.items() <= {i: request["found"] for i, request in enumerate(operations["requests"])}.items()
        assert found[5] < operations["requests"][5]["prompt"] - 1  # part of it was evicted

    def test_what_is_evicted_is_free_and_was_locked_by_nobody(self, operations):
        for before, frame in pairwise(operations["frames"]):
            if frame["what"] == "evict":
                assert {frame["holders"][page - 1] for page in frame["pages"]} == {"0"}
                locked = {page for _, locks, own, _ in before["tree"] if locks for page in own}
                assert not locked & set(frame["pages"])


@pytest.fixture(scope="module")
def ways():
    return load("player_request")["data"]["runs"]


class TestRequest:
    """benchmarks/players/request.py: the recording itself, since it takes a server and its clients to make one."""

    @pytest.fixture(params=["to its end", "the client hangs up"])
    def events(self, ways, request):
        return ways[request.param]["events"]

    def test_the_way_goes_from_the_client_through_front_and_engine_and_back(self, events):
        whats = [event["what"] for event in events]
        way = ["asks", "checked", "encoded", "Submit", "takes Submit", "step", "StepDone", "takes StepDone"]
        firsts = [whats.index(what) for what in [*way, "text", "events", "reads"]]
        assert firsts == sorted(firsts)

    def test_a_step_is_told_before_the_next_one_begins(self, events):
        turns = [event["what"] for event in events if event["what"] in ("step", "StepDone")]
        assert all("StepDone" in pair for pair in pairwise(turns))

    def test_the_first_step_computes_what_of_the_prompt_was_not_found_and_each_later_one_a_token(self, events):
        [prompt] = [event["tokens"] for event in events if event["what"] == "encoded"]
        [[_, found, computed]], *later = [event["rows"] for event in events if event["what"] == "step"]
        assert found + computed == prompt
        assert [tokens for [[_, _, tokens]] in later] == [1] * len(later)

    def test_the_client_reads_all_the_text_that_was_made(self, ways):
        events = ways["to its end"]["events"]
        texts = ["".join(event["text"] for event in events if event["what"] == what) for what in ("text", "reads")]
        assert texts == ["The capital of France is Paris"] * 2
        assert events[-1]["done"]

    def test_who_hangs_up_is_heard_by_the_front_then_by_the_engine_and_the_pages_are_back(self, ways):
        events = ways["the client hangs up"]["events"]
        place = [event["what"] for event in events].index
        way = [place(what) for what in ("hangs up", "http.disconnect", "Abort", "takes Abort")]
        assert way == sorted(way)
        told = [event for event in events[place("Abort") :] if event["what"] == "StepDone"]
        assert [event["outputs"][0][2] for event in told] == [None, "abort"]
        assert told[-1]["available"] == told[-1]["pages"]
