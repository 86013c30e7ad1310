"""An MoE layer in a training loop of one's own, on one rank or under torchrun."""

import torch
import torch.distributed as dist

import moefw


def train(steps: int, world: int) -> float:
    """Train a layer to return the positive part of its tokens, and return this rank's last loss."""
    routing = {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}, {"kind": "z_loss"}]}
    parallel = {"experts": {"ep": world}}
    layer = moefw.build_layer(dim=16, expert_dim=32, num_experts=8, top_k=2, routing=routing, parallel=parallel)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    for _ in range(steps):
        x = torch.randn(4, 64, 16)
        output = layer(x)
        loss = (output.out - x.relu()).square().mean()
        (loss + output.losses).backward()
        layer.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        layer.update()
    return loss.item()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    print(train(steps=200, world=dist.get_world_size() if dist.is_initialized() else 1))
