"""A first reward: an answer in a box earns half a point, and up to another half for a short response."""

from ctpo_megatron.rewards import Reward, last_boxed


def score(trajectory, prompt, *, budget):
    """0 without an answer; between 0.5 and 1 with one. budget: tokens at which brevity earns nothing."""
    boxed = float(last_boxed(trajectory.final_text) is not None)
    short = max(0.0, 1 - trajectory.response_tokens / budget)
    return Reward(boxed * (1 + short) / 2, components={"boxed": boxed, "short": short})
