"""The memory budget of a model on its GPUs: weights + KV cache + temporaries + 20 % headroom (principle 2). Pure.

GB is 10^9 bytes. The KV line is ours: 2 × layers × KV heads × head size × bytes of a number, a token. The seed's own
line cannot be used: for Llama-2-7B (32 layers, 4,096 tokens, 32 sequences, 2 bytes) its printed numbers (128 in the
place of the hidden size) make 2.1 GB, its formula with the hidden size of 4,096 makes 68.7 GB, and its text says 8 GB.
For that model ours is 68.7 GB, too: each of its 32 heads keeps keys and values. A real vLLM holds exactly as many
tokens as ours says (tests/engine/test_probe.py).

A layer with a sliding window keeps that window of each sequence and no more. vLLM sets aside what it computes in a
step beside it (SlidingWindowSpec), so that it tells a smaller capacity than the windows alone would give. It keeps
such a layer whole where its hybrid KV cache manager is off (Ranks.is_whole) and, as of 0.32, where the layer attends
by chunks (Llama 4). What tensor parallelism cannot split is on every rank: KV heads fewer than ranks, MLA's latent
numbers (kv_cache_utils.py, get_num_kv_heads).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.advise import gb

HEADROOM = 0.2  # principle 2
NODE_GPUS = 8  # tensor parallelism asks for NVLink between all its ranks
TEMPORARIES_BYTES = 1.5e9  # principle 2: 1 to 2 GB
BYTES_OF: Mapping[str, float] = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0,
                                 "fp8": 1.0, "int8": 1.0, "int4": 0.5}
NOT_ATTENTION = frozenset({"linear_attention", "mamba", "recurrent"})  # layers that keep a state, not keys and values
# Keys of a config.json with which layers differ in what they keep: a state, other heads, an index beside the latent.
UNEVEN = ("attn_layer_indices", "attn_layer_period", "attn_type_list", "block_configs", "full_attention_interval",
          "global_head_dim", "hybrid_layer_pattern", "hybrid_override_pattern", "index_topk", "layers_block_type",
          "linear_attn_config", "mamba_d_state", "num_global_key_value_heads", "ssm_state_size",
          "swa_num_key_value_heads")
# Every n-th layer attends to all, the others to a window, where a published config.json does not say it (transformers).
FULL_EVERY: Mapping[str, int] = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
MOST = 10**15  # ours: no GPU has so many bytes, no model so many tokens; a number beyond it is none


def number_of(told: object) -> float | None:
    """A number as a page, a file or a command line tells it; None: none, less than 0, NaN, or over MOST.

    Words are whole numbers in ASCII digits: "²".isdigit() is true, and float("²") raises.
    """
    if isinstance(told, str):
        return number_of(int(told)) if told.isascii() and told.isdigit() and len(told) <= len(str(MOST)) else None
    if isinstance(told, bool) or not isinstance(told, int | float):
        return None
    return float(told) if 0 <= told <= MOST else None


class Shape(NamedTuple):
    """A model as its config.json has it. `layers`: those that keep keys and values of their own.

    `latent`: numbers that a layer keeps of a token in place of both (MLA). `windowed`: of the layers, those that keep
    the last `window` tokens of a sequence alone. `ends`: parameters of embedding and output.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    parameters: float | None = None
    latent: int | None = None
    windowed: int = 0
    window: int = 0
    ends: float = 0.0
    experts: bool = False

    @property
    def full(self) -> int:
        """Layers that keep every token."""
        return self.layers - self.windowed

    @property
    def numbers(self) -> int:
        """What a layer keeps of a token."""
        return self.latent or 2 * self.kv_heads * self.head_dim


