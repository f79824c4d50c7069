"""What an engine of the demo is told when it is started."""

import json
from dataclasses import asdict, dataclass

from mooncrate.demo.workload import Workload


@dataclass(frozen=True)
class Settings:
    """All that an engine is told."""

    name: str
    master_address: str
    device: str
    segment_bytes: int
    """Memory to contribute to the pool."""
    is_saving: bool
    """Whether this engine computed the prompt, so that its cache is filled."""
    is_tampering: bool
    """Whether one byte of it is spoiled, for the test that this is noticed."""
    workload: Workload

    def to_json(self) -> str:
        """Returns the settings as the argument of the engine's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "workload": Workload(**fields["workload"])})
