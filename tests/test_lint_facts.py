"""What `tocsin lint` reads, and the sums of its memory budget: by hand, from config.json files as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import lint_facts, weights
from agent.budget import (
    Layout,
    Ranks,
    budget,
    compute_bytes,
    kv_copies,
    kv_dtype_bytes,
    kv_said,
    kv_sequence_bytes,
    kv_shards,
    kv_token_bytes,
    least_gpus,
    ranks_of,
    shape_of,
)
from agent.weights import Form, Held, form_of
from tests.test_lint import LLAMA_2_7B, LLAMA_3_8B, facts
from tests.test_lint import LLAMA_70B as LLAMA_3_70B
from tests.test_lint import finding as found_on

MISTRAL_7B = {"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000, "sliding_window": 4096,
              "torch_dtype": "bfloat16"}
GEMMA_2_9B = {"model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
              "head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336, "vocab_size": 256000,
              "sliding_window": 4096, "torch_dtype": "float32"}  # the base model is published in 32 bits
GEMMA_3_27B = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "sliding_window": 1024}}
GPT_OSS_120B = {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
                "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088,
                "num_local_experts": 128, "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 18,
                "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
QWEN_2_5_7B = {"model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
               "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064, "sliding_window": 131072,
               "max_window_layers": 28, "use_sliding_window": False, "torch_dtype": "bfloat16"}
DEEPSEEK_V2 = {"model_type": "deepseek_v2", "num_hidden_layers": 60, "num_attention_heads": 128,
               "num_key_value_heads": 128, "hidden_size": 5120, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
               "n_routed_experts": 160, "vocab_size": 102400, "torch_dtype": "bfloat16"}
DEEPSEEK_V3 = {**DEEPSEEK_V2, "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
               "n_routed_experts": 256, "vocab_size": 129280,
               "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}


# --- the KV cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("story", "config", "tokens", "by_hand"), [
    ("a head of its own for each: 2 × 32 × 32 × 128 × 2 B × 4,096", LLAMA_2_7B, 4096, 524_288 * 4096),
    ("8 KV heads: 2 × 80 × 8 × 128 × 2 B × 8,192", LLAMA_3_70B, 8192, 327_680 * 8192),
    ("each layer keeps 4,096 of 32,768: 131,072 B × 4,096", MISTRAL_7B, 32768, 536_870_912),
    ("shorter than the window", MISTRAL_7B, 1000, 131_072 * 1000),
    ("every second of 42: 8,192 B × (21 × 8,192 + 21 × 4,096)", GEMMA_2_9B, 8192, 2_113_929_216),
    ("10 of 62 keep all: 8,192 B × (10 × 131,072 + 52 × 1,024)", GEMMA_3_27B, 131072, 11_173_625_856),
    ("18 of 36 keep 128: 2,048 B × (18 × 131,072 + 18 × 128)", GPT_OSS_120B, 131072, 4_836_556_800),
    ("a window that is off: 2 × 28 × 4 × 128 × 2 B × 32,768", QWEN_2_5_7B, 32768, 57_344 * 32768),
    ("512 + 64 latent numbers in 60 layers: 69,120 B", DEEPSEEK_V2, 4096, 69_120 * 4096),
    ("the same in 61: 70,272 B", DEEPSEEK_V3, 65536, 70_272 * 65536),
])
def test_what_a_sequence_takes_of_the_kv_cache(story: str, config: dict[str, Any], tokens: int, by_hand: int) -> None:
    """A layer with a window keeps that of it and no more; counted in full Gemma 3 would take 66.6 GB, not 11.2."""
    shape = shape_of(config)
    assert shape is not None, story
    assert kv_sequence_bytes(shape, 2.0, tokens) == by_hand, story


def test_with_the_hybrid_manager_off_every_layer_keeps_every_token() -> None:
    """--disable-hybrid-kv-cache-manager on Gemma 3 27B: 62 × 8,192 B × 131,072 = 66.6 GB a sequence."""
    shape, ranks = shape_of(GEMMA_3_27B), ranks_of({"disable-hybrid-kv-cache-manager": ""})
    assert shape is not None
    assert kv_sequence_bytes(shape, 2.0, 131072, is_whole=ranks.is_whole) == 66_571_993_088
    assert kv_said(shape, 2.0, is_whole=True) == \
        "a token takes 507,904 bytes of KV cache (2 × 62 layers × 16 KV heads × 128 × 2 bytes)"


@pytest.mark.parametrize(("config", "said"), [
    (LLAMA_3_70B, "a token takes 327,680 bytes of KV cache (2 × 80 layers × 8 KV heads × 128 × 2 bytes)"),
    (DEEPSEEK_V3, "a token takes 70,272 bytes of KV cache (61 layers × 576 latent numbers × 2 bytes)"),
    (MISTRAL_7B, ("32 layers keep the last 4,096 tokens of a sequence alone: 537 MB at most"
                 " (2 × 32 layers × 8 KV heads × 128 × 2 bytes × 4,096)")),
    (GEMMA_3_27B, ("a token takes 81,920 bytes of KV cache (2 × 10 layers × 16 KV heads × 128 × 2 bytes);"
                  " 52 layers keep the last 1,024 tokens of a sequence alone: 436 MB at most"
                  " (2 × 52 layers × 16 KV heads × 128 × 2 bytes × 1,024)")),
])
def test_the_sum_as_a_person_would_write_it(config: dict[str, Any], said: str) -> None:
    """52 × 8,192 B × 1,024 = 436 MB."""
    shape = shape_of(config)
    assert shape is not None
    assert kv_said(shape, 2.0) == said


@pytest.mark.parametrize(("story", "more"), [
    ("Qwen3-Next: three of four layers keep a state", {"full_attention_interval": 4}),
    ("Nemotron-H", {"hybrid_override_pattern": "M-M-M*-"}),
    ("Jamba", {"attn_layer_period": 8}),
    ("Gemma 4: global layers have other heads", {"global_head_dim": 512}),
    ("DeepSeek-V3.2: an index beside the latent", {"kv_lora_rank": 512, "index_topk": 2048}),
    ("layers that are told", {"layer_types": ["linear_attention", "full_attention"]}),
])
def test_a_model_whose_layers_differ_has_no_answer_rather_than_a_wrong_one(story: str, more: dict[str, Any]) -> None:
    """Counted as attention in every layer, Qwen3-Next would need four times its KV cache."""
    assert shape_of({**LLAMA_3_70B, **more}) is None, story


def test_layers_that_use_another_s_keys_keep_none() -> None:
    """Gemma 3n E4B: 35 layers, the last 15 share; of the first 20 every fifth attends to all: 4, and 16 with a window.

    2 × 2 KV heads × 256 × 2 B = 2,048 B: 4 × 32,768 tokens and 16 × 512 make 285 MB.
    """
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    shape = shape_of({"text_config": {"num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
                                      "head_dim": 256, "hidden_size": 2048, "num_kv_shared_layers": 15,
                                      "sliding_window": 512, "layer_types": kinds}})
    assert shape is not None
    assert (shape.layers, shape.full, shape.windowed) == (20, 4, 16)
    assert kv_sequence_bytes(shape, 2.0, 32768) == 2048 * (4 * 32768 + 16 * 512) == 285_212_672


# --- how an engine is spread -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("story", "options", "gpus", "ranks"), [
    ("one GPU", {}, 1.0, Ranks()),
    ("nobody says how: over all that it computes on", None, 4.0, Ranks(4)),
    ("two engines share eight GPUs out", {"data-parallel-size": "2"}, 8.0, Ranks(4, 1, 2)),
    ("eight engines, a GPU each", {"data-parallel-size": "8", "tensor-parallel-size": "1"}, 8.0, Ranks(1, 1, 8)),
    ("its words count, not NVML's: two nodes", {"tp": "8", "pp": "2"}, 8.0, Ranks(8, 2)),
    ("stages alone", {"pipeline-parallel-size": "4"}, 4.0, Ranks(1, 4)),
    ("vLLM's decode context parallel", {"tensor-parallel-size": "8", "dcp": "8"}, 8.0, Ranks(8, 1, 1, 8)),
    ("SGLang's attention that is data parallel", {"tp-size": "16", "dp-size": "8", "enable-dp-attention": ""}, 8.0,
     Ranks(16, 1, 1, 8)),
    ("a word that is no number", {"tensor-parallel-size": "auto"}, 2.0, Ranks(2)),
])
def test_how_an_engine_is_spread(story: str, options: dict[str, str] | None, gpus: float, ranks: Ranks) -> None:
    """Weights are divided by TP × PP; the other engines of data parallelism hold weights of their own."""
    assert ranks_of(options, gpus) == ranks, story


@pytest.mark.parametrize(("story", "config", "ranks", "copies"), [
    ("8 KV heads on 8 ranks: one each", LLAMA_3_70B, Ranks(8), 1),
    ("8 KV heads on 16: each has two", LLAMA_3_70B, Ranks(16), 2),
    ("stages split layers, not heads", LLAMA_3_70B, Ranks(8, 2), 1),
    ("4 KV heads on 8", QWEN_2_5_7B, Ranks(8), 2),
    ("the latent cannot be split: all 8 have all of it", DEEPSEEK_V3, Ranks(8), 8),
    ("but for decode context parallel, which splits the tokens", DEEPSEEK_V3, Ranks(8, 1, 1, 8), 1),
    ("16 ranks, sequences on 8 groups of 2", DEEPSEEK_V3, Ranks(16, 1, 1, 8), 2),
])
def test_what_tensor_parallelism_cannot_split_is_on_every_rank(story: str, config: dict[str, Any], ranks: Ranks,
                                                               copies: int) -> None:
    """vLLM: KV heads a rank = max(1, KV heads // ranks), and one for MLA."""
    shape = shape_of(config)
    assert shape is not None
    assert kv_copies(shape, ranks) == copies, story


def test_deepseek_v3_on_eight_cards_of_141_gb() -> None:
    """688.6 GB of weights ÷ 8 = 86.1; 16 × 32,768 tokens × 70,272 B = 36.8 GB on each of them: 124, 149 with headroom.

    Divided by eight, as heads are, it seemed to fit: 86.1 + 4.6 + 1.5 = 92.2, 111 with headroom.
    """
    shape = shape_of(DEEPSEEK_V3)
    assert shape is not None
    kv = 16 * kv_sequence_bytes(shape, 2.0, 32768)
    assert kv == 16 * 32768 * 70_272 == 36_842_766_336
    sum_ = budget(weights=688.6e9, kv=kv, gpu_bytes=141e9, gpus=8, copies=kv_copies(shape, Ranks(8)))
    assert (sum_.kv_bytes, round(sum_.need_bytes / 1e9), sum_.fits) == (kv, 149, False)
    assert round(budget(weights=688.6e9, kv=kv, gpu_bytes=141e9, gpus=8).need_bytes / 1e9) == 111
    # More ranks never make its KV cache smaller, stages do: 4 × 2 hold 86.1 + 18.4 + 1.5 = 106, 127 with headroom;
    # of four times as much each of 1 × 8 holds an eighth: 86.1 + 18.4 + 1.5 again
    shards = kv_shards(shape, Ranks())
    assert least_gpus(weights=688.6e9, kv=kv, gpu_bytes=141e9, shards=shards) == Layout(4, 2)
    assert least_gpus(weights=688.6e9, kv=4 * kv, gpu_bytes=141e9, shards=shards) == Layout(1, 8)
    assert least_gpus(weights=64 * 141e9, kv=kv, gpu_bytes=141e9, shards=shards) is None


def test_stages_are_counted_with_the_ranks() -> None:
    """141 GB in two stages: TP 1 has 70.6 + 1.5 GB a card, 86.5 with headroom; TP 2 35.3 + 1.5, 44.1: it fits in 80."""
    assert least_gpus(weights=141.1e9, kv=0.0, gpu_bytes=80e9, pipeline=2) == Layout(2, 2)


ANY_JSON = st.sampled_from([None, True, -2, 0, 7, 10**12, 0.5, float("nan"), "", "fp8", [], [1], ["full_attention", {}],
                            {}, {"a": None}, {"a": {"input_tensors": 1}}])
KEYS = st.sampled_from(sorted({*LLAMA_3_8B, *GPT_OSS_120B, *QWEN_2_5_7B, *DEEPSEEK_V3, "text_config", "head_dim",
                               "config_groups", "global_quant_config", "layer_quant_config", "quant_algo", "act_bits",
                               "num_kv_shared_layers", "sliding_window_pattern", "compression_config"}))
ANY_CONFIG = st.dictionaries(KEYS, ANY_JSON | st.dictionaries(KEYS, ANY_JSON, max_size=4), max_size=8)


@settings(max_examples=60, deadline=None)
@given(told=ANY_CONFIG, flag=st.sampled_from(["", "fp8", "quark", "compressed-tensors"]))
def test_a_config_of_any_form_is_read_or_not_and_breaks_nothing(told: dict[str, Any], flag: str) -> None:
    """A folder holds what somebody wrote: lint answers for the other engines all the same."""
    for config in (told, {**LLAMA_3_8B, **told}):
        shape = shape_of(config)
        weights.held(shape, form_of(flag, config), files_bytes=1e9)
        if shape is not None:
            assert 0 <= shape.windowed <= shape.layers
            assert kv_said(shape, 2.0)
            assert kv_copies(shape, Ranks(8)) >= 1


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("story", "config", "cache", "dtype", "size"), [
    ("as published", LLAMA_3_8B, "auto", "auto", 2.0),
    ("a float32 model runs in 16 bits", GEMMA_2_9B, "auto", "auto", 2.0),
    ("unless told", GEMMA_2_9B, "auto", "float32", 4.0),
    ("its cache in 8 bits", GEMMA_2_9B, "fp8_e4m3", "auto", 1.0),
    ("a form of the cache that we do not know", GEMMA_2_9B, "turboquant_4bit_nc", "auto", None),
])
def test_bytes_of_a_number_in_the_kv_cache(story: str, config: dict[str, Any], cache: str, dtype: str,
                                           size: float | None) -> None:
    """vLLM 0.32's _resolve_auto_dtype: a float32 checkpoint is computed as bfloat16 (float16 where there is none)."""
    shape = shape_of(config)
    assert shape is not None
    assert kv_dtype_bytes(shape, cache, dtype) == size, story