class Ranks(NamedTuple):
    """How one engine is spread over GPUs. `data`: engines that share the GPUs out (data parallel).

    `apart`: ranks that share out the tokens of what they would all hold (decode context parallel, attention that is
    data parallel). `is_whole`: layers with a window keep every token.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    apart: int = 1
    is_whole: bool = False

    @property
    def gpus(self) -> int:
        """Of one engine."""
        return self.tensor * self.pipeline


class Budget(NamedTuple):
    """Bytes on each GPU, what there is, and what is left when the headroom is kept (negative: refused)."""

    weight_bytes: float
    kv_bytes: float
    temporary_bytes: float
    gpu_bytes: float
    gpus: int

    @property
    def need_bytes(self) -> float:
        """With the headroom."""
        return (1 + HEADROOM) * (self.weight_bytes + self.kv_bytes + self.temporary_bytes)

    @property
    def fits(self) -> bool:
        """Whether it fits with the headroom."""
        return self.need_bytes <= self.gpu_bytes

    @property
    def said(self) -> str:
        """The sum, as a person would write it."""
        each = "a GPU" if self.gpus > 1 else "the GPU"
        return (f"weights {gb(self.weight_bytes)} + KV cache {gb(self.kv_bytes)} + an assumed"
                f" {gb(self.temporary_bytes)} of temporaries on {each}, with {HEADROOM * 100:.0f} % headroom"
                f" {gb(self.need_bytes)} of {gb(self.gpu_bytes)}")


def budget(*, weights: float, kv: float, gpu_bytes: float, gpus: int = 1, copies: float = 1.0,
           temporaries: float = TEMPORARIES_BYTES) -> Budget:
    """What weights and KV cache (bytes over all ranks) take of each of `gpus` GPUs of `gpu_bytes`.

    `copies`: how many ranks hold the same keys and values (kv_copies).
    """
    return Budget(weights / gpus, kv * copies / gpus, temporaries, gpu_bytes, gpus)


class Layout(NamedTuple):
    """Ranks of tensor parallelism, and pipeline stages of so many."""

    tensor: int
    pipeline: int


def least_gpus(*, weights: float, kv: float, gpu_bytes: float, shards: float = 64.0, pipeline: int = 1,
               most: int = 64) -> Layout | None:
    """On how few GPUs it fits, by powers of two; None: not even on `most`. More ranks before more stages, in a node.

    `shards`: ranks that share the KV cache out, more hold copies (kv_shards). `pipeline`: stages as it is now, the
    least. Over a node's 8 GPUs it takes stages: they split layers, so that no keys are held twice.
    """
    layouts = [Layout(2**n, pipeline * 2**m) for n in range(NODE_GPUS.bit_length()) for m in range(most.bit_length())]
    for layout in sorted(layouts, key=lambda one: (one.tensor * one.pipeline, one.pipeline)):
        gpus = layout.tensor * layout.pipeline
        if gpus <= most and budget(weights=weights, kv=kv, gpu_bytes=gpu_bytes, gpus=gpus,
                                   copies=max(1.0, layout.tensor / shards)).fits:
            return layout
    return None


def ranks_of(options: Mapping[str, str] | None, gpus: float | None = None) -> Ranks:
    """How an engine is spread, by its command line (names without dashes), else over all `gpus` that it computes on."""
    def told(*names: str) -> int | None:
        sizes = [number_of((options or {}).get(name)) for name in names]
        return next((int(size) for size in sizes if size), None)

    data = told("data-parallel-size", "dp-size", "dp") or 1
    tensor = told("tensor-parallel-size", "tp-size", "tp", "num-shard")
    pipeline = told("pipeline-parallel-size", "pp-size", "pp")
    apart = told("decode-context-parallel-size", "dcp") or 1
    if "enable-dp-attention" in (options or {}):  # SGLang: one engine, whose ranks hold sequences of their own
        data, apart = 1, data
    if tensor is None and pipeline is None:
        tensor = max(1, int(number_of(gpus) or 1) // data)
    whole = {"disable-hybrid-kv-cache-manager", "disable-hybrid-swa-memory", "swa-full"}
    return Ranks(tensor or 1, pipeline or 1, data, apart, not whole.isdisjoint(options or {}))


def kv_shards(shape: Shape, ranks: Ranks) -> float:
    """Tensor-parallel ranks that share the KV cache out; each beyond them holds a copy."""
    return (1.0 if shape.latent else float(shape.kv_heads)) * ranks.apart


def kv_copies(shape: Shape, ranks: Ranks) -> float:
    """How many ranks hold the same keys and values. MLA on 8 ranks: 8; 8 KV heads on 16 ranks: 2."""
    return max(1.0, ranks.tensor / kv_shards(shape, ranks))


def kv_token_bytes(shape: Shape, dtype_bytes: float) -> float:
    """KV bytes of one token over all ranks, while every layer keeps it."""
    return shape.layers * shape.numbers * dtype_bytes


def kv_sequence_bytes(shape: Shape, dtype_bytes: float, tokens: float, *, is_whole: bool = False) -> float:
    """KV bytes of a sequence of so many tokens over all ranks: a layer with a window keeps its last ones alone."""
    kept = tokens if is_whole else min(tokens, shape.window)
    return (shape.full * tokens + shape.windowed * kept) * shape.numbers * dtype_bytes


def kv_said(shape: Shape, dtype_bytes: float, *, is_whole: bool = False) -> str:
    """What a token takes, as a person would write the sum, and what the layers with a window take of a sequence."""
    def line(layers: int) -> str:
        if shape.latent:
            return f"{layers} layers × {shape.latent} latent numbers × {dtype_bytes:g} bytes"
        return f"2 × {layers} layers × {shape.kv_heads} KV heads × {shape.head_dim} × {dtype_bytes:g} bytes"

    full = shape.layers if is_whole else shape.full
    said = [f"a token takes {full * shape.numbers * dtype_bytes:,.0f} bytes of KV cache ({line(full)})"] if full else []
    if not is_whole and shape.windowed:
        window = shape.windowed * shape.numbers * dtype_bytes * shape.window
        said.append(f"{shape.windowed} layers keep the last {shape.window:,} tokens of a sequence alone:"
                    f" {gb(window)} at most ({line(shape.windowed)} × {shape.window:,})")
    return "; ".join(said)


def kv_dtype_bytes(shape: Shape, cache_dtype: str = "auto", dtype: str = "auto") -> float | None:
    """Bytes of a number in the KV cache. "auto": as the model computes (compute_bytes)."""
    name = cache_dtype if cache_dtype not in ("auto", "") else ""
    if not name:
        return compute_bytes(shape, dtype)
    return 1.0 if name.startswith("fp8") else BYTES_OF.get(name)


def compute_bytes(shape: Shape, dtype: str = "auto") -> float | None:
    """Bytes of a number that the model computes with, and keeps its weights in where they are not quantized.

    vLLM's "auto" is the checkpoint's own, but 16 bits for a float32 one (0.32, config/model.py, _resolve_auto_dtype).
    """
    if dtype not in ("auto", ""):
        return BYTES_OF.get(dtype)
    return 2.0 if shape.dtype in ("float32", "float") else BYTES_OF.get(shape.dtype)


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """A model's shape from its config.json (Hugging Face); None where it is not of attention alone, or not told."""
    inner = config.get("text_config")  # of a model that sees or hears, too
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    layers, heads, hidden = (_int(text.get(key)) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    kinds = text.get("layer_types")
    stateful = isinstance(kinds, list) and NOT_ATTENTION.intersection(map(str, kinds))
    if not layers or not heads or not hidden or stateful or any(text.get(key) is not None for key in UNEVEN):
        return None
    kv_heads = _int(text.get("num_key_value_heads")) or heads
    head_dim = _int(text.get("head_dim")) or hidden // heads
    rank, rope = _int(text.get("kv_lora_rank")), _int(text.get("qk_rope_head_dim"))
    dtype = next((str(of[key]) for of in (text, config) for key in ("torch_dtype", "dtype") if of.get(key)), "bfloat16")
    own = max(1, layers - (_int(text.get("num_kv_shared_layers")) or 0))  # Gemma 3n: the last ones use another's
    windowed, window = _windowed(text, own)
    words = _int(text.get("vocab_size"))
    ends = float((words or 0) * hidden * (1 if text.get("tie_word_embeddings") else 2))
    experts = any(_int(text.get(key)) for key in EXPERTS)
    parameters = None if experts or rank or not words else _parameters(
        text, layers, heads, kv_heads, head_dim, hidden, ends)
    return Shape(own, kv_heads, head_dim, dtype, parameters, rank + (rope or 0) if rank else None, windowed, window,
                 ends, experts)


def _windowed(text: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(layers that keep a window alone, its tokens). Chunks (Llama 4) are no window: vLLM keeps such layers whole."""
    window, kinds, model_type = _int(text.get("sliding_window")), text.get("layer_types"), str(text.get("model_type"))
    is_off = text.get("use_sliding_window", not model_type.startswith("qwen")) is False  # Qwen's is off unless told
    if not window or is_off:
        return 0, 0
    every = _int(text.get("sliding_window_pattern")) or FULL_EVERY.get(model_type)
    if isinstance(kinds, list):
        count = sum(kind == "sliding_attention" for kind in kinds[:layers])
    elif every:
        count = layers - layers // every
    else:  # all of them (Mistral 7B v0.1), or those above (Qwen2)
        count = max(0, layers - (_int(text.get("max_window_layers")) or 0))
    return (count, window) if count else (0, 0)


def _parameters(text: Mapping[str, Any], layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int,
                ends: float) -> float | None:
    """Of a dense model as Llama is built: embeddings, attention, three matrices of an MLP, norms; None: not told."""
    inner = _int(text.get("intermediate_size"))
    if not inner:
        return None
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    return float(ends + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden)


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST else None
