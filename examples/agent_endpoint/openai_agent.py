"""An agent of one's own: OpenAI's client asks the model that is trained, and runs the calls that it makes."""

import openai


class Solver:
    """Made once in each engine process: all conversations share one HTTP client. most_calls: of the model."""

    def __init__(self, most_calls):
        self.client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each task", max_retries=0)
        self.most_calls = most_calls

    async def __call__(self, task):
        model = self.client.with_options(base_url=task.base_url, api_key=task.api_key)
        messages = [*task.messages]
        for _ in range(self.most_calls):
            answer = await model.chat.completions.create(model=task.model, messages=messages, tools=task.tools)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                output = await task.call_tool(call)  # in the sandbox
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        return message.content or ""
