"""A filter that takes turns with slow tool calls out of the loss."""


def slow_calls(trajectory, prompt, *, seconds):
    """Returns the turns whose tool call took longer than `seconds`."""
    return {call.turn for call in trajectory.tool_calls if call.wall_s > seconds}
