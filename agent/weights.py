"""What an engine makes of a checkpoint's weights: in which form it holds them, and how many bytes they take. Pure.

What the checkpoint says of itself (`quantization_config` of its config.json) comes before the flag: vLLM takes a flag
that names the same form, or a faster kernel for it, and refuses another. A flag on a checkpoint that is not quantized
quantizes it while it is loaded: its linear layers and experts; embedding and output stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from agent.budget import Shape, compute_bytes

# Bytes of a parameter that is quantized while it is loaded, its scales included: 32 numbers share a byte of scale in
# MXFP8 and MXFP4. vLLM 0.32 (config/quantization.py) and before; SGLang's and TGI's where they have the same names.
AT_LOAD: Mapping[str, float] = {
    "fp8": 1.0, "fp8_per_tensor": 1.0, "fp8_per_block": 1.0, "fp8_per_channel": 1.0, "w8a8_fp8": 1.0, "w8a8_int8": 1.0,
    "eetq": 1.0, "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32, "bitsandbytes": 0.5, "bitsandbytes-nf4": 0.5}
# The same of experts alone: a dense model stays as it is.
EXPERTS_AT_LOAD: Mapping[str, float] = {
    "experts_int8": 1.0, "int8_per_channel_weight_only": 1.0, "nvfp4_per_token": 0.5 + 1 / 16}
BOTH = ("fp8", "w8a8", "w4a8", "smooth", "int8", "nvfp4", "modelopt")  # words of forms that quantize activations, too
WEIGHTS_ALONE = ("weight_only", "weightonly", "experts_int8", "a16", "int4_awq")  # and of those that do not
ASK_CONFIG = frozenset({"compressed-tensors", "quark", "torchao", "online", "inc", "auto-round"})  # may be either


class Form(NamedTuple):
    """How weights are held. `name`: "" where they are as the model computes. `activations`: None: only config.json
    tells. `at_load`: quantized while they are loaded, not in the checkpoint.
    """

    name: str
    activations: bool | None = False
    at_load: bool = False


class Held(NamedTuple):
    """Bytes of all weights in the GPUs' memory, and by what that is known."""

    size_bytes: float
    by: str


def form_of(flag: str, config: Mapping[str, Any] | None) -> Form:
    """By the engine's flag ("" where it has none) and the model's config.json (None: not to be read)."""
    flag = flag.lower()
    told = _quantization(config)
    if told is not None:
        method = str(told.get("quant_method") or flag or "quantized").lower()
        return Form(flag or method, _activations(method, told))
    if flag in ("", "none"):
        return Form("")
    return Form(flag, None if flag in ASK_CONFIG else _both(flag),
                config is not None and (flag in AT_LOAD or flag in EXPERTS_AT_LOAD))


def _quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a config.json says of it, where it is a model that sees or hears, too, or of an old compressed-tensors."""
    inner = (config or {}).get("text_config")
    for of in (config or {}, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            told = of.get(key)
            if isinstance(told, Mapping) and told:
                return told
    return None


def kv_form(config: Mapping[str, Any] | None) -> str:
    """In which form a checkpoint wants its KV cache held: "fp8", "int8", …; "": as the model computes.

    `kv_cache_scheme` of compressed-tensors and ModelOpt, or ModelOpt's `kv_cache_quant_algo`.
    """
    told = _quantization(config) or {}
    scheme, algorithm = told.get("kv_cache_scheme"), told.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping) and scheme:
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        return "fp8" if (kind, bits) == ("float", 8) else f"{kind}{bits}"
    return algorithm.lower() if isinstance(algorithm, str) and algorithm.lower() != "none" else ""


def _activations(method: str, told: Mapping[str, Any]) -> bool:
    groups = told.get("config_groups")  # compressed-tensors, NVIDIA's ModelOpt
    if isinstance(groups, Mapping):
        return _any_has(groups.values(), "input_activations")
    if method == "quark":
        layers = [one for key in ("layer_quant_config", "layer_type_quant_config")
                  if isinstance(of := told.get(key), Mapping) for one in of.values()]
        return _any_has([told.get("global_quant_config"), *layers], "input_tensors")
    if "act_bits" in told:  # Intel's
        return isinstance(told["act_bits"], int) and told["act_bits"] < 16
    how = told.get("quant_algo") or told.get("quant_type")  # ModelOpt's; torchao's
    return _both(f"{method} {how}".lower() if how else method)


def _any_has(groups: Iterable[object], key: str) -> bool:
    return any(isinstance(one, Mapping) and bool(one.get(key)) for one in groups)


def _both(words: str) -> bool:
    """Whether a form quantizes activations, too, by its name."""
    return "dynamicactivation" in words or (any(word in words for word in BOTH)
                                            and not any(word in words for word in WEIGHTS_ALONE))


def held(shape: Shape | None, form: Form, *, files_bytes: float | None = None, dtype: str = "auto") -> Held | None:
    """What the weights take once they are loaded, by their files, else by the number of parameters; None: not known.

    `dtype`: as the engine was told. Without a shape the files are taken as they are.
    """
    size = None if shape is None else compute_bytes(shape, dtype)
    if shape is None or size is None:
        return None if files_bytes is None else Held(files_bytes, "its files")
    if files_bytes is not None and form.name and not form.at_load:
        return Held(files_bytes, "its files")
    if files_bytes is not None:
        stored = _stored_bytes(shape, files_bytes)
        all_bytes = files_bytes * size / stored
        by = "its files" if stored == size else f"its files of {stored * 8:.0f} bits a number, held in {size * 8:.0f}"
    elif shape.parameters is not None and (not form.name or form.at_load):
        all_bytes, by = shape.parameters * size, f"{shape.parameters:,.0f} parameters"
    else:
        return None
    part = AT_LOAD.get(form.name) or (EXPERTS_AT_LOAD.get(form.name) if shape.experts else None)
    if not form.at_load or part is None:
        return Held(all_bytes, by)
    ends = shape.ends * size
    return Held(max(0.0, all_bytes - ends) * part / size + ends, f"{by}, quantized to {form.name} at load")


def _stored_bytes(shape: Shape, files_bytes: float) -> float:
    """Of a number in files that are not quantized: by their size where the parameters are known, else by the config."""
    if shape.parameters:
        return 4.0 if files_bytes > 3 * shape.parameters else 2.0
    return 4.0 if shape.dtype in ("float32", "float") else 2.0
