"""A peer that the tests' own interpreter runs: our training core under the name `specforge`, so the losses are equal.

It is started as a script, like the peers' own.
"""

import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "peers")]

from serving import serve  # noqa: E402
from step_drafthouse import Drafthouse  # noqa: E402

from bench.step_cases import Tables, drafter_of  # noqa: E402
from drafters.eagle3 import Options  # noqa: E402
from drafters.layers import Shape  # noqa: E402


class Fake(Drafthouse):
    name, version = "specforge", "0.0.1"

    def __init__(self, opening, tables):
        if opening["style"] == "own":  # a peer has first weights and options of its own
            own = Options(draft_vocab_size=len(tables["ids"]), depth=opening["depth"], deepen_at=0.0)
            fresh = drafter_of(own, Shape(**opening["shape"]), Tables(**tables), opening["seed"])
            tables |= {f"weights.{name}": tensor for name, tensor in fresh.state_dict().items()}
            opening["options"] = asdict(own)
        super().__init__(opening, tables)


if __name__ == "__main__":
    serve(Fake)
