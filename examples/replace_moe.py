"""Train a model of transformers with other MoE layers in it, on one rank or under torchrun."""

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import moefw


def train(steps: int, world: int) -> float:
    """Train a small Mixtral to repeat a text, and return this rank's last loss."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=64, num_attention_heads=4, num_key_value_heads=2))
    moe = moefw.replace_moe(model, routing={"balance": [{"kind": "aux_loss"}]}, parallel={"experts": {"ep": world}})
    others = [parameter for name, parameter in model.named_parameters() if ".mlp.layer." not in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    text = torch.randint(64, (2, 16))
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        (loss + moe.losses()).backward()
        moe.average_gradients()
        for parameter in others if world > 1 else ():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    print(train(steps=100, world=dist.get_world_size() if dist.is_initialized() else 1))