PARAMETERS_8B = 8_030_261_248  # Llama 3 8B, as its model card has it: 8.03 billion
ENDS_8B = 2 * 128256 * 4096  # 1,050,673,152


@pytest.mark.parametrize(("story", "more", "flag", "dtype", "files_bytes", "by_hand", "by"), [
    ("its files are what it holds", {}, "", "auto", 2 * PARAMETERS_8B, 2 * PARAMETERS_8B, "its files"),
    ("no file is seen", {}, "", "auto", None, 2 * PARAMETERS_8B, "8,030,261,248 parameters"),
    ("no file, 32 bits", {"torch_dtype": "float32"}, "", "auto", None, 2 * PARAMETERS_8B, "8,030,261,248 parameters"),
    ("no file, 32 bits wished for", {"torch_dtype": "float32"}, "", "float32", None, 4 * PARAMETERS_8B,
     "8,030,261,248 parameters"),
    ("files of 32 bits", {"torch_dtype": "float32"}, "", "auto", 4 * PARAMETERS_8B, 2 * PARAMETERS_8B,
     "its files of 32 bits a number, held in 16"),
    ("files of 32 bits, whatever its config says", {}, "", "auto", 4 * PARAMETERS_8B, 2 * PARAMETERS_8B,
     "its files of 32 bits a number, held in 16"),
    ("FP8 at load: embedding and output stay in 16 bits", {}, "fp8", "auto", 2 * PARAMETERS_8B,
     PARAMETERS_8B - ENDS_8B + 2 * ENDS_8B, "its files, quantized to fp8 at load"),
    ("the same without its files", {}, "fp8", "auto", None, PARAMETERS_8B - ENDS_8B + 2 * ENDS_8B,
     "8,030,261,248 parameters, quantized to fp8 at load"),
    ("a checkpoint that is FP8 already", {"quantization_config": {"quant_method": "fp8"}}, "fp8", "auto",
     9_081_000_000, 9_081_000_000, "its files"),
    ("experts alone: a dense model has none", {}, "int8_per_channel_weight_only", "auto", 2 * PARAMETERS_8B,
     2 * PARAMETERS_8B, "its files"),
])
def test_what_weights_take_once_they_are_loaded(story: str, more: dict[str, Any], flag: str, dtype: str,
                                                files_bytes: float | None, by_hand: float, by: str) -> None:
    """Llama 3 8B in FP8 has 9.08 GB, as such checkpoints on the Hub have: 6.98 billion of one byte, 1.05 of two."""
    config = {**LLAMA_3_8B, **more}
    found = weights.held(shape_of(config), form_of(flag, config), files_bytes=files_bytes, dtype=dtype)
    assert found == Held(by_hand, by), story


