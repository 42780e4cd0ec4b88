"""A reward of one's own: the right answer earns a point, and a little more when the response is short."""

from ctpo_megatron.rewards import Reward, last_boxed


def score(trajectory, prompt, *, weight, budget):
    """weight: of brevity. budget: tokens at which nothing is earned for it."""
    right = float(last_boxed(trajectory.final_text) == prompt.answer)
    short = max(0.0, 1 - trajectory.response_tokens / budget)
    failed = any(call.status != "success" for call in trajectory.tool_calls)
    return Reward(
        right + weight * right * short,
        components={"right": right, "short": short},
        metrics={"failed_tools": failed},
    )
