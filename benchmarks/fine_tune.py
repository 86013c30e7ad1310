"""What adapters of LoRA cost a step, in time and memory, against training all weights and against ``peft``.

One process, one thread, fp32, a small Qwen3-MoE of ``transformers`` with random weights, the same tokens. Adapters are
beside attention and all experts, of the same rank. Ways alternate. Saved bytes are those of all tensors that autograd
saves for backward, without parameters, each storage once. A checkpoint holds what trains and the states of AdamW.

Results go to ``benchmarks/results/fine_tune.json``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefw
import record
from timing import race, racing

RANK = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
SMALL = {**SIZES, "hidden_size": 64, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
PEER = "peft"
OURS = "moefw, adapters"


def main() -> None:
    """Measure, print and write."""
    arguments = racing(__doc__, rounds=10).parse_args()
    torch.set_num_threads(1)
    shape = (1, 32) if arguments.dry else (2, 512)
    rows = measure(SMALL if arguments.dry else SIZES, shape, arguments.rounds)
    print(f"{'way':20} {'step, s':>8} {'of peft':>8} {'saved, MiB':>11} {'states, MiB':>12} {'checkpoint, MiB':>16}")
    for way, row in rows.items():
        mebibytes = [row[name] / 2**20 for name in ("saved_bytes", "state_bytes", "checkpoint_bytes")]
        figures = f"{mebibytes[0]:11.1f} {mebibytes[1]:12.2f} {mebibytes[2]:16.2f}"
        print(f"{way:20} {row['seconds']:8.3f} {row['time_of_peer']:8.3f} {figures}")
    measured = {"sizes": SIZES, "rank": RANK, "tokens": shape, "rounds": arguments.rounds, "ways": rows}
    print(record.write("fine_tune", measured, dry=arguments.dry))


def measure(sizes: Mapping[str, int], shape: tuple[int, int], rounds: int) -> dict[str, dict[str, Any]]:
    """Return what each way costs, after checking that all begin with the same logits."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, norm_topk_prob=True)).save_pretrained(base)
        ways = {
            "moefw, all weights": Way(moefw.from_pretrained(base)),
            OURS: Way(moefw.from_pretrained(base, adapter={"use": "lora", "rank": RANK, "alpha": 2 * RANK})),
            "transformers": Way(Qwen3MoeForCausalLM.from_pretrained(base)),
            PEER: Way(with_peft(Qwen3MoeForCausalLM.from_pretrained(base))),
        }
    ids = torch.randint(sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    logits = {name: way.logits(ids).detach() for name, way in ways.items()}
    for name, found in logits.items():
        error = (found - logits[PEER]).abs().max() / logits[PEER].abs().max()
        assert error < 1e-4, f"{name} computes something else: {error:.1e}"
    assert ways[OURS].num_trained == ways[PEER].num_trained, "adapters are of different sizes"
    saved = {name: way.saved_bytes(ids) for name, way in ways.items()}
    seconds = race({name: (lambda way=way: way.step(ids)) for name, way in ways.items()}, rounds, warm_up=2)
    return {
        name: {
            "seconds": round(seconds[name], 4),
            "time_of_peer": round(seconds[name] / seconds[PEER], 3),
            "saved_bytes": saved[name],
            "state_bytes": way.state_bytes(),
            "checkpoint_bytes": way.state_bytes() + 4 * way.num_trained,
            "trained": way.num_trained,
        }
        for name, way in ways.items()
    }


def with_peft(model: nn.Module) -> nn.Module:
    """Return a model with adapters of ``peft`` beside attention and experts."""
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=ATTENTION, target_parameters=EXPERTS)
    return get_peft_model(model, config)


class Way:
    """A model and its optimizer."""

    def __init__(self, model: Any) -> None:
        self.model = model.train()
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)

    @property
    def num_trained(self) -> int:
        """The number of values that train."""
        return sum(parameter.numel() for parameter in self.trained)

    def logits(self, ids_BS: Tensor) -> Tensor:
        """Return ``(B, S, V)``."""
        out = self.model(ids_BS)
        logits: Tensor = out if isinstance(out, Tensor) else out.logits
        return logits

    def loss(self, ids_BS: Tensor) -> Tensor:
        """Return the mean loss of the next token."""
        return F.cross_entropy(self.logits(ids_BS)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())

    def step(self, ids_BS: Tensor) -> None:
        """Train on a batch."""
        self.loss(ids_BS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def saved_bytes(self, ids_BS: Tensor) -> int:
        """Return the bytes that are saved for backward."""
        held = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        with saved_storages() as storages:
            loss = self.loss(ids_BS)
            nbytes = sum(nbytes for place, nbytes in storages.items() if place not in held)
            loss.backward()
        self.optimizer.zero_grad(set_to_none=True)
        return nbytes

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's states."""
        states = self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if value.dim())


@contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Yield the storages that autograd saves in this block, their bytes by address."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield storages


if __name__ == "__main__":
    main()
