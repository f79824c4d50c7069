"""What an engine is started with: written by the parent, read by `engine_run`, so that both mean the same."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

VLLM_CONNECTOR: Final = "MooncakeStoreConnector"
OUR_CONNECTOR: Final = "MooncrateConnector"
OUR_MODULE: Final = "mooncrate.vllm"


@dataclass(frozen=True)
class EngineSettings:
    """An engine without a connector, unless one of the methods below says which."""

    num_blocks: int = 32
    """Blocks of KV cache to allocate, the null block included."""
    max_model_len: int = 1024
    max_step_tokens: int = 640
    """A cold prefill of 641 to 767 tokens is computed as 640 and the rest, just as a warm one computes the rest on 640
    from the pool: the same shapes, so the same floats to the last bit."""
    max_num_seqs: int = 4
    is_hybrid: bool = False
    """Several KV cache groups; vLLM turns them off beside a connector unless it is told otherwise."""
    connector: str | None = None
    connector_module: str | None = None
    """Where the connector's class is found; None for those that vLLM knows by name."""
    kv_role: str = "kv_both"
    load_failure_policy: str = "fail"
    """``recompute``: a prefix that cannot be loaded after all is computed; ``fail``: its request ends with an error."""
    extra_config: dict[str, Any] = field(default_factory=dict)
    data_module: str | None = None
    """Module whose classes replace those of the data module of vLLM's connector."""
    has_evidence: bool = False
    """Watch which classes the connector of vLLM 0.27.1 uses; see `connector_probe`."""

    def with_vllm_connector(self, **changes: Any) -> Self:  # noqa: ANN401 - any field
        """The same with vLLM's own connector."""
        return replace(self, connector=VLLM_CONNECTOR, connector_module=None, **changes)

    def with_our_connector(self, **changes: Any) -> Self:  # noqa: ANN401 - any field
        """The same with ours."""
        return replace(self, connector=OUR_CONNECTOR, connector_module=OUR_MODULE, **changes)

    def to_json(self) -> str:
        """All fields, on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        return cls(**json.loads(text))
