"""The kernels alone in a plain loop of torch: pip install ./kernels; python examples/kernels/plain_loop.py.

A GRU learns to write letters in the order of the alphabet. Its reward is the share of letters that are next in order.
"""

import torch
from torch import nn

from ctpo_kernels import SUMS, fused_linear_ctpo, linear_log_probs

LETTERS, LENGTH, GROUPS, SAMPLES = 8, 12, 8, 8
"""Size of the vocabulary; letters of an answer; prompts of a step, and answers to each."""


class Policy(nn.Module):
    """[B, T] letters in, [B, T, H] hidden states out; `head` makes logits of them."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.body = nn.Embedding(LETTERS, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, letters, state=None):
        return self.body(self.embed(letters), state)


@torch.no_grad()
def sample(policy, first):
    """[B, 1] -> [B, 1 + LENGTH]: the prompt's letter and the answer."""
    letters, state = [first], None
    for _ in range(LENGTH):
        hidden, state = policy(letters[-1], state)
        letters.append(torch.multinomial(policy.head(hidden[:, -1]).softmax(-1), 1))
    return torch.cat(letters, 1)


def main(steps=24, seed=0):
    """Returns the mean reward of the first and of the last step."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    means = []
    for step in range(steps):
        letters = sample(policy, torch.randint(LETTERS, (GROUPS, 1)).repeat_interleave(SAMPLES, 0))
        inputs, labels = letters[:, :-1], letters[:, 1:].contiguous()
        rewards = (labels == (inputs + 1) % LETTERS).float().mean(1).view(GROUPS, SAMPLES)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        labels, mask = labels.flatten(), torch.ones(labels.numel())
        ends = torch.arange(len(inputs) + 1) * LENGTH
        with torch.no_grad():
            old = linear_log_probs(policy(inputs)[0].flatten(0, 1), policy.head.weight, labels, mask=mask)
        for _ in range(2):  # optimizer steps of a batch: in the second one the window acts
            hidden = policy(inputs)[0].flatten(0, 1)
            loss, stats, _ = fused_linear_ctpo(hidden, policy.head.weight, labels, old, mask, advantages, ends)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clipped = stats.sums[SUMS.index("clip_high")] / stats.sums[SUMS.index("loss_tokens")]
        means.append(rewards.mean().item())
        if step % 8 == 0:
            print(f"step {step}: reward {means[-1]:.2f}, clipped {clipped:.3f}")
    return means[0], means[-1]


if __name__ == "__main__":
    main()