def test_of_a_quantized_model_without_its_files_nothing_is_made_up() -> None:
    """AWQ, GPTQ and MXFP4 leave some layers as they are: which, the files know."""
    config = {**LLAMA_3_8B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert weights.held(shape_of(config), form_of("", config)) is None
    assert weights.held(None, form_of("fp8", None), files_bytes=5e9) == Held(5e9, "its files")


def group(activations: object) -> dict[str, Any]:
    """A compressed-tensors checkpoint of one group."""
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": activations}}}}


def quark(inputs: object, layer: object = None) -> dict[str, Any]:
    """A checkpoint of AMD's Quark."""
    return {"quantization_config": {"quant_method": "quark", "export": {"kv_cache_group": []}, "layer_quant_config": {
        "*down_proj": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": layer}} if layer else {},
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": inputs}}}


FP8 = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor"}


@pytest.mark.parametrize(("story", "flag", "config", "form"), [
    ("not at all", "", {}, Form("")),
    ("weights alone, although the flag could be either", "compressed-tensors", group(None),
     Form("compressed-tensors", False)),
    ("both", "compressed-tensors", group({"num_bits": 8}), Form("compressed-tensors", True)),
    ("both, without the flag", "", group({"num_bits": 8}), Form("compressed-tensors", True)),
    ("the flag, and a config that cannot be read", "compressed-tensors", None, Form("compressed-tensors", None)),
    ("Quark FP8", "quark", quark(FP8), Form("quark", True)),
    ("Quark FP8, one layer's inputs alone", "", quark(None, FP8), Form("quark", True)),
    ("Quark, weights alone", "", quark(None), Form("quark", False)),
    ("the flag of Quark alone", "quark", None, Form("quark", None)),
    ("Marlin kernels for AWQ", "awq_marlin", {"quantization_config": {"quant_method": "awq"}}, Form("awq_marlin")),
    ("gpt-oss", "", GPT_OSS_120B, Form("mxfp4")),
    ("DeepSeek-V3", "", DEEPSEEK_V3, Form("fp8", True)),
    ("ModelOpt FP8", "", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
     Form("modelopt", True)),
    ("ModelOpt W4A16", "", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}},
     Form("modelopt", False)),
    ("torchao INT4, weights alone", "torchao", {"quantization_config": {"quant_method": "torchao", "quant_type": {
        "default": {"_type": "Int4WeightOnlyConfig"}}}}, Form("torchao", False)),
    ("a vision model says it of its text", "", {"text_config": group({"num_bits": 8})},
     Form("compressed-tensors", True)),
    ("FP8 at load", "fp8", LLAMA_3_8B, Form("fp8", True, at_load=True)),
    ("INT8 of experts' weights at load", "experts_int8", LLAMA_3_8B, Form("experts_int8", False, at_load=True)),
])
def test_whether_activations_are_quantized(story: str, flag: str, config: dict[str, Any] | None, form: Form) -> None:
    """The checkpoint's own word first: compressed-tensors and Quark hold either, under one name."""
    assert form_of(flag, config) == form, story


def write(folder: Path, sizes: dict[str, int], index: dict[str, str] | None = None) -> Path:
    """A model's folder with files of so many bytes."""
    for name, size in sizes.items():
        (folder / name).write_bytes(b"\0" * size)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


SHARDS = {"model-00001-of-00002.safetensors": 500, "model-00002-of-00002.safetensors": 300}
INDEX = dict(zip(("embed_tokens.weight", "lm_head.weight"), SHARDS, strict=True))


@pytest.mark.parametrize(("story", "sizes", "index", "size"), [
    ("Mistral 7B Instruct v0.3: the same weights twice", {**SHARDS, "consolidated.safetensors": 801}, None, 800),
    ("the index says which", {**SHARDS, "consolidated.safetensors": 801, "adapter_model.safetensors": 7}, INDEX, 800),
    ("an index of files that are not there", {"model.safetensors": 600}, INDEX, 600),
    ("in Mistral's own form alone", {"consolidated.safetensors": 801}, None, 801),
    ("with what the trainer left", {"pytorch_model.bin": 700, "training_args.bin": 5}, None, 700),
    ("safetensors before pickles", {**SHARDS, "pytorch_model.bin": 800}, None, 800),
    ("nothing", {}, None, None),
])
def test_weights_that_are_there_twice_count_once(story: str, sizes: dict[str, int], index: dict[str, str] | None,
                                                 size: float | None, tmp_path: Path) -> None:
    """The engine loads one of them."""
    assert lint_facts._weights_in(write(tmp_path, sizes, index)) == size, story


def test_an_index_that_is_torn_is_none(tmp_path: Path) -> None:
    """A download that ended halfway: the files count, without the second form of them."""
    write(tmp_path, {**SHARDS, "consolidated.safetensors": 801})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"emb')
    assert lint_facts._weights_in(tmp_path) == 800.0


# --- the second principle, and what the sixth asks of the form ------------------------------------------------------


def finding(number: int, model: dict[str, Any] | None, options: dict[str, str], **more: Any) -> dict[str, Any]:
    """What lint says of a vLLM."""
    return found_on(number, facts(options, model=model, **more))


def test_what_the_engine_tells_in_bytes_is_one_rank_s() -> None:
    """70B on four: 400,000 tokens × 327,680 B = 131 GB; each rank has a quarter of it, 32.8 GB, and tells that."""
    found = finding(2, LLAMA_3_70B, {"tensor-parallel-size": "4", "max-num-seqs": "16"}, context_tokens=8192.0, cache={
        "kv_cache_size_tokens": "400000", "kv_cache_memory_bytes": "32768000000"})
    assert "its KV cache holds 400,000 tokens, 131 GB" in found["evidence"]
    assert "asked for at most: 16 sequences × 8,192 tokens = 131,072 tokens, 42.9 GB" in found["evidence"]


@pytest.mark.parametrize(("story", "model", "options", "said"), [
    ("layers with windows: blocks are shared out, so what is told × ranks: 2 × 30 GB", GEMMA_3_27B,
     {"tensor-parallel-size": "2"}, "its KV cache holds 400,000 tokens, 60 GB"),
    ("nobody knows the model", None, {"tensor-parallel-size": "2"}, "its KV cache holds 400,000 tokens, 60 GB"),
    ("a latent that each of eight has: 400,000 × 70,272 B", DEEPSEEK_V3, {"tensor-parallel-size": "8"},
     "its KV cache holds 400,000 tokens, 28.1 GB"),
])
def test_bytes_of_a_kv_cache_over_all_ranks(story: str, model: dict[str, Any] | None, options: dict[str, str],
                                            said: str) -> None:
    """Each key and value once. The capacity is the engine's word: blocks × 16 are more where layers have windows."""
    found = finding(2, model, options, numbers={"capacity_tokens": 900_000.0}, cache={
        "kv_cache_size_tokens": "400000", "kv_cache_memory_bytes": "30000000000"})
    assert said in "; ".join(found["evidence"]), story


def test_a_cache_of_far_more_than_is_asked_for_is_told_in_times() -> None:
    """4 × 1,024 tokens of 4,194,304, as of the real vLLM in docs/lint.md: it said "102300 % more"."""
    found = finding(2, None, {"max-num-seqs": "4"}, context_tokens=1024.0, numbers={"capacity_tokens": 4_194_304.0})
    assert (found["verdict"], found["evidence"][-1]) == (
        "kept", "1,024 times what is asked for")


def test_each_engine_of_data_parallelism_has_all_the_weights() -> None:
    """8B on eight cards of 24 GB, an engine each: 16.1 + 4 × 8,192 × 131,072 B (4.29 GB) + 1.5 = 21.9, × 1.2 = 26.2.

    Divided by eight it was 2 GB of weights, and kept. Two of four find room: 20 − 16.1 − 1.5 = 2.4 GB, of 1.07 each.
    """
    found = finding(2, LLAMA_3_8B, {"max-num-seqs": "4", "data-parallel-size": "8"}, context_tokens=8192.0,
                    weight_bytes=2.0 * PARAMETERS_8B, numbers={"gpu_bytes": 24e9, "gpus": 8.0})
    assert (found["verdict"], found["evidence"][-1].split(";")[0]) == (
        "cannot tell", "2 of 4 sequences of full length find room at once")
    assert found["evidence"][0] == (
        "with all sequences at full length weights 16.1 GB + KV cache 4.29 GB + an assumed 1.5 GB of temporaries"
        " on the GPU, with 20 % headroom 26.2 GB of 24 GB (weights by its files)")


def test_experts_are_spread_over_data_parallelism_and_the_rest_is_not() -> None:
    """V3, eight engines on eight cards: 688.6 ÷ 8 = 86.1 GB of weights at least, 688.6 at most; KV 9.2 GB, 1.5 more.

    With headroom 116 to 839 GB of 141: of its files nobody can tell.
    """
    options = {"max-num-seqs": "4", "data-parallel-size": "8", "enable-expert-parallel": ""}
    found = finding(2, DEEPSEEK_V3, options, context_tokens=32768.0, weight_bytes=688.6e9,
                    numbers={"gpu_bytes": 141e9, "gpus": 8.0})
    assert found["verdict"] == "cannot tell"
    assert found["evidence"][0].startswith("between 116 GB and 839 GB of 141 GB on a GPU, with headroom: experts are")


def test_where_neither_fits_experts_that_may_be_spread_are_not_refused() -> None:
    """Of 117.5 GB 29.9 are left where experts are spread, for twelve sequences of 2.3 GB; nothing where they are not.

    256 seats fit in neither: by the unspread 688.6 GB not one found room, beside "100 ran at once".
    """
    options = {"max-num-seqs": "256", "data-parallel-size": "8", "enable-expert-parallel": ""}
    found = finding(2, DEEPSEEK_V3, options, context_tokens=32768.0, weight_bytes=688.6e9,
                    numbers={"gpu_bytes": 141e9, "gpus": 8.0, "sequences": 100.0, "kv_usage": 0.84,
                             "watched_s": 3600.0})
    assert found["verdict"] == "cannot tell"
    assert found["evidence"][0].startswith("room for between 0 and 12 sequences of full length: experts are spread")


def test_refused_with_its_experts_spread_too_nobody_says_on_how_few_gpus() -> None:
    """Two engines on two cards: 344 GB on a card of 141 where experts are spread, and how many are is not told."""
    options = {"max-num-seqs": "4", "data-parallel-size": "2", "enable-expert-parallel": ""}
    found = finding(2, DEEPSEEK_V3, options, context_tokens=32768.0, weight_bytes=688.6e9,
                    numbers={"gpu_bytes": 141e9, "gpus": 2.0})
    assert (found["verdict"], found["change"]) == ("at odds", "more GPUs, or a smaller or quantized model")


def test_a_latent_is_on_every_rank() -> None:
    """V3 on eight cards: of 141 ÷ 1.2 = 117.5 GB are 29.9 left beside 86.1 + 1.5, for twelve sequences of 2.3 GB."""
    found = finding(2, DEEPSEEK_V3, {"max-num-seqs": "16", "tensor-parallel-size": "8"}, context_tokens=32768.0,
                    weight_bytes=688.6e9, numbers={"gpu_bytes": 141e9, "gpus": 8.0})
    assert (found["verdict"], found["evidence"][-1].split(";")[0]) == (
        "cannot tell", "12 of 16 sequences of full length find room at once")
    assert "the latent numbers cannot be split: of 8 ranks 8 each hold the same" in found["evidence"]


def test_quantized_while_it_is_loaded_it_fits() -> None:
    """8B on 16 GB: 16.1 GB of files, 9.08 GB as FP8, + 2 × 8,192 × 131,072 B (2.15 GB) + 1.5 = 12.7, × 1.2 = 15.3."""
    options = {"max-num-seqs": "2", "quantization": "fp8"}
    found = finding(2, LLAMA_3_8B, options, context_tokens=8192.0, weight_bytes=2.0 * PARAMETERS_8B,
                    numbers={"gpu_bytes": 16e9, "gpus": 1.0})
    assert (found["verdict"], found["evidence"][0]) == ("kept", (
        "weights 9.08 GB + KV cache 2.15 GB + an assumed 1.5 GB of temporaries on the GPU, with 20 % headroom 15.3 GB"
        " of 16 GB (weights by its files, quantized to fp8 at load)"))


@pytest.mark.parametrize(("story", "flag", "config", "word"), [
    ("weights alone bear outliers", "compressed-tensors", group(None), "kept"),
    ("activations too, unmeasured", "compressed-tensors", group({"num_bits": 8}), "at odds"),
    ("Quark FP8, unmeasured", "quark", quark(FP8), "at odds"),
    ("nobody can read which", "compressed-tensors", None, "cannot tell"),
])
def test_the_sixth_principle_asks_the_checkpoint(story: str, flag: str, config: dict[str, Any] | None,
                                                 word: str) -> None:
    """The flag names a file format, not what is quantized."""
    assert finding(6, config, {"quantization": flag})["verdict"] == word, story


# --- the evidence file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "fault"), [
    ("'*': {streamed: 20}", r"\*: streamed: 20 is not a share from 0 to 1; write 0.2 for 20 %"),
    ("'*': {streamed: -0.1}", "streamed: -0.1 is not a share from 0 to 1; write 0.97 for 97 %"),
    ("'*': {streamed: .nan}", "streamed: nan is not a share"),
    ("llama: {score_before: 0.712, score_after: 0.66}",
     "llama: score_before: 0.712 is not points of 100, over 1; write 71.2"),
    ("llama: {score_before: 712}", "score_before: 712 is not points of 100, over 1; write 71.2 for 71.2 of 100 points"),
    ("llama: {outlier_ratio: 0.4}", "outlier_ratio: 0.4 is not a largest number ÷ the mean, 1 or more; write 38"),
    ("llama: {outlier_ratio: .inf}", "outlier_ratio: inf is not a largest number"),
])
def test_evidence_in_another_unit_is_refused_with_what_to_write(text: str, fault: str, tmp_path: Path) -> None:
    """20 for 20 % was printed as 2000 %; 0.712 and 0.66 lost "0.052 points" of quality, in truth 5.2."""
    path = tmp_path / "evidence.yaml"
    path.write_text(text)
    with pytest.raises(lint_facts.Unusable, match=fault) as raised:
        lint_facts.evidence_in(path, must=True)
    assert str(raised.value).startswith(f"{path}: ")


def test_evidence_in_its_units_is_taken(tmp_path: Path) -> None:
    """As docs/lint.md has it."""
    path = tmp_path / "evidence.yaml"
    path.write_text("'*': {streamed: 0.97}\nllama-70b: {outlier_ratio: 38, score_before: 71.2, score_after: 70.9}\n")
    found = lint_facts.evidence_in(path, must=True)
    assert (found["*"].streamed, found["llama-70b"].outlier_ratio, found["llama-70b"].score_after) == (0.97, 38.0, 70.9)


def test_a_token_in_every_layer_is_what_the_engine_counts() -> None:
    """The engine test compares this with a real vLLM: it must not change with windows."""
    shape = shape_of(LLAMA_2_7B)
    assert shape is not None
    assert (kv_token_bytes(shape, 2.0), compute_bytes(shape)) == (524_288.0, 2.0)
