"""What SmolLM2 pays for each token of a play, through caches that keep all of it or only a window: losses, recorded.

    python benchmarks/window_steps.py

writes ``data/results/streaming/window-steps.json``, which the window explorer of the book steps through.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import kvlab
from kvlab.evaluate import losses
from kvlab.measure.bench import provenance
from kvlab.resources import resource

OUT = Path(__file__).resolve().parents[1] / "data" / "results" / "streaming" / "window-steps.json"
TOKENS, CHUNK = 1024, 64
SLOTS, SINKS = (64, 128, 256), (0, 1, 4)


def main() -> None:
    """Read the play through every cache and write what each token cost."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lm = kvlab.load("smollm2", device="cpu", dtype="float32")
    ids = lm.tokenizer.encode(resource("texts", "macbeth.txt").read_text("utf8"))[:TOKENS]
    kinds = ["contiguous", *(kind_of(sinks, slots) for slots in SLOTS for sinks in SINKS)]
    paid = {}
    for kind in kinds:
        paid[kind] = losses(lm.model, torch.tensor(ids), cache=kind, chunk=CHUNK)
        print(f"{kind:16} perplexity {paid[kind].double().mean().exp().item():6.2f}")
    result = {
        **provenance(torch.device("cpu")),
        "command": "python benchmarks/window_steps.py",
        "model": lm.name,
        "dtype": "float32",
        "text": "data/texts/macbeth.txt",
        "chunk": CHUNK,
        "tokens": lm.tokenizer.tokens(ids),
        # Thousandths of a nat for each token but the first: pages carry them.
        "losses": {kind: (1000 * each).round().int().tolist() for kind, each in paid.items()},
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(in_lines(result), "utf8")


def in_lines(result: dict[str, Any]) -> str:
    """A result as JSON with a line for each list, which numbers on lines of their own would make longer.

    Args:
        result: the losses are lists by cache.
    """
    short = {name: json.dumps(each, separators=(",", ":")) for name, each in result.items() if name != "losses"}
    rows = ",\n  ".join(
        f"{json.dumps(kind)}: {json.dumps(each).replace(' ', '')}" for kind, each in result["losses"].items()
    )
    lines = [f" {json.dumps(name)}: {each}" for name, each in short.items()]
    return "{\n" + ",\n".join([*lines, f' "losses": {{\n  {rows}\n }}']) + "\n}\n"


def kind_of(sinks: int, slots: int) -> str:
    """The cache that keeps so many tokens, the sinks among them.

    Args:
        sinks: of these.
        slots: tokens in all.
    """
    return f"streaming:{sinks}+{slots - sinks}"


if __name__ == "__main__":
    main()
