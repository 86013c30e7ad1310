"""Train with rewards: sample texts with one engine, weigh log-probabilities with moefw, and stream the weights back."""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefw

WORDS, ANSWER = 32, 8


def engine_of_rollouts() -> Qwen3MoeForCausalLM:
    """A small model of transformers, in the place of a server such as vLLM or SGLang. The same on all ranks."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, vocab_size=WORDS, head_dim=8)).eval()


@torch.no_grad()
def roll_out(engine: Qwen3MoeForCausalLM, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Texts (B, S + 1), and the experts (B, S, L, K) of all tokens but the last. A server returns both."""
    texts = engine.generate(
        prompts, do_sample=True, top_k=0, min_new_tokens=ANSWER, max_new_tokens=ANSWER, pad_token_id=0
    )
    router_logits = engine(input_ids=texts[:, :-1], output_router_logits=True).router_logits
    routes = torch.stack([of_layer.topk(2).indices for of_layer in router_logits], dim=1)
    return texts, routes.unflatten(0, (len(texts), -1))


def train(steps: int, world: int) -> float:
    """Reward words of the first quarter of all, and return the share of others in this rank's last answers."""
    engine = engine_of_rollouts()
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        if world > 1:
            dist.broadcast_object_list(folders)  # transformers writes on rank 0
        engine.save_pretrained(folders[0], save_original_format=False)  # by the names of the engine, which stream later
        if world > 1:
            dist.barrier()
        model = moefw.from_pretrained(folders[0], parallel={"experts": {"ep": world}}, train={"micro_batch": 1})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        prompts = torch.randint(1, WORDS, (16, 4))
        texts, routes = roll_out(engine, prompts)
        rewards = (texts[:, -ANSWER:] < WORDS // 4).float().mean(1)
        labels = texts[:, 1:].clone()
        labels[:, : prompts.shape[1] - 1] = -100  # what was asked is not trained on

        log_probs = model.log_probs(texts[:, :-1], labels, routes=routes)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
        (-advantages.unsqueeze(1) * log_probs).mean().backward()
        model.average_gradients()
        optimizer.step()
        optimizer.zero_grad()

        weights = engine.state_dict()
        for name, tensor in moefw.stream_pretrained(model):
            weights[name].copy_(tensor)
    differing, given = torch.tensor([*model.route_differences().values()]).sum(0).tolist()
    print(f"routers would have made {differing} of {given} choices otherwise")
    return 1.0 - rewards.mean().item()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    print(train(steps=30, world=dist.get_world_size() if dist.is_initialized() else 1))
