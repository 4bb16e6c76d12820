"""The memory budget of a model on its GPUs: weights + KV cache + temporaries + 20 % headroom (principle 2). Pure.

GB is 10^9 bytes. The KV line is ours: 2 × layers × KV heads × head size × bytes of a number, a token. The seed's own
line cannot be used: for Llama-2-7B (32 layers, 4,096 tokens, 32 sequences, 2 bytes) its printed numbers (128 in the
place of the hidden size) make 2.1 GB, its formula with the hidden size of 4,096 makes 68.7 GB, and its text says 8 GB.
For that model ours is 68.7 GB, too: each of its 32 heads keeps keys and values. A real vLLM holds exactly as many
tokens as ours says (tests/engine/test_vllm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.advise import gb, kv_bytes_per_token

HEADROOM = 0.2  # principle 2
TEMPORARIES_BYTES = 1.5e9  # principle 2: 1 to 2 GB
BYTES_OF: Mapping[str, float] = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0,
                                 "fp8": 1.0, "int8": 1.0, "int4": 0.5}
NOT_ATTENTION = frozenset({"linear_attention", "mamba", "recurrent"})  # layers that keep a state, not keys and values


class Shape(NamedTuple):
    """A model as its config.json has it. `latent`: numbers that a layer keeps of a token in place of both (MLA)."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    parameters: float | None = None
    latent: int | None = None


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
        return (f"weights {gb(self.weight_bytes)} + KV cache {gb(self.kv_bytes)} + temporaries"
                f" {gb(self.temporary_bytes)} on {each}, with {HEADROOM * 100:.0f} % headroom {gb(self.need_bytes)} of"
                f" {gb(self.gpu_bytes)}")


def weight_bytes(parameters: float, form: str = "bfloat16") -> float:
    """Parameters × bytes of one: BF16 2, FP8 and INT8 1, INT4 0.5. Raises KeyError: no such form."""
    return parameters * BYTES_OF[form]


def budget(*, weights: float, kv: float, gpu_bytes: float, gpus: int = 1,
           temporaries: float = TEMPORARIES_BYTES) -> Budget:
    """What weights and KV cache (bytes over all ranks) take of each of `gpus` GPUs of `gpu_bytes`."""
    return Budget(weights / gpus, kv / gpus, temporaries, gpu_bytes, gpus)


def least_gpus(*, weights: float, kv: float, gpu_bytes: float, most: int = 64) -> int | None:
    """The smallest power of two of GPUs on which it fits; None: not even on `most`."""
    sizes = (2**n for n in range(most.bit_length()))
    return next((n for n in sizes if budget(weights=weights, kv=kv, gpu_bytes=gpu_bytes, gpus=n).fits), None)


def kv_token_bytes(shape: Shape, dtype_bytes: float) -> float:
    """KV bytes of one token over all ranks."""
    if shape.latent:
        return shape.layers * shape.latent * dtype_bytes
    return kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, dtype_bytes)


def kv_dtype_bytes(shape: Shape, cache_dtype: str = "auto", dtype: str = "auto") -> float | None:
    """Bytes of a number in the KV cache. "auto": as the model computes; a float32 model is computed in 16 bits."""
    name = cache_dtype if cache_dtype not in ("auto", "") else dtype
    if name in ("auto", ""):
        return 2.0 if shape.dtype in ("float32", "float") else BYTES_OF.get(shape.dtype)
    return 1.0 if name.startswith("fp8") else BYTES_OF.get(name)


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """A model's shape from its config.json (Hugging Face); None where it is not of attention alone, or not told."""
    inner = config.get("text_config")  # of a model that sees or hears, too
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    layers, heads, hidden = (_int(text.get(key)) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    kinds = text.get("layer_types")
    stateful = isinstance(kinds, list) and NOT_ATTENTION.intersection(map(str, kinds))
    if not layers or not heads or not hidden or stateful:
        return None
    kv_heads = _int(text.get("num_key_value_heads")) or heads
    head_dim = _int(text.get("head_dim")) or hidden // heads
    rank, rope = _int(text.get("kv_lora_rank")), _int(text.get("qk_rope_head_dim"))
    dtype = next((str(of[key]) for of in (text, config) for key in ("torch_dtype", "dtype") if of.get(key)), "bfloat16")
    return Shape(layers, kv_heads, head_dim, dtype, _parameters(text, layers, heads, kv_heads, head_dim, hidden),
                 rank + (rope or 0) if rank else None)


def _parameters(text: Mapping[str, Any], layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int,
                ) -> float | None:
    """Of a dense model as Llama is built: embeddings, attention, three matrices of an MLP, norms; None: it is not."""
    inner, words = _int(text.get("intermediate_size")), _int(text.get("vocab_size"))
    if not inner or not words or any(key in text for key in ("num_experts", "n_routed_experts", "num_local_experts",
                                                             "kv_lora_rank")):
        return None
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    ends = words * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return float(ends + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden)


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
