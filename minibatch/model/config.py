"""The shape of a Llama: what ``config.json`` says, checked once, in plain Python (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from minibatch.errors import CheckpointError, ConfigError, UnsupportedModelError

RopeKind = Literal["plain", "linear", "dynamic", "llama3", "divisors"]

SUPPORTED_ARCHITECTURE = "LlamaForCausalLM"
DEFAULT_ROPE_THETA = 10_000.0  # the first Llama's; the only value assumed when a file names none


@dataclass(frozen=True)
class RopeConfig:
    """How a position becomes an angle. ``minibatch.model.rotary`` does what this describes.

    ``kind`` is one of

    - ``plain``: frequency i of a head is ``theta ** (-2 i / head_dim)``;
    - ``linear``: every frequency divided by ``factor``;
    - ``dynamic``: theta grows with the prompt once it passes ``original_max_position`` (NTK);
    - ``llama3``: low frequencies divided by ``factor``, high ones kept, a ramp between;
    - ``divisors``: frequency i divided by ``divisors[i]``, which is how GGUF writes ``llama3``.

    Raises:
        ConfigError: for a value that the kind cannot work with.
    """

    kind: RopeKind = "plain"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    original_max_position: int | None = None  # `dynamic` and `llama3`
    low_freq_factor: float | None = None  # `llama3`
    high_freq_factor: float | None = None  # `llama3`
    divisors: tuple[float, ...] = ()  # `divisors`: one a frequency, head_dim / 2 in all

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ConfigError(f"rope kind {self.kind!r} is none of {', '.join(get_args(RopeKind))}")
        _check_positive("rope theta", self.theta)
        _check_positive("rope factor", self.factor)
        if self.kind in ("dynamic", "llama3"):
            _check_count("rope original_max_position", self.original_max_position)
        if self.kind == "dynamic" and self.factor < 1:
            raise ConfigError(f"dynamic rope needs a factor of at least 1, got {self.factor}")
        if self.kind == "llama3":
            _check_positive("rope low_freq_factor", self.low_freq_factor)
            _check_positive("rope high_freq_factor", self.high_freq_factor)
            if self.high_freq_factor <= self.low_freq_factor:
                raise ConfigError(
                    f"llama3 rope needs high_freq_factor ({self.high_freq_factor}) above "
                    f"low_freq_factor ({self.low_freq_factor})"
                )
        for divisor in self.divisors:
            _check_positive("rope divisor", divisor)

    @property
    def depends_on_prompt_length(self) -> bool:
        """True if two requests may rotate the same position differently.

        Their KV can then not be shared: a prefix cache must tell such requests apart.
        """
        return self.kind == "dynamic"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one Llama. Sizes are counts of elements, not bytes.

    ``head_dim`` is its own number: ``num_heads * head_dim`` need not be ``hidden_size``.

    Raises:
        ConfigError: for sizes that cannot work, alone or together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str = "float32"  # what the checkpoint was saved in; any other may be run

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            _check_count(name, getattr(self, name))
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads}): each KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, got {self.head_dim}: rope turns pairs")
        if self.rope.kind == "dynamic" and self.head_dim == 2:
            raise ConfigError("dynamic rope needs a head_dim above 2, got 2")
        if self.rope.kind == "divisors" and len(self.rope.divisors) != self.head_dim // 2:
            raise ConfigError(
                f"rope has {len(self.rope.divisors)} divisors, a head_dim of {self.head_dim} "
                f"needs {self.head_dim // 2}"
            )

    @property
    def num_parameters(self) -> int:
        """Weights in the model; a tied embedding counts once."""
        query_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (query_size + 2 * kv_size) + query_size * self.hidden_size
        if self.attention_bias:
            attention += query_size + 2 * kv_size + self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        layer = attention + mlp + 2 * self.hidden_size
        vocab_matrices = 1 if self.tie_word_embeddings else 2
        vocab = vocab_matrices * self.vocab_size * self.hidden_size
        return vocab + self.num_layers * layer + self.hidden_size

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of K and V, over all layers, that one token keeps alive."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence the checkpoint is meant for, rope scaling included."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @classmethod
    def from_dict(
        cls,
        config_json: Mapping[str, Any],
        generation_config_json: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Read a Hugging Face ``config.json``, of transformers 4 or 5.

        ``generation_config_json`` has the last word on the end tokens: chat models often list
        their turn-end id only there. Two absences have a meaning rather than a default: without
        ``num_key_value_heads`` each head has its own K and V, and without ``head_dim`` the heads
        divide ``hidden_size``.

        Raises:
            UnsupportedModelError: for another architecture or a rope kind that we do not run.
            CheckpointError: for a key that is missing.
            ConfigError: for a value that cannot work.
        """
        raw = config_json
        _refuse_what_we_do_not_run(raw)
        hidden_size, num_heads = _require(raw, "hidden_size"), _require(raw, "num_attention_heads")
        _check_count("hidden_size", hidden_size)
        _check_count("num_attention_heads", num_heads)
        head_dim = raw.get("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ConfigError(
                    f"hidden_size ({hidden_size}) is no multiple of num_attention_heads "
                    f"({num_heads}), and the config gives no head_dim"
                )
            head_dim = hidden_size // num_heads
        kv_heads = raw.get("num_key_value_heads")
        return cls(
            vocab_size=_require(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_require(raw, "intermediate_size"),
            num_layers=_require(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_require(raw, "max_position_embeddings"),
            rms_norm_eps=_require(raw, "rms_norm_eps"),
            rope=_read_rope(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            eos_token_ids=_read_eos(raw, generation_config_json or {}),
            bos_token_id=raw.get("bos_token_id"),
            torch_dtype=_read_dtype(raw),
        )


def _refuse_what_we_do_not_run(raw: Mapping[str, Any]) -> None:
    """Everything that would load and then speak nonsense is named and refused here."""
    architectures = raw.get("architectures") or []
    if SUPPORTED_ARCHITECTURE not in architectures:
        found = ", ".join(map(str, architectures)) or f"none (model_type {raw.get('model_type')!r})"
        raise UnsupportedModelError(
            f"the config's architecture is {found}; minibatch runs {SUPPORTED_ARCHITECTURE}"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act is {activation!r}; minibatch runs 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the weights are quantised (method {method!r}); minibatch loads float safetensors "
            "and GGUF files"
        )


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Read rope in both spellings.

    Old: ``rope_theta`` beside an optional ``rope_scaling`` with ``rope_type`` or ``type``.
    New: all of it inside ``rope_parameters``. Where both are given the inner value counts.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = _first_given(scaling.get("rope_theta"), raw.get("rope_theta"), DEFAULT_ROPE_THETA)
    kind = _first_given(scaling.get("rope_type"), scaling.get("type"), "default")
    partial = _first_given(
        scaling.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), 1.0
    )
    if partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor is {partial}; minibatch runs 1.0")

    if kind == "default":
        return RopeConfig("plain", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, _require(scaling, "factor", "rope"))
    if kind == "dynamic":
        # As transformers does: scaling begins where the position embeddings end, whatever
        # original_max_position_embeddings says.
        original = _require(raw, "max_position_embeddings")
        return RopeConfig("dynamic", theta, _require(scaling, "factor", "rope"), original)
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=_require(scaling, "factor", "rope"),
            original_max_position=_require(scaling, "original_max_position_embeddings", "rope"),
            low_freq_factor=_require(scaling, "low_freq_factor", "rope"),
            high_freq_factor=_require(scaling, "high_freq_factor", "rope"),
        )
    raise UnsupportedModelError(
        f"rope kind {kind!r}; minibatch runs 'default', 'linear', 'dynamic' and 'llama3'"
    )


def _read_eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)


def _read_dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")


def _first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _require(raw: Mapping[str, Any], key: str, where: str = "config") -> Any:
    if raw.get(key) is None:
        raise CheckpointError(f"the {where} settings of this checkpoint lack {key!r}")
    return raw[key]


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
