"""The calculator of the roofline page beside benchmarks/floor.py, in Chromium, from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import floor
from benchmarks.ch01_length import parameters
from minisgl.models.config import ModelConfig

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "chapters/reference/roofline.js"
H200, CPU = (4.25e12, 7.8e14), (1.97e10, 1.13e11)
SHAPES = {
    "smollm2-135m": ROOT / "chapters/reference/smollm2.json",
    "qwen3-0.6b": ROOT / "benchmarks/shapes/qwen3-0.6b/config.json",
    "llama-2-7b": ROOT / "benchmarks/shapes/llama-2-7b/config.json",
}
LARGE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
DEVICES = {"h200": (*H200, 141), "a100": (2.039e12, 3.12e14, 80), "t4": (3.2e11, 6.5e13, 16), "cpu": (*CPU, 16)}


def config(name: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads(SHAPES[name].read_text()) if name in SHAPES else LARGE)


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> Path:
    """The smallest page that holds the calculator; it is opened without a server."""
    path = tmp_path_factory.mktemp("roofline") / "page.html"
    holder = (
        f'<div class="roofline" data-roofline data-h200="{H200[0]} {H200[1]}" data-cpu="{CPU[0]} {CPU[1]}">text</div>'
    )
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{holder}<script src="{SCRIPT.as_uri()}"></script>')
    return path


@pytest.fixture
def page(browser, document):
    page = browser.new_page(viewport={"width": 900, "height": 900})
    page.set_default_timeout(300_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(document.as_uri())
    yield page
    page.close()
    assert problems == []


def shown(page, name: str) -> str:
    return page.locator(f'dd[data-name="{name}"]').inner_text()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [*SHAPES, "32b"])
def test_every_preset_gives_the_numbers_of_the_python_function(page, model, device):
    shape, (bandwidth, peak, memory) = config(model), DEVICES[device]
    for batch, context in ((1, 1), (16, 1024), (300, 7000)):
        found = page.evaluate(
            """([model, device, batch, context]) => {
              const { MODELS, SHAPE, DEVICES, compute } = roofline;
              const s = Object.fromEntries(SHAPE.map((name, i) => [name, MODELS[model][i + 1]]));
              const [, gb_s, tflop_s, memory_gb] = DEVICES[device];
              return compute({ ...s, gb_s, tflop_s, memory_gb, batch, context, weight_bytes: 2, kv_bytes: 2 });
            }""",
            [model, device, batch, context],
        )
        decode = floor.decode(shape, batch, context, bandwidth, peak)
        prefill = floor.prefill(shape, context, bandwidth, peak)
        weights = 2 * parameters(shape)["total"]
        expected = {
            "weightBytes": weights,
            "kvPerToken": 2 * floor.kv_numbers(shape),
            "kvBytes": decode.kv_bytes,
            "decodeFlops": decode.flops,
            "weightsS": decode.weights_s,
            "kvS": decode.kv_s,
            "operationsS": decode.arithmetic_s,
            "decodeS": decode.seconds,
            "tokensPerS": batch / decode.seconds,
            "prefillS": prefill.seconds,
            "ridge": peak / bandwidth,
        }

        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)
        room = (1e9 * memory - weights) / (2 * floor.kv_numbers(shape) * batch)
        assert found["longest"] == pytest.approx(room, rel=1e-3, abs=1)


def test_fewer_bytes_per_weight_and_per_kv_number_shorten_each_its_part(page):
    page.locator('[name="weight_bytes"]').fill("0.5")
    page.locator('[name="kv_bytes"]').fill("1")

    quarter = floor.decode(config("qwen3-0.6b"), 16, 1024, *H200, weight_itemsize=0.5, kv_itemsize=1)
    text = shown(page, "decode")
    assert f"weights {1e6 * quarter.weights_s:.3g} µs" in text
    assert f"K and V {1e6 * quarter.kv_s:.3g} µs" in text


def test_a_calculation_can_be_shared_by_its_address(page, browser, document):
    page.locator('[name="model"]').select_option("llama-2-7b")
    page.locator('[name="gb_s"]').fill("1000")
    page.locator('[name="batch"]').fill("5")
    address = page.evaluate("location.href")
    assert "model=llama-2-7b" in address
    assert "device=own" in address

    other = browser.new_page()
    other.goto(address)
    values = {name: other.locator(f'[name="{name}"]').input_value() for name in ("model", "device", "gb_s", "batch")}
    assert values == {"model": "llama-2-7b", "device": "own", "gb_s": "1000", "batch": "5"}
    assert shown(other, "decode") == shown(page, "decode")
    other.close()


def test_another_anchor_in_the_address_is_left_alone(page, document):
    page.goto(document.as_uri() + "#three-uses")
    assert page.locator('[name="model"]').input_value() == "qwen3-0.6b"
    assert page.evaluate("location.hash") == "#three-uses"


def test_a_changed_shape_is_no_preset_any_more(page):
    page.locator('[name="kv_heads"]').fill("4")
    assert page.locator('[name="model"]').input_value() == "own"
    assert shown(page, "kv") == "57,344 bytes"  # 2 · 28 layers · 4 heads · 128 · 2 bytes


@pytest.mark.parametrize("wrong", ["", "0", "-3", "1.5"])
def test_a_field_that_is_no_count_is_marked_and_nothing_is_computed_from_it(page, wrong):
    page.locator('[name="layers"]').fill(wrong)

    assert page.locator('[name="layers"]').get_attribute("aria-invalid") == "true"
    assert page.locator("dd[data-name]").count() == 0
    page.locator('[name="layers"]').fill("28")
    assert shown(page, "kv") == "114,688 bytes"


def test_weights_larger_than_the_memory_are_told(page):
    page.locator('[name="model"]').select_option("32b")
    page.locator('[name="device"]').select_option("t4")
    assert shown(page, "longest").startswith("none: the weights alone")


def test_what_binds_follows_the_step(page):
    binding = []
    for batch, context in ((1, 64), (256, 1024), (256, 1)):
        page.locator('[name="batch"]').fill(str(batch))
        page.locator('[name="context"]').fill(str(context))
        binding.append(re.search("weights|K and V|Arithmetic", shown(page, "binds"))[0])

    assert binding == ["weights", "K and V", "Arithmetic"]


def test_every_field_has_a_label_and_is_reached_with_the_tab_key(page):
    fields = page.locator(".roofline :is(input, select)")
    assert page.evaluate("[...document.querySelectorAll('.roofline :is(input, select)')].every(e => e.labels.length)")
    page.keyboard.press("Tab")
    reached = []
    for _ in range(fields.count()):
        reached.append(page.evaluate("document.activeElement.name"))
        page.keyboard.press("Tab")
    assert len(set(reached)) == fields.count()


def test_it_fits_390_pixels(page):
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("document.querySelector('.roofline svg').viewBox.baseVal.width <= 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_script_is_small_and_fetches_nothing():
    text = SCRIPT.read_text(encoding="utf-8")
    assert SCRIPT.stat().st_size < 30_000
    assert not re.search(r"\b(fetch|import|export|XMLHttpRequest)\b", text)
